"""Kimi K3 as released: 2.78T parameters, 104.2B activated (docs/k3.md section 1). Training values are lineage or ours.

Run:   k3train plan --config configs/k3.py         parameters, bytes per device; needs no accelerator
       k3train show-config --config configs/k3.py  every value with its source
Needs: 64 devices as the mesh stands, larger ones than there are; what fits where: docs/k3_on_a_pod.md. The vision tower
       is counted here, and is not trained yet.
"""

from k3train.config.load import new_config

CONFIG = "confirmed [config]"
CHECKPOINT = "confirmed [checkpoint]"
CODE = "confirmed [official code]"
OURS = "undisclosed: our choice"

NUM_LAYERS = 93
MLA_FROM_1 = (*range(4, 93, 4), 93)  # full_attn_layers as released, 1-based: 24 layers, the last two adjacent
MLA_LAYERS = tuple(layer - 1 for layer in MLA_FROM_1)


def get_config():
    cfg = new_config()  # every knob and its default: k3train/config/schema.py
    cfg.model.update(
        vocab_size=163_840,
        pad_token_id=163_839,
        hidden_size=7168,
        num_layers=NUM_LAYERS,
        kda_layers=tuple(layer for layer in range(NUM_LAYERS) if layer not in MLA_LAYERS),
        mla_layers=MLA_LAYERS,
        dense_layers=(0,),
        moe_layers=tuple(range(1, NUM_LAYERS)),
        rms_norm_eps=1e-5,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        intermediate_size=33_792,
        kda_num_heads=96,
        kda_head_dim=128,
        kda_conv_size=4,
        kda_gate="bounded",
        kda_gate_lower_bound=-5.0,
        kda_gate_rank=128,
        kda_output_gate="full",
        kda_a_log_length=128,
        mla_num_heads=96,
        mla_q_lora_rank=1536,
        mla_kv_lora_rank=512,
        mla_qk_nope_head_dim=128,
        mla_qk_rope_head_dim=64,
        mla_v_head_dim=128,
        mla_norm_eps=1e-6,
        mla_output_gate=True,
        attn_res="block",
        attn_res_block_size=12,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        moe_latent_size=3584,
        moe_latent_norm=True,
        moe_renormalize=True,
        moe_routed_scaling_factor=1.0,
        init_std=0.02,
        embedding_init_std=0.02,
        compute_dtype="bfloat16",
        remat="sublayer",
    )
    cfg.vision.num_layers = 27
    cfg.mesh.update(data=2, expert=32)
    cfg.data.update(
        source="parquet",
        path="corpus/*.parquet",
        tokenizer="tiktoken.model",
        seq_len=8192,
        batch_size=8192,
        micro_batches=128,
    )
    cfg.optim.update(peak_lr=2e-4, final_lr=2e-5)
    cfg.checkpoint.every = 500
    cfg.eval.every = 1000
    cfg.num_steps = 231_000
    return cfg


SOURCES = {
    **{
        f"model.{name}": CONFIG
        for name in (
            "vocab_size", "pad_token_id", "hidden_size", "num_layers", "kda_layers", "mla_layers", "dense_layers",
            "moe_layers", "rms_norm_eps", "activation", "situ_beta", "situ_linear_beta", "intermediate_size",
            "kda_num_heads", "kda_head_dim", "kda_conv_size", "kda_gate_lower_bound", "kda_output_gate",
            "mla_num_heads", "mla_q_lora_rank", "mla_kv_lora_rank", "mla_qk_nope_head_dim", "mla_qk_rope_head_dim",
            "mla_v_head_dim", "mla_output_gate", "attn_res_block_size", "num_experts", "num_experts_per_token",
            "num_shared_experts", "moe_intermediate_size", "moe_latent_size", "moe_latent_norm", "moe_renormalize",
            "moe_routed_scaling_factor", "init_std", "embedding_init_std", "compute_dtype",
        )
    },
    "model.kda_gate": "confirmed [report 2.1.1]",
    "model.attn_res": "confirmed [report 2.2]",
    "model.kda_gate_rank": CHECKPOINT,
    "model.kda_a_log_length": CHECKPOINT,
    "model.mla_norm_eps": CODE,
    "model.kda_chunk_size": "lineage guess [FLA]",
    "model.init_fan_in": OURS,
    "model.remat": OURS,
    **{
        f"vision.{name}": CONFIG
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_heads", "qkv_size", "patch_size", "pos_emb_height",
            "pos_emb_width", "pos_emb_time", "merge_size",
        )
    },
    **{f"mesh.{name}": OURS for name in ("pipeline", "data", "context", "expert", "tensor", "expert_transport")},
    "mesh.expert_balance": "confirmed [report 5.2.1]",
    "data.source": OURS,
    "data.path": OURS,
    "data.tokenizer": CHECKPOINT,
    "data.seq_len": "confirmed [report 3.3]",
    "data.batch_size": "lineage guess [K2]: 67M tokens",
    "data.micro_batches": OURS,
    "optim.peak_lr": "lineage guess [K2]",
    "optim.final_lr": "lineage guess [K2]",
    "optim.warmup_fraction": "confirmed [report 3.3]",
    "optim.weight_decay": "confirmed [report 3.3]",
    "optim.grad_clip": OURS,
    "optim.matrices": "confirmed [report 2.5]",
    "optim.muon_heads": "confirmed [report 2.5]",
    "optim.muon_kv_b": OURS,
    **{
        f"optim.muon_{name}": "lineage guess [Moonlight]"
        for name in ("momentum", "nesterov", "ns_steps", "coefficients", "scale")
    },
    **{f"optim.adam_{name}": "lineage guess [Moonlight]" for name in ("b1", "b2", "eps")},
    "optim.qk_clip_threshold": "lineage guess [K2]",
    "optim.balance": "confirmed [report 2.3.3]",
    "optim.balance_bins": "lineage guess [report App. D]: an example there",
    "optim.balance_ema": OURS,
    "optim.balance_sign_step": "unused by this model",
    "quant.experts": "confirmed [report 4.1.4]: from SFT on, not before",
    "phase": "confirmed [report 3.3]",
    "num_steps": "lineage guess [K2]: 15.5T tokens",
    "checkpoint.every": OURS,
    "eval.every": OURS,
}  # fmt: skip

#: Released values that no knob holds, and why nothing here depends on them (docs/k3.md sections 1.1 to 1.4).
RELEASED = {
    "architectures": ("KimiK3ForConditionalGeneration", "name of the released class"),
    "model_type": ("kimi_k3, text_config: kimi_linear", "name in the released file"),
    "tie_word_embeddings": (False, "the head is always its own matrix"),
    "bos_token_id": (163_584, "belongs to the tokenizer"),
    "eos_token_id": (163_586, "belongs to the tokenizer"),
    "ignore_index": (-100, "rows carry a loss mask"),
    "media_placeholder_token_id": (163_605, "belongs to the tokenizer"),
    "image_placeholder": ("<|kimi_image_placeholder|>", "text marker replaced before tokenising"),
    "max_position_embeddings": (1_048_576, "no positional table exists; the row length is data.seq_len"),
    "use_cache": (True, "decoding always caches"),
    "num_key_value_heads": (96, "equal to the MLA heads"),
    "mla_use_nope": (True, "MLA is never rotated"),
    "moe_router_activation_func": ("sigmoid", "the only router score"),
    "topk_method": ("noaux_tc", "the bias selects only; there is no auxiliary loss"),
    "use_grouped_topk, num_expert_group, topk_group": ((True, 1, 1), "groups of one: grouping does nothing"),
    "first_k_dense_replace, moe_layer_freq": ((1, 1), "written out in model.dense_layers and model.moe_layers"),
    "num_nextn_predict_layers": (0, "the multi-token prediction layer is not in the release"),
    "rope_theta, head_dim": (None, "absent from the file; class defaults that nothing reads"),
    "vision_config.pos_emb_type": ("divided_fixed", "the tower is not built yet"),
    "vision_config.pos_emb_interpolation_mode": ("bilinear", "the tower is not built yet"),
    "vision_config.norm_type": ("rmsnorm", "the tower is not built yet"),
    "vision_config.attn_bias, linear_bias, patch_embed_proj_bias": (False, "no biases are counted"),
    "vision_config.mlp_type, activation_func": (("mlp2", "gelu_pytorch_tanh"), "the tower is not built yet"),
    "vision_config.merge_type": ("sd2_tpool", "the tower is not built yet"),
    "vision_config.mm_projector_type, projector_hidden_act": (("patchmergerv2", "gelu"), "not built yet"),
    "vision_config.projector_ln_eps": (1e-5, "the projector is not built yet"),
    "quantization_config": ("mxfp4-pack-quantized, groups of 32", "format of the released expert weights"),
    "generation_config.max_length": (1_048_576, "asked for at generation"),
}
