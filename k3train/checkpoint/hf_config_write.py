"""Our model configuration as `config.json` of a release, read back before it is believed (docs/k3.md 1.1 to 1.4)."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict
from typing import Any, NamedTuple

from k3train.checkpoint.hf_config import ACTIVATIONS, FIXED, MODEL_TYPES, SAME, read_tree
from k3train.config.check import ConfigError
from k3train.config.schema import ModelConfig
from k3train.ops.mx import BLOCK

#: The released value. Its list of what is not packed leaves some out, so the second half is ours; a reader that goes
#: by the list needs them, one that goes by the tensors' names does not mind.
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "float", "group_size": BLOCK, "strategy": "group", "symmetric": True,
                "dynamic": False, "observer": "minmax", "observer_kwargs": {}, "actorder": None,
                "block_structure": None, "scale_dtype": "torch.uint8", "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
        r"re:.*block_sparse_moe\.gate$", r"re:.*routed_expert_(down|up)_proj.*", "re:.*_res_proj.*",
    ],
}  # fmt: skip

#: Knobs that a release does not hold, because the weights or the program decide them.
_NOT_RELEASED = frozenset(
    "init_std embedding_init_std init_fan_in kda_a_log_length kda_chunk_size compute_dtype remat".split()
)
#: What transformers' KimiLinear has no switch for, and the value it stands for.
_TRANSFORMERS = {
    "attn_res": "none",
    "activation": "swiglu",
    "kda_gate": "softplus",
    "kda_output_gate": "low_rank",
    "mla_output_gate": False,
    "moe_latent_size": 0,
}


class TokenIds(NamedTuple):
    """Ids that servers look up in the file; None for none."""

    bos: int | None = None
    eos: int | list[int] | None = None


def layout_of(model: ModelConfig) -> str:
    """The layout that a model fits: K3's where anything of it is K3's."""
    return "kimi_linear" if all(getattr(model, knob) == value for knob, value in _TRANSFORMERS.items()) else "k3"


def with_quantization(tree: dict[str, Any], packed: bool) -> dict[str, Any]:
    """A released `config.json` with or without `quantization_config`; what it has is kept."""
    tree = deepcopy(tree)
    level = tree["text_config"] if isinstance(tree.get("text_config"), dict) else tree
    if packed:
        level.setdefault("quantization_config", deepcopy(QUANTIZATION))
    else:
        level.pop("quantization_config", None)
    return tree


def new_config(model: ModelConfig, layout: str, ids: TokenIds, max_positions: int) -> dict[str, Any]:
    """`config.json` of a model, without quantization.

    Args:
        layout: key of `hf_names.LAYOUTS`.
        max_positions: longest sequence to name; nothing in the model depends on it.

    Raises:
        ConfigError: the file cannot say what the model is; all such knobs are named.
    """
    text = _text(model, layout, ids)
    text["model_max_length" if layout != "k3" else "max_position_embeddings"] = max_positions
    if layout == "k3":
        shared = {key: text[key] for key in ("dtype", "tie_word_embeddings", "pad_token_id")}
        shared |= {"bos_token_id": ids.bos, "eos_token_id": ids.eos}
        names = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": MODEL_TYPES[True]}
        text = names | shared | {"text_config": text}
    elif layout == "transformers":
        _refuse(f"transformers has no such {MODEL_TYPES[False]}", _apart(model, _TRANSFORMERS))
    refuse_another_model(text, model, f"config.json of layout {layout}")
    return text


def refuse_another_model(tree: dict[str, Any], model: ModelConfig, where: str, ignore: Collection[str] = ()) -> None:
    """Raises ConfigError where a `config.json` reads back as something else than `model`; the knobs are named."""
    _refuse(f"{where} cannot say this model", _apart(model, said(read_tree(tree, where, ignore).model)))


def said(model: ModelConfig) -> dict[str, Any]:
    """What a released file says of a model: every knob that has an effect on the function of the weights."""
    idle = {
        "kda_gate_lower_bound": model.kda_gate != "bounded",
        "situ_beta": model.activation != "situ",
        "situ_linear_beta": model.activation != "situ",
        "attn_res_block_size": model.attn_res != "block",
        "moe_latent_norm": not model.moe_latent_size,
    }
    return {k: v for k, v in asdict(model).items() if k not in _NOT_RELEASED and not idle.get(k, False)}


def _apart(model: ModelConfig, wanted: dict[str, Any]) -> list[str]:
    values = said(model)
    return [f"model.{k}={values[k]!r}, only {v!r}" for k, v in wanted.items() if k in values and values[k] != v]


def _refuse(what: str, apart: list[str]) -> None:
    if apart:
        raise ConfigError(f"{what}: {'; '.join(apart)}")


def _text(model: ModelConfig, layout: str, ids: TokenIds) -> dict[str, Any]:
    """The text model, all of it."""
    linear: dict[str, Any] = {
        "kda_layers": [i + 1 for i in model.kda_layers],
        "full_attn_layers": [i + 1 for i in model.mla_layers],
        "num_heads": model.kda_num_heads,
        "head_dim": model.kda_head_dim,
        "short_conv_kernel_size": model.kda_conv_size,
    }
    if model.kda_output_gate == "full":
        linear["use_full_rank_gate"] = True
    if model.kda_gate == "bounded":
        linear["gate_lower_bound"] = model.kda_gate_lower_bound
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": MODEL_TYPES[False],
        "dtype": model.compute_dtype,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": model.pad_token_id if model.pad_token_id >= 0 else None,
        **{key: getattr(model, knob) for key, knob in SAME.items()},
        **{key: value for key, (value, _) in FIXED.items()},
        "hidden_act": next(key for key, value in ACTIVATIONS.items() if value == model.activation),
        "initializer_range": model.init_std,
        "num_key_value_heads": model.mla_num_heads,
        "num_shared_experts": model.num_shared_experts,
        "q_lora_rank": model.mla_q_lora_rank or None,
        "linear_attn_config": linear,
        "use_cache": True,
    }
    if model.activation == "situ":
        text |= {"activation_situ_beta": model.situ_beta, "activation_situ_linear_beta": model.situ_linear_beta}
    if model.mla_output_gate:
        text["mla_use_output_gate"] = True
    if model.attn_res != "none":
        text["attn_res_block_size"] = model.attn_res_block_size
    if model.moe_latent_size:
        text |= {
            "routed_expert_hidden_size": model.moe_latent_size,
            "latent_moe_use_norm": model.moe_latent_norm,
        }
    return text | _layers(model, layout)


def _layers(model: ModelConfig, layout: str) -> dict[str, Any]:
    """Which layers are dense: the first ones, or, where transformers writes it too, any."""
    every = range(model.num_layers)
    first = len(model.dense_layers)
    layers: dict[str, Any] = {}
    if layout == "transformers":
        layers["layer_types"] = [f"{'linear' if i in model.kda_layers else 'full'}_attention" for i in every]
        layers["mlp_layer_types"] = ["dense" if i in model.dense_layers else "sparse" for i in every]
    if layout != "transformers" or model.dense_layers == tuple(range(first)):
        layers |= {"first_k_dense_replace": first, "moe_layer_freq": 1}
    return layers
