"""Choice of experts per token (report section 2.3.3, equation 13; docs/k3.md sections 2.5 and 3.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Routes(NamedTuple):
    """Result of `route`; P tokens, E experts, K chosen."""

    ids_PK: Array  # int32, distinct, best biased score first
    weights_PK: Array  # float32 combine weights from the unbiased scores
    scores_PE: Array  # float32 sigmoid scores, unbiased
    cutoff_P: Array  # float32, the (K+1)-th largest biased score: what a score had to beat. No gradient.


def route(
    logits_PE: Array,
    bias_E: Array,
    *,
    num_selected: int,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> Routes:
    """Scores, chosen experts, combine weights and the cutoff that quantile balancing needs.

    The bias takes part in the choice only, gets no gradient, and is *added*. Of equal biased scores the lower index
    wins. NaN counts as the largest score, so a token with NaN logits gets distinct ids within range and NaN weights:
    no other token is touched, and the step shows as non-finite.

    Args:
        logits_PE: float32 router logits; any number of leading axes.
        bias_E: float32 selection bias.
        num_selected: K. With K = E no (K+1)-th score exists; the cutoff is then the smallest biased score.
        renormalize: divide the chosen scores by their sum.
        scaling_factor: factor on the weights, which sum to it when renormalised.

    Raises:
        ValueError: logits or bias are not float32, or `num_selected` is not within 1..E.
    """
    num_experts = logits_PE.shape[-1]
    if not 1 <= num_selected <= num_experts:
        raise ValueError(f"num_experts_per_token is {num_selected}, accepted: 1 to num_experts = {num_experts}")
    if logits_PE.dtype != jnp.float32 or bias_E.dtype != jnp.float32:
        raise ValueError(f"the router works in float32, got logits {logits_PE.dtype} and bias {bias_E.dtype}")
    scores_PE = jax.nn.sigmoid(logits_PE)
    biased_PE = jax.lax.stop_gradient(scores_PE) + jax.lax.stop_gradient(bias_E)
    # The order of NaN depends on its sign bit and on the backend: make it the largest everywhere.
    biased_PE = jnp.where(jnp.isnan(biased_PE), jnp.inf, biased_PE)
    ranked_PK, ids_PK = _top_k(biased_PE, min(num_selected + 1, num_experts))
    ids_PK = ids_PK[..., :num_selected]
    weights_PK = jnp.take_along_axis(scores_PE, ids_PK, axis=-1)
    if renormalize:
        weights_PK = weights_PK / (jnp.sum(weights_PK, axis=-1, keepdims=True) + 1e-20)
    return Routes(ids_PK, weights_PK * scaling_factor, scores_PE, ranked_PK[..., -1])


def _top_k(x_PE: Array, k: int) -> tuple[Array, Array]:
    """`lax.top_k` in the one form that XLA:CPU does not turn into a sort of whole rows, which takes 20 times as long.

    That form has two axes, and no slice of the results can be merged with its own: hence the barriers. There are two of
    them because XLA of jax 0.10.2 aborts on one over both results.
    """
    values_PK, ids_PK = jax.lax.top_k(x_PE.reshape(-1, x_PE.shape[-1]), k)
    values_PK, ids_PK = jax.lax.optimization_barrier(values_PK), jax.lax.optimization_barrier(ids_PK)
    shape = (*x_PE.shape[:-1], k)
    return values_PK.reshape(shape), ids_PK.reshape(shape)
