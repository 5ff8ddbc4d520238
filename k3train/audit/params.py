"""Parameters by component, from the configuration alone (docs/k3.md section 1.6), and their bytes per device."""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from k3train.config.schema import Config, MeshConfig, VisionConfig
from k3train.core.param import AdamW, Muon, ParamInfo
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.optim import groups
from k3train.parallel.rules import RULES

#: Components of the blueprint that are not counted whole in the activated parameters.
ROUTED, EMBEDDING = "routed experts", "embedding"

CONVENTION = """\
total: parameters of the text model, router biases included; routed: all its routed experts;
activated: every text parameter that one token meets, so the experts chosen for it and everything else,
the output head counted, the embedding look-up not counted; always_on: activated without routed experts;
stored: total, vision tower, projector and the zero padding of released A_log tensors, none of them activated"""


@dataclass(frozen=True)
class Counts:
    """Parameter counts under `CONVENTION`."""

    components: dict[str, int]  # text model, in order of first appearance
    activated_components: dict[str, int]
    beside: dict[str, int]  # stored beside the text model
    total: int
    activated: int
    routed: int
    always_on: int
    stored: int


def count(config: Config) -> Counts:
    """Counts of a configuration; nothing is allocated."""
    model = config.model
    plan = blueprint(model)
    components: dict[str, int] = defaultdict(int)
    for _, info in leaves(plan.infos):
        components[info.component] += math.prod(info.shape)
    for _, bias in leaves(plan.abstract_bias):
        components["router"] += math.prod(bias.shape)

    activated = dict(components)
    activated.pop(EMBEDDING)
    if ROUTED in activated:
        activated[ROUTED] = activated[ROUTED] // model.num_experts * model.num_experts_per_token
    beside = {
        "vision tower": vision_tower(config.vision),
        "projector": projector(config.vision, model.hidden_size),
        "A_log padding": max(0, model.kda_a_log_length - model.kda_num_heads) * len(model.kda_layers),
    }
    total = sum(components.values())
    return Counts(
        components=dict(components),
        activated_components=activated,
        beside={name: number for name, number in beside.items() if number},
        total=total,
        activated=sum(activated.values()),
        routed=components.get(ROUTED, 0),
        always_on=sum(activated.values()) - activated.get(ROUTED, 0),
        stored=total + sum(beside.values()),
    )


def vision_tower(vision: VisionConfig) -> int:
    """Parameters of MoonViT-V2 (docs/k3.md section 1.3): no biases, RMSNorm gains only; the time table is fixed."""
    width = vision.hidden_size
    block = 4 * width * vision.qkv_size + 2 * width * vision.intermediate_size + 2 * width
    positions = vision.pos_emb_height * vision.pos_emb_width * width
    patch = 3 * vision.patch_size**2 * width
    return vision.num_layers * block + positions + patch + width if vision.num_layers else 0


def projector(vision: VisionConfig, text_width: int) -> int:
    """Parameters of the patch merger: two matrices and a norm gain."""
    merged = vision.hidden_size * vision.merge_size**2
    return merged * merged + merged * text_width + text_width if vision.num_layers else 0


def bytes_per_device(config: Config) -> dict[str, int]:
    """Bytes of float32 parameters, optimizer state and gradients on the fullest device of the configured mesh.

    Activations, router biases and counters are not in it.
    """
    held: dict[str, int] = {"parameters": 0, "optimizer": 0, "gradients": 0}
    for _, info in leaves(groups.assigned(config.optim, blueprint(config.model).infos)):
        size = 4 * local_size(info, config.mesh)
        held["parameters"] += size
        held["gradients"] += size
        held["optimizer"] += size * _moments(info)
    return held


def local_size(info: ParamInfo, mesh: MeshConfig) -> int:
    """Entries of a parameter on one device, by the sharding rules."""
    entries = 1
    for name, size in zip(info.axes, info.shape, strict=True):
        axis = RULES[name]
        entries *= math.ceil(size / getattr(mesh, axis)) if isinstance(axis, str) else size
    return entries


def _moments(info: ParamInfo) -> int:
    """Float32 arrays of the parameter's shape that its optimizer keeps: Muon's momentum, AdamW's two moments."""
    return 1 if isinstance(info.route, Muon) else 2 if isinstance(info.route, AdamW) else 0


def bytes_text(config: Config) -> str:
    """`bytes_per_device` for people."""
    held = bytes_per_device(config)
    parts = ", ".join(f"{name} {_gib(number)}" for name, number in held.items())
    return f"float32 on the fullest device: {parts}; together {_gib(sum(held.values()))}, activations not counted"


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def report(config: Config) -> dict[str, Any]:
    """What `k3train plan --json` prints about parameters."""
    counts = count(config)
    return {
        "parameters": {
            "stored": counts.stored,
            "total": counts.total,
            "activated": counts.activated,
            "routed": counts.routed,
            "always_on": counts.always_on,
        },
        "convention": " ".join(CONVENTION.split()),
        "components": counts.components,
        "activated_components": counts.activated_components,
        "stored_beside": counts.beside,
        "bytes_per_device": bytes_per_device(config),
        "optimizer": [asdict(row) for row in optimizer_rows(config)],
    }


def optimizer_rows(config: Config) -> list[groups.Row]:
    """What moves each parameter of the configured model, router biases included (docs/k3.md section 3.2)."""
    plan = blueprint(config.model)
    return groups.table(config.optim, plan.infos, plan.abstract_bias)


def optimizer_text(config: Config) -> str:
    """`optimizer_rows` for people."""
    optim = config.optim
    head = (
        f"one learning rate for all: warmup, then a cosine from {optim.peak_lr:g} to {optim.final_lr:g}; a step is "
        f"p <- p - lr * (scale * direction + decay * p)\n"
        f"Muon: momentum {optim.muon_momentum:g}{', Nesterov' if optim.muon_nesterov else ''}, {optim.muon_ns_steps} "
        f"{optim.muon_coefficients} Newton-Schulz steps; AdamW: betas {optim.adam_b1:g} {optim.adam_b2:g}, "
        f"epsilon {optim.adam_eps:g}; clip of MLA heads above {optim.qk_clip_threshold:g} (0: off)"
    )
    return f"{head}\n\n{groups.format_table(optimizer_rows(config))}"


def table(counts: Counts) -> str:
    """The counts for people: one row a component, then the sums and what they mean."""
    rows = [(name, number, counts.activated_components.get(name, 0)) for name, number in counts.components.items()]
    width = max(len(name) for name, *_ in [*rows, ("routed, always on", 0, 0)])
    lines = [f"{'parameters':<{width}}  {'total':>21}  {'activated':>19}"]
    lines += [f"{name:<{width}}  {total:>21,}  {active:>19,}" for name, total, active in rows]
    lines += [
        f"{'text model':<{width}}  {counts.total:>21,}  {counts.activated:>19,}",
        f"{'  routed':<{width}}  {counts.routed:>21,}  {counts.activated - counts.always_on:>19,}",
        f"{'  always on':<{width}}  {counts.total - counts.routed:>21,}  {counts.always_on:>19,}",
    ]
    if counts.beside:
        lines += [f"{name:<{width}}  {number:>21,}  {0:>19,}" for name, number in counts.beside.items()]
        lines += [f"{'stored':<{width}}  {counts.stored:>21,}"]
    return "\n".join(lines)
