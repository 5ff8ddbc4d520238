"""What a configuration must satisfy before anything is compiled; messages name the knob, its value, what would do."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from k3train.config.schema import Config, MeshConfig, ModelConfig
from k3train.core.axes import MX_BLOCK


class ConfigError(ValueError):
    """A mistake in a configuration; the message is for the user."""


class Range(NamedTuple):
    """Accepted values of a number."""

    accepts: Callable[[Any], bool]
    text: str


def at_least(low: int) -> Range:
    return Range(lambda x: x >= low, f"at least {low}")


POSITIVE = Range(lambda x: x > 0, "above 0")
NOT_NEGATIVE = Range(lambda x: x >= 0, "0 or more")
FRACTION = Range(lambda x: 0 <= x < 1, "from 0 to below 1")

#: Every number of the schema that is not a layer list has its line here.
RANGES: dict[str, Range] = {
    **{
        f"model.{name}": at_least(1)
        for name in (
            "vocab_size", "hidden_size", "num_layers", "intermediate_size", "kda_num_heads", "kda_head_dim",
            "kda_conv_size", "kda_gate_rank", "mla_num_heads", "mla_kv_lora_rank", "mla_qk_nope_head_dim",
            "mla_v_head_dim", "attn_res_block_size", "num_experts", "num_experts_per_token", "moe_intermediate_size",
        )
    },
    **{
        f"model.{name}": NOT_NEGATIVE
        for name in (
            "mla_q_lora_rank", "mla_qk_rope_head_dim", "num_shared_experts", "moe_latent_size", "kda_a_log_length",
        )
    },
    **{
        f"model.{name}": POSITIVE
        for name in (
            "rms_norm_eps", "mla_norm_eps", "situ_beta", "situ_linear_beta", "moe_routed_scaling_factor", "init_std",
            "embedding_init_std",
        )
    },
    "model.pad_token_id": at_least(-1),
    # Within a tile of 16 tokens the summed log decay must stay above -88.7, where exp leaves float32.
    "model.kda_gate_lower_bound": Range(lambda x: -5 <= x < 0, "from -5 to below 0 (16 tokens a tile)"),
    "model.kda_chunk_size": Range(lambda x: x >= 16 and x & (x - 1) == 0, "a power of two from 16 on"),
    "vision.num_layers": NOT_NEGATIVE,
    **{
        f"vision.{name}": at_least(1)
        for name in (
            "hidden_size", "intermediate_size", "num_heads", "qkv_size", "patch_size", "pos_emb_height",
            "pos_emb_width", "pos_emb_time", "merge_size",
        )
    },
    **{f"mesh.{axis}": at_least(1) for axis in ("pipeline", "data", "context", "expert", "tensor")},
    "data.seq_len": at_least(2),
    "data.batch_size": at_least(1),
    "data.micro_batches": at_least(1),
    "data.eval_fraction": FRACTION,
    "data.eval_batches": NOT_NEGATIVE,
    "optim.peak_lr": POSITIVE,
    "optim.final_lr": NOT_NEGATIVE,
    "optim.warmup_fraction": FRACTION,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.grad_clip": NOT_NEGATIVE,
    "optim.muon_momentum": FRACTION,
    "optim.muon_ns_steps": at_least(1),
    "optim.muon_scale": POSITIVE,
    "optim.adam_b1": FRACTION,
    "optim.adam_b2": FRACTION,
    "optim.adam_eps": POSITIVE,
    "optim.qk_clip_threshold": NOT_NEGATIVE,
    "optim.balance_bins": at_least(2),
    "optim.balance_ema": FRACTION,
    "optim.balance_sign_step": POSITIVE,
    "optim.max_consecutive_nonfinite": at_least(1),
    "checkpoint.every": at_least(1),
    "checkpoint.keep": at_least(1),
    "eval.every": NOT_NEGATIVE,
    "log.every": at_least(1),
    "num_steps": at_least(1),
    "seed": NOT_NEGATIVE,
}  # fmt: skip


def lookup(config: Config, key: str) -> Any:
    """Value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def check(config: Config, num_devices: int | None = None, *, trainable: bool = True) -> None:
    """Refuse what cannot work.

    Args:
        config: the whole configuration.
        num_devices: devices at hand; `None` leaves the device count open.
        trainable: also refuse what can be counted but not run yet.

    Raises:
        ConfigError: one line per mistake.
    """
    problems = list(_out_of_range(config))
    if not problems:  # the rest divides by these numbers
        problems += _layers(config.model)
        problems += _model(config.model)
        problems += _split(config)
        problems += _quantised(config)
        problems += _run(config)
        problems += _without_effect(config)
        problems += _devices(config.mesh, num_devices)
        if trainable:
            problems += _not_yet(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _out_of_range(config: Config) -> Iterator[str]:
    for key, accepted in RANGES.items():
        value = lookup(config, key)
        if not accepted.accepts(value):
            yield f"{key}={value}: must be {accepted.text}"


def _layers(model: ModelConfig) -> Iterator[str]:
    """Each decoder layer has exactly one token mixer and one channel mixer."""
    for one, other in (("kda_layers", "mla_layers"), ("dense_layers", "moe_layers")):
        named = getattr(model, one) + getattr(model, other)
        every = range(model.num_layers)
        faults = {
            "missing": [i for i in every if i not in named],
            "named twice": sorted({i for i in named if named.count(i) > 1}),
            "no such layer": sorted({i for i in named if i not in every}),
        }
        text = "; ".join(f"{what}: {', '.join(map(str, layers))}" for what, layers in faults.items() if layers)
        if text:
            yield f"model.{one} and model.{other} must name layers 0 to {model.num_layers - 1} once each; {text}"


def _model(model: ModelConfig) -> Iterator[str]:
    if model.moe_layers and model.num_experts_per_token > model.num_experts:
        yield (
            f"model.num_experts_per_token={model.num_experts_per_token}: "
            f"must be at most model.num_experts={model.num_experts}"
        )
    if model.pad_token_id >= model.vocab_size:
        yield (
            f"model.pad_token_id={model.pad_token_id}: must be below model.vocab_size={model.vocab_size}, "
            "or -1 for none"
        )
    if 0 < model.kda_a_log_length < model.kda_num_heads:
        yield (
            f"model.kda_a_log_length={model.kda_a_log_length}: must be 0 or at least "
            f"model.kda_num_heads={model.kda_num_heads}"
        )


def _split(config: Config) -> Iterator[str]:
    """What the mesh splits must divide."""
    model, mesh = config.model, config.mesh
    split = {
        "data": ["hidden_size", "kda_gate_rank", "mla_q_lora_rank", "mla_kv_lora_rank"],
        "expert": [],
        "tensor": ["vocab_size", "kda_num_heads", "mla_num_heads", "intermediate_size"],
    }
    if model.moe_layers:
        split["data"].append("moe_latent_size")
        split["expert"].append("num_experts")
        split["tensor"].append("moe_intermediate_size")
    for axis, names in split.items():
        parts = getattr(mesh, axis)
        for name in names:
            size = getattr(model, name)
            if size % parts:
                yield f"model.{name}={size}: must be a multiple of mesh.{axis}={parts}"
    rows = mesh.data * mesh.expert * config.data.micro_batches
    if config.data.batch_size % rows:
        yield (
            f"data.batch_size={config.data.batch_size}: must be a multiple of {rows} "
            f"(mesh.data={mesh.data} x mesh.expert={mesh.expert} x data.micro_batches={config.data.micro_batches})"
        )


def _quantised(config: Config) -> Iterator[str]:
    """Blocks of quantised numbers must lie whole on one device."""
    model, mesh, experts = config.model, config.mesh, config.quant.experts
    if experts == "none":
        return
    if not model.moe_layers:
        yield f"quant.experts={experts}: model.moe_layers=() has no routed experts to quantise; must be none"
        return
    width = "moe_latent_size" if model.moe_latent_size else "hidden_size"
    for name, axis in ((width, "data"), ("moe_intermediate_size", "tensor")):
        size, parts = getattr(model, name), getattr(mesh, axis)
        if size % (MX_BLOCK * parts):
            yield (
                f"model.{name}={size}: quant.experts={experts} cuts it into blocks of {MX_BLOCK} inside each of "
                f"mesh.{axis}={parts} parts; must be a multiple of {MX_BLOCK * parts}"
            )


def _run(config: Config) -> Iterator[str]:
    data, optim = config.data, config.optim
    if optim.final_lr > optim.peak_lr:
        yield f"optim.final_lr={optim.final_lr}: must be at most optim.peak_lr={optim.peak_lr}"
    if optim.muon_coefficients == "quintic" and optim.muon_ns_steps != 5:
        yield f"optim.muon_ns_steps={optim.muon_ns_steps}: optim.muon_coefficients=quintic are the 5 of one iteration"
    if not data.is_generated and not data.path:
        yield f"data.path='': data.source={data.source} needs a file, a folder or a glob"


def _without_effect(config: Config) -> Iterator[str]:
    """A knob that was turned although the rest of the configuration ignores it."""
    model, data, optim = config.model, config.data, config.optim
    no_chat = f"data.source={data.source} holds no conversations"
    generated = f"data.source={data.source} is made from the running Python's standard library"
    nothing_out = data.eval_fraction == 0 and not data.eval_path
    idle = {
        "model.kda_gate_lower_bound": (model.kda_gate != "bounded", "model.kda_gate=softplus has no bound"),
        "model.situ_beta": (model.activation != "situ", "model.activation=swiglu has no caps"),
        "model.situ_linear_beta": (model.activation != "situ", "model.activation=swiglu has no caps"),
        "model.remat": (
            model.remat == "attention_residuals" and model.attn_res == "none", "model.attn_res=none reads no depth"
        ),
        "model.attn_res_block_size": (
            model.attn_res != "block", f"model.attn_res={model.attn_res} has no blocks"
        ),
        **{
            f"optim.muon_{name}": (optim.matrices != "muon", f"optim.matrices={optim.matrices} leaves nothing to Muon")
            for name in ("heads", "kv_b", "momentum", "nesterov", "ns_steps", "coefficients", "scale")
        },
        "optim.balance_bins": (optim.balance != "quantile", f"optim.balance={optim.balance} counts no margins"),
        "optim.balance_ema": (
            not optim.balance.startswith("quantile"), f"optim.balance={optim.balance} estimates no quantiles"
        ),
        "optim.balance_sign_step": (optim.balance != "sign", f"optim.balance={optim.balance} takes no fixed steps"),
        **{
            f"quant.{name}": (
                config.quant.experts == "none" or (name == "input_scale" and config.quant.experts == "mxfp4"),
                f"quant.experts={config.quant.experts} rounds no such numbers",
            )
            for name in ("weight_scale", "input_scale", "saturated_grad")
        },
        "eval.every": (nothing_out, "data.eval_fraction=0 holds nothing out"),
        "data.eval_batches": (nothing_out, "data.eval_fraction=0 holds nothing out"),
        "data.eval_fraction": (bool(data.eval_path), "data.eval_path names what is held out"),
        "data.path": (data.is_generated, generated),
        "data.eval_path": (data.is_generated, generated),
        **{
            f"data.{name}": (not data.is_chat, no_chat)
            for name in ("chat_mode", "chat_effort", "chat_loss", "on_long")
        },
        "data.text_field": (
            data.source not in ("jsonl", "parquet"), f"data.source={data.source} has no fields"
        ),
    }  # fmt: skip
    default = Config()
    for key, (ignored, why) in idle.items():
        value = lookup(config, key)
        if ignored and value != lookup(default, key):
            yield f"{key}={value}: has no effect here, because {why}; leave it at {lookup(default, key)!r}"


def mesh_size(mesh: MeshConfig) -> int:
    """Devices that a mesh needs."""
    return math.prod((mesh.pipeline, mesh.data, mesh.context, mesh.expert, mesh.tensor))


def mesh_text(mesh: MeshConfig) -> str:
    """The mesh in words: `data 2 x expert 4`; axes of size 1 are left out."""
    sizes = {axis: getattr(mesh, axis) for axis in ("pipeline", "data", "context", "expert", "tensor")}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def _devices(mesh: MeshConfig, num_devices: int | None) -> Iterator[str]:
    need = mesh_size(mesh)
    if num_devices is not None and need != num_devices:
        yield (
            f"mesh {mesh_text(mesh)} needs {need} devices, there are {num_devices}: change --config.mesh.* so that the "
            f"product is {num_devices}"
        )


def _not_yet(config: Config) -> Iterator[str]:
    for axis in ("pipeline", "context"):
        size = getattr(config.mesh, axis)
        if size > 1:
            yield f"mesh.{axis}={size}: this axis is not usable yet, only 1 is accepted; use data, expert or tensor"
    if config.vision.num_layers:
        yield (
            f"vision.num_layers={config.vision.num_layers}: the vision tower can be counted but not trained yet; "
            "--config.vision.num_layers=0 leaves the text model"
        )
