"""Kimi-Linear-48B-A3B as released: 49.1B parameters, the ancestor of K3 (docs/k3.md section 1.9).
Training values are lineage or ours.

Run:   k3train plan --config configs/kimi_linear_48b.py
Needs: 64 devices as the mesh stands.
"""

from k3train.config.load import new_config

CONFIG = "confirmed [config of Kimi-Linear-48B-A3B]"
CHECKPOINT = "confirmed [checkpoint of Kimi-Linear-48B-A3B]"
PAPER = "confirmed [Kimi Linear]"
OURS = "undisclosed: our choice"

NUM_LAYERS = 27
MLA_FROM_1 = (4, 8, 12, 16, 20, 24, 27)  # full_attn_layers as released, 1-based
MLA_LAYERS = tuple(layer - 1 for layer in MLA_FROM_1)


def get_config():
    cfg = new_config()  # every knob and its default: k3train/config/schema.py
    cfg.model.update(
        vocab_size=163_840,
        pad_token_id=163_839,
        hidden_size=2304,
        num_layers=NUM_LAYERS,
        kda_layers=tuple(layer for layer in range(NUM_LAYERS) if layer not in MLA_LAYERS),
        mla_layers=MLA_LAYERS,
        dense_layers=(0,),
        moe_layers=tuple(range(1, NUM_LAYERS)),
        rms_norm_eps=1e-5,
        activation="swiglu",
        intermediate_size=9216,
        kda_num_heads=32,
        kda_head_dim=128,
        kda_conv_size=4,
        kda_gate="softplus",
        kda_gate_rank=128,
        kda_output_gate="low_rank",
        mla_num_heads=32,
        mla_q_lora_rank=0,
        mla_kv_lora_rank=512,
        mla_qk_nope_head_dim=128,
        mla_qk_rope_head_dim=64,
        mla_v_head_dim=128,
        mla_norm_eps=1e-6,
        mla_output_gate=False,
        attn_res="none",
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        moe_latent_size=0,
        moe_renormalize=True,
        moe_routed_scaling_factor=2.446,
        compute_dtype="bfloat16",
        remat="sublayer",
    )
    cfg.mesh.update(data=2, expert=32)
    cfg.data.update(
        source="parquet",
        path="corpus/*.parquet",
        tokenizer="tiktoken.model",
        seq_len=4096,
        batch_size=8192,
        micro_batches=32,
    )
    cfg.optim.update(peak_lr=1.1e-3, final_lr=1.1e-4)
    cfg.checkpoint.every = 500
    cfg.eval.every = 1000
    cfg.num_steps = 170_000
    return cfg


SOURCES = {
    **{
        f"model.{name}": CONFIG
        for name in (
            "vocab_size", "pad_token_id", "hidden_size", "num_layers", "kda_layers", "mla_layers", "dense_layers",
            "moe_layers", "rms_norm_eps", "activation", "intermediate_size", "kda_num_heads", "kda_head_dim",
            "kda_conv_size", "kda_output_gate", "mla_num_heads", "mla_q_lora_rank", "mla_kv_lora_rank",
            "mla_qk_nope_head_dim", "mla_qk_rope_head_dim", "mla_v_head_dim", "mla_output_gate", "attn_res",
            "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_latent_size",
            "moe_renormalize", "moe_routed_scaling_factor",
        )
    },
    "model.kda_gate": PAPER,
    "model.kda_gate_rank": CHECKPOINT,
    "model.kda_a_log_length": CHECKPOINT,
    "model.compute_dtype": CHECKPOINT,
    "model.mla_norm_eps": "confirmed [official code]",
    "model.kda_chunk_size": "lineage guess [FLA]",
    **{
        f"model.{name}": "unused by this model"
        for name in (
            "situ_beta", "situ_linear_beta", "kda_gate_lower_bound", "attn_res_block_size", "moe_latent_norm",
        )
    },
    "model.init_std": OURS,
    "model.embedding_init_std": OURS,
    "model.init_fan_in": OURS,
    "model.remat": OURS,
    **{f"mesh.{name}": OURS for name in ("pipeline", "data", "context", "expert", "tensor", "expert_transport")},
    "mesh.expert_balance": OURS,
    "data.source": OURS,
    "data.path": OURS,
    "data.tokenizer": CHECKPOINT,
    "data.seq_len": PAPER,
    "data.batch_size": "confirmed [Kimi Linear]: 32M tokens",
    "data.micro_batches": OURS,
    "optim.peak_lr": PAPER,
    "optim.final_lr": OURS,
    "optim.warmup_fraction": OURS,
    "optim.weight_decay": OURS,
    "optim.grad_clip": OURS,
    "optim.matrices": "undisclosed: our choice, as in K3",
    "optim.muon_heads": "undisclosed: our choice, as in K3",
    "optim.muon_kv_b": OURS,
    **{
        f"optim.muon_{name}": "lineage guess [Moonlight]"
        for name in ("momentum", "nesterov", "ns_steps", "coefficients", "scale")
    },
    **{f"optim.adam_{name}": "lineage guess [Moonlight]" for name in ("b1", "b2", "eps")},
    "optim.qk_clip_threshold": "lineage guess [K2]",
    "optim.balance": "undisclosed: our choice, as in K3",
    "optim.balance_bins": OURS,
    "optim.balance_ema": OURS,
    "optim.balance_sign_step": "unused by this model",
    "quant.experts": OURS,
    "phase": OURS,
    "num_steps": "confirmed [Kimi Linear]: 5.7T tokens",
    "checkpoint.every": OURS,
    "eval.every": OURS,
}  # fmt: skip

#: Released values that no knob holds, and why nothing here depends on them (docs/k3.md section 1.9).
RELEASED = {
    "model_type": ("kimi_linear", "name in the released file"),
    "tie_word_embeddings": (False, "the head is always its own matrix"),
    "eos_token_id": (163_586, "belongs to the tokenizer"),
    "model_max_length": (1_048_576, "no positional table exists; the row length is data.seq_len"),
    "rope_theta": (10_000.0, "present in the file, read by nothing"),
    "moe_router_activation_func": ("sigmoid", "the only router score"),
    "first_k_dense_replace": (1, "written out in model.dense_layers and model.moe_layers"),
    "learning rate schedule": ("warmup, stable, decay", "k3train follows K3's cosine"),
}
