"""RMSNorm with the released order of casts (docs/k3.md section 2.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.core.param import AdamW, Constant, Maker

GAIN = AdamW(decay=False, source="[Moonlight] norm gains by AdamW, no decay")


class RMSNorm(nnx.Module):
    """y = gain * cast(x / rms(x)): the cast to the input dtype comes before the gain [official code]."""

    def __init__(self, make: Maker, width: int, eps: float):
        self.eps = eps
        self.gain = make((width,), ("norm",), init=Constant(1.0), route=GAIN)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.gain[...].astype(x.dtype) * (wide * scale).astype(x.dtype)
