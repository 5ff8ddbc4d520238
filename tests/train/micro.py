"""The smallest model with every mechanism, and packed rows for it."""

from dataclasses import replace

import numpy as np

from k3train.config.schema import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    kda_layers=(0, 1),
    mla_layers=(2,),
    dense_layers=(0,),
    moe_layers=(1, 2),
    intermediate_size=48,
    kda_num_heads=2,
    kda_head_dim=16,
    kda_gate_rank=8,
    mla_num_heads=2,
    mla_q_lora_rank=16,
    mla_kv_lora_rank=16,
    mla_qk_nope_head_dim=16,
    mla_qk_rope_head_dim=8,
    mla_v_head_dim=16,
    attn_res_block_size=2,
    num_experts=16,
    num_experts_per_token=4,
    moe_intermediate_size=16,
    moe_latent_size=24,
    init_fan_in=True,
    remat="sublayer",
)
#: Two layers that hold every mechanism between them.
TWO_LAYERS = replace(
    MODEL, num_layers=2, kda_layers=(0,), mla_layers=(1,), dense_layers=(0,), moe_layers=(1,), attn_res_block_size=1
)


def config(*, mesh: dict[str, int] | None = None, micro_batches: int = 1, **optim) -> Config:
    return Config(
        model=MODEL,
        mesh=MeshConfig(**(mesh or {})),
        data=DataConfig(seq_len=40, batch_size=16, micro_batches=micro_batches),
        optim=OptimConfig(balance_bins=200, **optim),
        num_steps=10,
    )


def batch(seed: int = 0, rows: int = 16, seq: int = 40) -> dict[str, np.ndarray]:
    """Rows of two or three documents, some with padding; uneven numbers of trained tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, seq), dtype=np.int32)
    cuts = np.sort(rng.integers(1, seq, (rows, 3)), axis=1)
    segments = 1 + (np.arange(seq)[None, :, None] >= cuts[:, None, :2]).sum(-1)
    segments = np.where(np.arange(seq) >= np.maximum(cuts[:, 2:], seq // 2), 0, segments).astype(np.int32)
    inside = np.pad((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (0, 1)))
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "targets": np.where(inside, targets, 0).astype(np.int32),
        "loss_mask": inside.astype(np.float32),
    }
