"""Small releases to import: any folder of tensors, and the tensors of a model with random numbers."""

import json
from dataclasses import replace

import numpy as np
from safetensors.numpy import save_file

from k3train.checkpoint.hf_names import entries, names, parameters
from k3train.config.schema import ModelConfig

K3 = ModelConfig(
    vocab_size=24,
    pad_token_id=23,
    hidden_size=16,
    num_layers=4,
    kda_layers=(0, 1, 3),
    mla_layers=(2,),
    dense_layers=(0,),
    moe_layers=(1, 2, 3),
    intermediate_size=24,
    kda_num_heads=2,
    kda_head_dim=4,
    kda_gate_rank=4,
    kda_a_log_length=128,
    mla_num_heads=2,
    mla_q_lora_rank=6,
    mla_kv_lora_rank=8,
    mla_qk_nope_head_dim=4,
    mla_qk_rope_head_dim=2,
    mla_v_head_dim=6,
    attn_res_block_size=2,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=32,
    moe_latent_size=32,
)
KIMI = replace(
    K3,
    kda_gate="softplus",
    kda_output_gate="low_rank",
    kda_a_log_length=0,
    mla_q_lora_rank=0,
    mla_output_gate=False,
    attn_res="none",
    attn_res_block_size=4,
    activation="swiglu",
    num_shared_experts=1,
    moe_latent_size=0,
    moe_routed_scaling_factor=2.446,
)


def released_config(model: ModelConfig) -> dict:
    """What `config.json` says of a model, K3's form or Kimi-Linear's."""
    k3 = model.attn_res == "block"
    linear = {
        "full_attn_layers": [i + 1 for i in model.mla_layers],
        "kda_layers": [i + 1 for i in model.kda_layers],
        "num_heads": model.kda_num_heads,
        "head_dim": model.kda_head_dim,
        "short_conv_kernel_size": model.kda_conv_size,
    }
    text = {
        "model_type": "kimi_linear",
        "vocab_size": model.vocab_size,
        "pad_token_id": model.pad_token_id,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.intermediate_size,
        "rms_norm_eps": model.rms_norm_eps,
        "hidden_act": "situ" if k3 else "silu",
        "num_attention_heads": model.mla_num_heads,
        "q_lora_rank": model.mla_q_lora_rank or None,
        "kv_lora_rank": model.mla_kv_lora_rank,
        "qk_nope_head_dim": model.mla_qk_nope_head_dim,
        "qk_rope_head_dim": model.mla_qk_rope_head_dim,
        "v_head_dim": model.mla_v_head_dim,
        "num_experts": model.num_experts,
        "num_experts_per_token": model.num_experts_per_token,
        "num_shared_experts": model.num_shared_experts,
        "moe_intermediate_size": model.moe_intermediate_size,
        "moe_renormalize": True,
        "routed_scaling_factor": model.moe_routed_scaling_factor,
        "first_k_dense_replace": 1,
        "linear_attn_config": linear,
    }
    if not k3:
        return text
    linear |= {"use_full_rank_gate": True, "gate_lower_bound": model.kda_gate_lower_bound}
    text |= {
        "activation_situ_beta": model.situ_beta,
        "activation_situ_linear_beta": model.situ_linear_beta,
        "mla_use_output_gate": True,
        "attn_res_block_size": model.attn_res_block_size,
        "routed_expert_hidden_size": model.moe_latent_size,
        "latent_moe_use_norm": True,
    }
    return {"model_type": "kimi_k3", "text_config": text}


def random_parameters(model: ModelConfig, seed=0) -> dict[str, np.ndarray]:
    """Every parameter and router bias by path: numbers that bfloat16 holds, all different enough to tell them apart."""
    draw = np.random.default_rng(seed)
    return {
        path: draw.integers(-255, 256, leaf.shape).astype(np.float32) / 64 for path, leaf in parameters(model).items()
    }


def release(model: ModelConfig, layout: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The released tensors, float32 and not packed."""
    return {
        name: entry.to_released([values[path][entry.where(i, e)] for i, path in enumerate(entry.paths)])
        for entry in entries(model, layout)
        for e, name in enumerate(entry.names())
    }


def packed_release(model: ModelConfig, tensors: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """The tensors with random MXFP4 experts instead, and what these decode to, number by number."""
    draw, out, decoded = np.random.default_rng(5), dict(tensors), {}
    for name, spec in names(model, "k3", packed=True).items():
        if name.endswith("weight_packed"):
            plain = name.removesuffix("_packed")
            rows, half = spec.shape
            nibbles = draw.integers(0, 16, (rows, 2 * half))
            scale = draw.integers(110, 140, (rows, half // 16)).astype(np.uint8)
            del out[plain]
            out[name] = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
            out[f"{plain}_scale"] = scale
            magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * np.where(nibbles > 7, -1.0, 1.0)
            decoded[plain] = (magnitude * 2.0 ** (np.repeat(scale.astype(int), 32, axis=1) - 127)).astype(np.float32)
    return out, decoded


def write(folder, config: dict, tensors: dict[str, np.ndarray], *, shards=1):
    """A release on disk; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
