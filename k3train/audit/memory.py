"""Bytes of the weights by storage format, and of the decode state of one sequence (docs/k3.md sections 1.7 and 1.8)."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp

from k3train.audit import flops
from k3train.audit.params import count, projector, vision_tower
from k3train.checkpoint.hf_names import entries
from k3train.config.schema import Config, ModelConfig
from k3train.ops.mx import BLOCK

#: Tokens of context that the tables show: 8k, 256k, 1M.
CONTEXTS = (2**13, 2**18, 2**20)
FORMATS = """\
float32: every stored parameter in 4 bytes; bfloat16: 2 bytes, and 4 for those that a release keeps in float32 (router
biases, short convolutions, A_log, dt_bias, KDA's output norms); mxfp4: the same, but routed experts in 4 bits and a
scale byte per 32 inputs"""


def weight_bytes(config: Config) -> dict[str, int | None]:
    """Bytes of all stored parameters under `FORMATS`; None where experts' inputs do not come in blocks of 32."""
    model = config.model
    layout = "k3" if model.kda_a_log_length > model.kda_num_heads else "kimi_linear"
    beside = vision_tower(config.vision) + projector(config.vision, model.hidden_size)
    plain, experts, packed, packable = 2 * beside, 0, 0, True
    for entry in entries(model, layout):
        rows = prod(entry.shape[:-1])
        size = rows * entry.shape[-1]
        if entry.num_experts:
            experts += 2 * size * entry.num_experts
            packed += (rows * entry.shape[-1] // 2 + rows * (entry.shape[-1] // BLOCK)) * entry.num_experts
            packable &= entry.shape[-1] % BLOCK == 0
        else:
            plain += size * (4 if entry.rule.float32 else 2)
    return {
        "float32": 4 * count(config).stored,
        "bfloat16": plain + experts,
        "mxfp4": plain + packed if packable else None,
    }


@dataclass(frozen=True)
class SequenceState:
    """Bytes that one sequence keeps between tokens, KDA states in float32, the rest in the compute dtype."""

    cache_per_token: int  # latents of the MLA layers
    kda_state: int
    conv_tails: int
    all_mla_per_token: int  # of a model of the same depth whose layers are all MLA

    @property
    def fixed(self) -> int:
        """What does not grow with the sequence."""
        return self.kda_state + self.conv_tails

    def total(self, context: int) -> int:
        """Bytes after `context` tokens."""
        return self.fixed + context * self.cache_per_token


def sequence_state(model: ModelConfig) -> SequenceState:
    """By formula; `model/cache.py` makes the arrays."""
    item = jnp.dtype(model.compute_dtype).itemsize
    H, K, taps = model.kda_num_heads, model.kda_head_dim, model.kda_conv_size
    latent = (model.mla_kv_lora_rank + model.mla_qk_rope_head_dim) * item
    num_kda = len(model.kda_layers)
    return SequenceState(
        cache_per_token=latent * len(model.mla_layers),
        kda_state=4 * H * K * K * num_kda,
        conv_tails=item * 3 * H * K * (taps - 1) * num_kda,
        all_mla_per_token=latent * model.num_layers,
    )


def report(config: Config) -> dict[str, Any]:
    """What `k3train plan --json` prints about bytes of weights and of decoding."""
    state = sequence_state(config.model)
    return {
        "weight_bytes": weight_bytes(config),
        "weight_formats": " ".join(FORMATS.split()),
        "decode": {
            "dtype": config.model.compute_dtype,
            "cache_bytes_per_token": state.cache_per_token,
            "all_mla_cache_bytes_per_token": state.all_mla_per_token,
            "kda_state_bytes": state.kda_state,
            "conv_tail_bytes": state.conv_tails,
            "state_bytes_per_sequence": state.fixed,
            "contexts": [
                {
                    "tokens": context,
                    "bytes": state.total(context),
                    "all_mla_bytes": state.all_mla_per_token * context,
                    "flops_per_token": flops.decode(config, context).forward,
                }
                for context in CONTEXTS
            ],
        },
    }


def text(config: Config) -> str:
    """`report` for people."""
    weights, state = weight_bytes(config), sequence_state(config.model)
    stored = "; ".join(f"{name} {'not possible' if size is None else f'{size:,}'}" for name, size in weights.items())
    parts = f"KDA states in float32 {state.kda_state:,}, conv tails {state.conv_tails:,}"
    lines = [
        f"bytes of the weights: {stored}",
        f"{FORMATS}\n",
        f"bytes of a sequence, decoding in {config.model.compute_dtype}:",
        f"{state.cache_per_token:,} a token (MLA latents) and {state.fixed:,} of fixed size ({parts});",
        f"the same depth of MLA layers alone: {state.all_mla_per_token:,} a token",
        f"{'context':>10}  {'bytes':>18}  {'MLA layers alone':>18}  {'GFLOP a new token':>18}",
    ]
    lines += [
        f"{context:>10,}  {state.total(context):>18,}  {state.all_mla_per_token * context:>18,}"
        f"  {flops.decode(config, context).forward / 1e9:>18,.4g}"
        for context in CONTEXTS
    ]
    return "\n".join(lines)
