"""The learning rate: linear warmup, then a cosine to the final value (docs/k3.md section 3.4)."""

from math import ceil

import jax
import jax.numpy as jnp
import optax


def warmup_cosine(peak: float, final: float, warmup_fraction: float, num_steps: int) -> optax.Schedule:
    """Learning rate by step, 0-based: `schedule(t)` is used by the update that makes step t into step t + 1.

    Step t of the W warmup steps uses `peak * (t + 1) / W`: the first step already moves, the last warmup step has the
    peak. The last step, `num_steps - 1`, and every step after it use exactly `final`. A run of one step uses `peak`.

    Args:
        warmup_fraction: share of `num_steps` that warms up, rounded up; at least one step is left for the end.

    Raises:
        ValueError: `num_steps` below 1, or a fraction outside 0..1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not 0 <= warmup_fraction <= 1:
        raise ValueError(f"optim.warmup_fraction must lie between 0 and 1, got {warmup_fraction}")
    warmup = min(ceil(warmup_fraction * num_steps), num_steps - 1)
    top = max(warmup - 1, 0)  # the step that has the peak
    last = num_steps - 1

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rising = peak * (step + 1) / max(warmup, 1)
        done = jnp.clip((step - top) / max(last - top, 1), 0, 1)
        falling = jnp.where(done == 1, final, final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)))
        return jnp.where(step < warmup, rising, falling)

    return schedule
