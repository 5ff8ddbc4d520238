"""From logits to the next token: greedy, temperature, nucleus."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

#: What stands in place of a token id where the logits are not finite.
NONFINITE = -2


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Row r of a batch draws its n-th token from a key made of (seed, r, n) alone: the same seed gives the same text, and
    the neighbours of a row do not matter.

    Args:
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_p: draw from the likeliest tokens that together hold this share of the probability; 1: from all.
        seed: of the draws.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: must be 0 (always the likeliest token) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1 (every token)")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: must be from 0 to {2**32 - 1}")


def draw(
    logits_BX: jax.Array, seed: jax.Array, drawn: jax.Array, temperature: jax.Array, top_p: jax.Array,
    *, first_row: jax.Array | int = 0,
) -> jax.Array:  # fmt: skip
    """The next token of every row, int32 [B]; NONFINITE where a logit is NaN or infinite.

    Args:
        logits_BX: float32.
        seed, temperature, top_p: as in `Sampling`, scalars.
        drawn: how many tokens each row has drawn before, int32 scalar.
        first_row: number of the first row, int32 scalar.
    """

    def random():
        # the largest logit is 0 and stays 0: a tiny temperature turns into greedy, not into NaN
        scaled_BX = (logits_BX - jnp.max(logits_BX, axis=-1, keepdims=True)) / jnp.maximum(temperature, 1e-30)
        kept_BX = jnp.where(nucleus(scaled_BX, top_p), scaled_BX, -jnp.inf)
        rows = first_row + jnp.arange(logits_BX.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), drawn))(rows)
        return jax.vmap(jax.random.categorical)(keys, kept_BX).astype(jnp.int32)

    def likeliest():
        return jnp.argmax(logits_BX, axis=-1).astype(jnp.int32)

    finite_B = jnp.all(jnp.isfinite(logits_BX), axis=-1)
    return jnp.where(finite_B, jax.lax.cond(temperature > 0, random, likeliest), NONFINITE)


def nucleus(logits_BX: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """The fewest likeliest tokens whose probabilities add up to `top_p`, as a mask [B, X].

    Never empty; tokens as likely as the last one in are in as well.
    """
    probs_BX = jax.nn.softmax(logits_BX, axis=-1)
    sorted_BX = -jnp.sort(-probs_BX, axis=-1)
    before_BX = jnp.cumsum(sorted_BX, axis=-1) - sorted_BX
    # the first is in however small top_p is, and at 1 the rounding of the sum leaves nobody out
    in_BX = (before_BX <= 0) | (before_BX < top_p) | (jnp.asarray(top_p) >= 1)
    smallest_B1 = jnp.min(jnp.where(in_BX, sorted_BX, jnp.inf), axis=-1, keepdims=True)
    return probs_BX >= smallest_B1
