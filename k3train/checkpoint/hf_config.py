"""`config.json` of a released checkpoint as our model configuration (docs/k3.md sections 1.2 and 1.9)."""

import json
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from k3train.checkpoint.safetensors_reader import plain_file
from k3train.config.check import ConfigError
from k3train.config.schema import ModelConfig, VisionConfig

FILE = "config.json"

#: Released name -> knob, where the value is taken as it is. Every one must be there.
SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "num_attention_heads": "mla_num_heads",
    "kv_lora_rank": "mla_kv_lora_rank",
    "qk_nope_head_dim": "mla_qk_nope_head_dim",
    "qk_rope_head_dim": "mla_qk_rope_head_dim",
    "v_head_dim": "mla_v_head_dim",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_renormalize": "moe_renormalize",
    "routed_scaling_factor": "moe_routed_scaling_factor",
}

#: Values on which this model has no choice: another one is another model. Absent means the same.
FIXED: dict[str, tuple[Any, str]] = {
    "mla_use_nope": (True, "positions are never encoded"),
    "moe_router_activation_func": ("sigmoid", "the only router"),
    "topk_method": ("noaux_tc", "experts are chosen by score plus bias"),
    "num_expert_group": (1, "experts are chosen from all of them"),
    "topk_group": (1, "experts are chosen from all of them"),
    "num_nextn_predict_layers": (0, "multi-token-prediction layers are not in a release"),
    "tie_word_embeddings": (False, "the output head is a matrix of its own"),
    "attention_bias": (False, "linear layers have no bias"),
    "attention_dropout": (0.0, "no dropout"),
}

#: `vision_config`, released name -> knob. Its other values are not used: the tower is carried along, not built.
VISION = {
    "vt_num_hidden_layers": "num_layers",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_heads",
    "qkv_hidden_size": "qkv_size",
    "patch_size": "patch_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}

#: Understood, and without effect on the weights or on what the model computes.
WITHOUT_EFFECT = frozenset(
    "architectures model_type transformers_version auto_map tokenizer_class _name_or_path use_cache return_dict "
    "_attn_implementation bos_token_id eos_token_id ignore_index media_placeholder_token_id image_placeholder "
    "rope_theta rope_scaling rope_parameters head_dim qk_head_dim max_position_embeddings model_max_length "
    "use_grouped_topk pretraining_tp output_router_logits quantization_config".split()
)
#: model_type of the file, and of its `text_config` where it has one.
MODEL_TYPES = {False: "kimi_linear", True: "kimi_k3"}
ACTIVATIONS = {"situ": "situ", "silu": "swiglu"}
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda x: type(x) is int),
    float: ("a number", lambda x: type(x) in (int, float)),
    bool: ("true or false", lambda x: type(x) is bool),
    str: ("text", lambda x: type(x) is str),
    dict: ("an object", lambda x: type(x) is dict),
    list[int]: ("a list of whole numbers", lambda x: type(x) is list and all(type(i) is int for i in x)),
    list[str]: ("a list of names", lambda x: type(x) is list and all(type(i) is str for i in x)),
}


class ReadConfig(NamedTuple):
    """The models of the file; a `vision` of no layers is none. `tree`: the file itself."""

    model: ModelConfig
    vision: VisionConfig
    tree: dict[str, Any]


class _Fields:
    """One object of the file: typed look-ups, and a memory of what was asked for."""

    def __init__(self, values: dict[str, Any], prefix: str, problems: list[str]):
        self.values, self.prefix, self.problems = values, prefix, problems
        self.seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def need(self, key: str, kind: Any) -> Any:
        """The value; without it a problem is noted and a harmless stand-in returned."""
        self.seen.add(key)
        if key not in self.values:
            self.problems.append(f"{self.prefix}{key} is missing")
            return kind()
        return self._typed(key, kind)

    def maybe(self, key: str, kind: Any, absent: Any) -> Any:
        """The value, or `absent` for none and null."""
        self.seen.add(key)
        return absent if key not in self else self._typed(key, kind)

    def _typed(self, key: str, kind: Any) -> Any:
        value = self.values[key]
        text, fits = _KINDS[kind]
        if fits(value):
            return kind(value)
        self.problems.append(f"{self.prefix}{key}={value!r}: must be {text}")
        return kind()

    def left(self) -> list[str]:
        """Fields that say something and that nobody asked for."""
        return [self.prefix + key for key in self.values if key in self and key not in self.seen | WITHOUT_EFFECT]


def read_config(folder: str | Path, ignore: Collection[str] = ()) -> ReadConfig:
    """The model that `config.json` describes: K3's (nested in `text_config`) or Kimi-Linear's.

    The length of A_log is not in the file; `kda_a_log_length` stays 0 here. Code that `auto_map` names is not read.

    Args:
        folder: of the checkpoint.
        ignore: fields to pass over although they are not understood, each as `text_config.name`.

    Raises:
        ConfigError: no such file, not JSON, a field is missing, of a wrong type, not understood, or asks for another
            model. All problems are named.
    """
    path = plain_file(Path(folder), FILE)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno} is not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    return read_tree(tree, str(path), ignore)


def read_tree(tree: Any, where: str, ignore: Collection[str] = ()) -> ReadConfig:
    """`read_config` of what the file holds; `where` names it in messages."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must hold one JSON object")
    problems: list[str] = []
    model, vision, left = _models(tree, problems)
    unknown = [name for name in left if name not in ignore]
    if unknown:
        problems.append(
            f"fields that are not understood, each of which may mean another model: {', '.join(unknown)}; "
            f"--ignore-fields {','.join(unknown)} passes over them"
        )
    if idle := [name for name in ignore if name not in left]:
        problems.append(f"--ignore-fields names what it need not: {', '.join(idle)}")
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    return ReadConfig(ModelConfig(**model), VisionConfig(**vision), tree)


def _models(tree: dict[str, Any], problems: list[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(knobs of the text model, of the vision tower, fields that nobody asked for)."""
    outer = _Fields(tree, "", problems)
    nested = isinstance(tree.get("text_config"), dict)
    text = _Fields(tree["text_config"], "text_config.", problems) if nested else outer
    linear = _linear(text)
    kinds = {f.name: f.type for f in fields(ModelConfig)}
    values = {knob: text.need(key, kinds[knob]) for key, knob in SAME.items()}
    values |= _mixers(linear, text, values["num_layers"]) | _channels(text, values["num_layers"])
    values |= _options(text, outer)
    vision = _vision(outer, values["hidden_size"])
    levels = [outer, text, linear] if nested else [outer, linear]
    for level in levels[:-1]:
        _refuse_other_models(level, values["mla_num_heads"])
    for level, known in ((outer, MODEL_TYPES[nested]), (text, MODEL_TYPES[False])):
        said = level.maybe("model_type", str, known)
        if said != known:
            problems.append(f"{level.prefix}model_type={said!r}: must be {known}; code of a checkpoint is never run")
    if nested:  # said again inside
        outer.seen |= {"text_config", "dtype", "torch_dtype", "pad_token_id"}
    return values, vision, [name for level in levels for name in level.left()]


def _vision(outer: _Fields, text_width: int) -> dict[str, Any]:
    """Sizes of the tower and projector; none of them without a `vision_config`."""
    section = outer.maybe("vision_config", dict, None)
    if section is None:
        return {"num_layers": 0}
    vision = _Fields(section, "vision_config.", outer.problems)
    values = {knob: vision.need(key, int) for key, knob in VISION.items()}
    merge = vision.need("merge_kernel_size", list[int])
    for key, wanted in (("mm_hidden_size", values["hidden_size"]), ("text_hidden_size", text_width)):
        if vision.maybe(key, int, wanted) != wanted:
            outer.problems.append(f"{vision.prefix}{key}={section[key]}: must be {wanted}")
    if len(set(merge)) != 1:
        outer.problems.append(f"{vision.prefix}merge_kernel_size={merge}: must be one number twice")
    return values | {"merge_size": merge[0] if merge else 1}


def _linear(text: _Fields) -> _Fields:
    """KDA's own section; transformers writes the same values flat."""
    section = text.maybe("linear_attn_config", dict, None)
    flat = {
        "num_heads": text.maybe("linear_num_heads", int, None),
        "head_dim": text.maybe("linear_head_dim", int, None),
        "short_conv_kernel_size": text.maybe("linear_conv_kernel_dim", int, None),
    }
    if section is None:
        section = {key: value for key, value in flat.items() if value is not None}
    return _Fields(section, f"{text.prefix}linear_attn_config.", text.problems)


def _mixers(linear: _Fields, text: _Fields, num_layers: int) -> dict[str, Any]:
    """KDA and the layer lists, which are 1-based in `linear_attn_config` and names in transformers' `layer_types`."""
    types = text.maybe("layer_types", list[str], None)
    named = {
        kind: tuple(i for i, name in enumerate(types or ()) if name == f"{kind}_attention")
        for kind in ("linear", "full")
    }
    if types is not None and "full_attn_layers" not in linear:
        linear.seen |= {"full_attn_layers", "kda_layers"}
        kda, mla = named["linear"], named["full"]
    else:
        kda = tuple(i - 1 for i in linear.need("kda_layers", list[int]))
        mla = tuple(i - 1 for i in linear.need("full_attn_layers", list[int]))
        if types is not None and (sorted(kda), sorted(mla)) != (list(named["linear"]), list(named["full"])):
            text.problems.append(f"{text.prefix}layer_types and {linear.prefix}kda_layers name different layers")
    if sorted(kda + mla) != list(range(num_layers)):
        text.problems.append(
            f"{linear.prefix}kda_layers and full_attn_layers must name layers 1 to {num_layers} once each"
        )
    bound = linear.maybe("gate_lower_bound", float, None)
    head_dim = linear.need("head_dim", int)
    return {
        "kda_layers": kda,
        "mla_layers": mla,
        "kda_num_heads": linear.need("num_heads", int),
        "kda_head_dim": head_dim,
        "kda_gate_rank": head_dim,  # [official code] the bottleneck of both gates is one head wide
        "kda_conv_size": linear.need("short_conv_kernel_size", int),
        "kda_output_gate": "full" if linear.maybe("use_full_rank_gate", bool, False) else "low_rank",
        "kda_gate": "softplus" if bound is None else "bounded",
    } | ({} if bound is None else {"kda_gate_lower_bound": bound})


def _channels(text: _Fields, num_layers: int) -> dict[str, Any]:
    """Dense and MoE layers: the first ones dense, or transformers' `mlp_layer_types`."""
    types = text.maybe("mlp_layer_types", list[str], None)
    every = text.maybe("moe_layer_freq", int, 1)
    named = tuple(i for i, name in enumerate(types or ()) if name == "sparse")
    if types is not None and "first_k_dense_replace" not in text:
        moe = named
    else:
        first = text.need("first_k_dense_replace", int)
        moe = tuple(i for i in range(first, num_layers) if i % max(every, 1) == 0)
        if types is not None and moe != named:
            text.problems.append(f"{text.prefix}mlp_layer_types and first_k_dense_replace name different layers")
    latent = text.maybe("routed_expert_hidden_size", int, 0)
    return {
        "moe_layers": moe,
        "dense_layers": tuple(i for i in range(num_layers) if i not in moe),
        "num_shared_experts": text.maybe("num_shared_experts", int, 0),
        "moe_latent_size": latent,
        "moe_latent_norm": text.need("latent_moe_use_norm", bool) if latent else True,
    }


def _options(text: _Fields, outer: _Fields) -> dict[str, Any]:
    """What K3 has and Kimi-Linear lacks, and how numbers are stored."""
    act = text.need("hidden_act", str)
    if act not in ACTIVATIONS:
        text.problems.append(f"{text.prefix}hidden_act={act!r}: must be {' or '.join(ACTIVATIONS)}")
    block = text.maybe("attn_res_block_size", int, 0)
    said = [level.maybe(key, str, None) for level in (text, outer) for key in ("dtype", "torch_dtype")]
    dtype = next(filter(None, said), "float32")
    values = {
        "activation": ACTIVATIONS.get(act, "swiglu"),
        "mla_q_lora_rank": text.maybe("q_lora_rank", int, 0),
        "mla_output_gate": text.maybe("mla_use_output_gate", bool, False),
        "attn_res": "block" if block else "none",
        "pad_token_id": text.maybe("pad_token_id", int, -1),
        "compute_dtype": "bfloat16" if dtype == "bfloat16" else "float32",
        "init_std": text.maybe("initializer_range", float, ModelConfig.init_std),
        "embedding_init_std": text.maybe("initializer_range", float, ModelConfig.embedding_init_std),
    }
    if act == "situ":
        values["situ_beta"] = text.need("activation_situ_beta", float)
        values["situ_linear_beta"] = text.need("activation_situ_linear_beta", float)
    return values | ({"attn_res_block_size": block} if block else {})


def _refuse_other_models(level: _Fields, num_heads: int) -> None:
    for key, (value, why) in FIXED.items():
        level.seen.add(key)
        if key in level and level.values[key] != value:
            level.problems.append(f"{level.prefix}{key}={level.values[key]!r}: only {value!r} is known here ({why})")
    groups = level.maybe("num_key_value_heads", int, num_heads)
    if groups != num_heads:
        level.problems.append(f"{level.prefix}num_key_value_heads={groups}: must equal num_attention_heads={num_heads}")
