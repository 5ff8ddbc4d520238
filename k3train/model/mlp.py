"""Gated MLP of the dense layer and of the shared experts (docs/k3.md section 2.6)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker, Muon
from k3train.model.init import matrix
from k3train.ops.situ import situ_glu, swiglu
from k3train.parallel.rules import shard

WHOLE = "[lineage guess] whole matrix by Muon"

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def activation(config: ModelConfig) -> Activation:
    """f(gate, up) of every MLP of the model."""
    if config.activation == "swiglu":
        return swiglu
    return lambda gate, up: situ_glu(gate, up, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class MLP(nnx.Module):
    """down(f(gate x, up x))."""

    def __init__(self, make: Maker, config: ModelConfig, inner: int):
        D, F = config.hidden_size, inner
        into, out = Muon(("embed",), ("mlp",), WHOLE), Muon(("mlp",), ("embed",), WHOLE)
        self.activation = activation(config)
        self.gate = make((D, F), ("embed", "mlp"), init=matrix(config, D), route=into)
        self.up = make((D, F), ("embed", "mlp"), init=matrix(config, D), route=into)
        self.down = make((F, D), ("mlp", "embed"), init=matrix(config, F), route=out)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        dtype = x_BSD.dtype
        gate_BSF = jnp.einsum("BSD,DF->BSF", x_BSD, self.gate[...].astype(dtype))
        up_BSF = jnp.einsum("BSD,DF->BSF", x_BSD, self.up[...].astype(dtype))
        # both are kept for the backward pass anyway; without the barrier XLA on a CPU computes the activation's
        # derivative inside the transposition that the weight gradient needs, several times slower
        gate_BSF, up_BSF = jax.lax.optimization_barrier((gate_BSF, up_BSF))
        inner_BSF = shard(self.activation(gate_BSF, up_BSF), "act_batch", "act_seq", "act_mlp")
        y_BSD = jnp.einsum("BSF,FD->BSD", inner_BSF, self.down[...].astype(dtype))
        return shard(y_BSD, "act_batch", "act_seq", "act_embed")
