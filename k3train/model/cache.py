"""Decode state: what each layer must remember of the tokens it has seen (docs/k3.md sections 1.8 and 5).

Equal layers share a stack, so every array of a stored cache has a leading axis N. A KDA layer is handed its own entry;
an MLA layer the whole stack and its number in it, because taking out and putting back all latents of a layer for one
new token would cost more than the token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.config.schema import ModelConfig


class KdaCache(NamedTuple):
    """Fixed size, whatever the context."""

    tail: jax.Array  # [B, taps - 1, 3 * heads * head_dim]: last inputs of the short convolutions, compute dtype
    state: jax.Array  # [B, heads, key, value] float32


class MlaCache(NamedTuple):
    """One latent per token: normalised key/value latent, then the extra key shared by all heads."""

    latent: jax.Array  # [B, capacity, kv_lora_rank + qk_rope_head_dim], compute dtype


class MlaLayer(NamedTuple):
    """One layer's entry of a stack."""

    latent: jax.Array  # [N, B, capacity, kv_lora_rank + qk_rope_head_dim], of all layers of the stack
    layer: int | jax.Array


LayerCache = KdaCache | MlaLayer


def take(stack: KdaCache | MlaCache, layer: int | jax.Array) -> LayerCache:
    """What layer number `layer` of a stack is handed."""
    if isinstance(stack, MlaCache):
        return MlaLayer(stack.latent, layer)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stack)


def put(stack: KdaCache | MlaCache, used: LayerCache, layer: int | jax.Array) -> KdaCache | MlaCache:
    """The stack after that layer."""
    if isinstance(used, MlaLayer):
        return MlaCache(used.latent)
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, layer, 0), stack, used)


def kda_cache(config: ModelConfig, batch: int) -> KdaCache:
    H, K = config.kda_num_heads, config.kda_head_dim
    tail = jnp.zeros((batch, config.kda_conv_size - 1, 3 * H * K), config.compute_dtype)
    return KdaCache(tail, jnp.zeros((batch, H, K, K), jnp.float32))


def mla_cache(config: ModelConfig, batch: int, capacity: int) -> MlaCache:
    width = config.mla_kv_lora_rank + config.mla_qk_rope_head_dim
    return MlaCache(jnp.zeros((batch, capacity, width), config.compute_dtype))
