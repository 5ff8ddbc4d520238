"""Decode state: what each layer must remember of the tokens it has seen (docs/k3.md sections 1.8 and 5)."""

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


def kda_cache(config: ModelConfig, batch: int) -> KdaCache:
    H, K = config.kda_num_heads, config.kda_head_dim
    tail = jnp.zeros((batch, config.kda_conv_size - 1, 3 * H * K), config.compute_dtype)
    return KdaCache(tail, jnp.zeros((batch, H, K, K), jnp.float32))


def mla_cache(config: ModelConfig, batch: int, capacity: int) -> MlaCache:
    width = config.mla_kv_lora_rank + config.mla_qk_rope_head_dim
    return MlaCache(jnp.zeros((batch, capacity, width), config.compute_dtype))
