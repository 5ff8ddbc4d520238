"""Token table and output head: untied, no bias, no scale (docs/k3.md section 2.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import AdamW, Maker, Normal
from k3train.model.init import matrix
from k3train.parallel.rules import shard

TABLE = AdamW(decay=True, source="[Moonlight] embedding and head by AdamW")


class Embedding(nnx.Module):
    """Lookup; the padding row stays zero and gets no gradient."""

    def __init__(self, make: Maker, config: ModelConfig):
        self.pad = config.pad_token_id
        shape = (config.vocab_size, config.hidden_size)
        self.table = make(shape, ("vocab", "embed"), init=Normal(config.embedding_init_std), route=TABLE)
        if self.pad >= 0:
            self.table[...] = self.table[...].at[self.pad].set(0.0)

    def __call__(self, tokens_BS: jax.Array, dtype: jnp.dtype) -> jax.Array:
        # the table's shards are brought together, not the tokens' gradients of all devices on each of them
        table = shard(self.table[...], "vocab", None)
        x_BSD = jnp.take(table, tokens_BS, axis=0).astype(dtype)
        if self.pad >= 0:
            x_BSD = jnp.where((tokens_BS == self.pad)[..., None], 0, x_BSD)
        return shard(x_BSD, "act_batch", "act_seq", "act_embed")


class Head(nnx.Module):
    """Output projection; the training loss takes the matrix itself (ops/cross_entropy.py)."""

    def __init__(self, make: Maker, config: ModelConfig):
        shape = (config.hidden_size, config.vocab_size)
        self.matrix = make(shape, ("embed", "vocab"), init=matrix(config, config.hidden_size), route=TABLE)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        logits = jnp.einsum(
            "BSD,DX->BSX", x_BSD, self.matrix[...].astype(x_BSD.dtype), preferred_element_type=jnp.float32
        )
        return shard(logits, "act_batch", "act_seq", "act_vocab")
