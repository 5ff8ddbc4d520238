"""Small releases to import: any folder of tensors, and the tensors of a model with random numbers."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

from k3train.checkpoint.hf_names import entries, names, parameters
from k3train.checkpoint.hf_vision import vision_names
from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import Config, ModelConfig, VisionConfig
from k3train.model.k3 import blueprint
from k3train.parallel import rules

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


VISION = VisionConfig(
    num_layers=2,
    hidden_size=8,
    intermediate_size=24,
    num_heads=2,
    qkv_size=12,
    patch_size=2,
    pos_emb_height=3,
    pos_emb_width=5,
)


def vision_config(vision: VisionConfig, text_width: int) -> dict:
    """The part `vision_config` of a `config.json`."""
    return {
        "vt_num_hidden_layers": vision.num_layers,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "qkv_hidden_size": vision.qkv_size,
        "patch_size": vision.patch_size,
        "init_pos_emb_height": vision.pos_emb_height,
        "init_pos_emb_width": vision.pos_emb_width,
        "init_pos_emb_time": vision.pos_emb_time,
        "merge_kernel_size": [vision.merge_size, vision.merge_size],
        "mm_hidden_size": vision.hidden_size,
        "text_hidden_size": text_width,
        "norm_type": "rmsnorm",
    }


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


def stored(tensors: dict[str, np.ndarray], model: ModelConfig, layout: str) -> dict[str, np.ndarray]:
    """In the dtypes of a release: bfloat16, and float32 where it keeps that."""
    specs = names(model, layout)
    return {
        name: array.astype(ml_dtypes.bfloat16) if name in specs and specs[name].dtype == "BF16" else array
        for name, array in tensors.items()
    }


def vision_tensors(vision: VisionConfig, text_width: int) -> dict[str, np.ndarray]:
    """Random tensors of a tower and projector, bfloat16."""
    draw = np.random.default_rng(9)
    return {
        name: draw.normal(size=spec.shape).astype(ml_dtypes.bfloat16)
        for name, spec in vision_names(vision, text_width).items()
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


def make_run(
    folder, config: Config, values: dict[str, np.ndarray], *, mesh: Mesh | None = None, steps: tuple[int, ...] = (0,)
):
    """A run folder with these weights, as training leaves one; step n holds them plus n. Returns the folder."""
    plan, known = blueprint(config.model), parameters(config.model)

    def tree(template, step, prefix=""):
        return {
            key: tree(value, step, f"{prefix}{key}/") if isinstance(value, dict) else place(f"{prefix}{key}", step)
            for key, value in template.items()
        }

    def place(path, step):
        array = values[path] + np.float32(step)
        return array if mesh is None else jax.device_put(array, NamedSharding(mesh, rules.spec(known[path].axes)))

    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in steps:
            model = {"params": tree(plan.abstract_params, step), "bias": tree(plan.abstract_bias, step)}
            checkpoints.save(step, {"model": model}, {})
    (folder / "config.json").write_text(to_json(config))
    return folder
