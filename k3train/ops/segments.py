"""Document borders inside a packed row, as the operators with memory (KDA, short convolution) need them."""

import jax
import jax.numpy as jnp


def segment_runs(segment_ids_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers the documents of each row in order of appearance.

    Args:
        segment_ids_BS: int32, 0 = padding, wherever it stands.

    Returns:
        run_BS: int32, 0 for the first document, one more at each real token whose previous real token has another
            id; padding takes the number of the document it follows (0 before the first).
        real_BS: bool, whether the position holds a token.
    """
    real_BS = segment_ids_BS != 0
    position_BS = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BS.shape, 1)
    last_BS = jax.lax.cummax(jnp.where(real_BS, position_BS, -1), axis=1)
    previous_BS = jnp.pad(last_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before_BS = jnp.take_along_axis(segment_ids_BS, jnp.maximum(previous_BS, 0), axis=1)
    starts_BS = real_BS & (previous_BS >= 0) & (id_before_BS != segment_ids_BS)
    return jnp.cumsum(starts_BS.astype(jnp.int32), axis=1), real_BS
