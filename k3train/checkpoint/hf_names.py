"""Released checkpoints and our parameters: one table, used in both directions (docs/k3.md section 6).

A rule says which parameter a released tensor holds. How it is laid out follows from the parameter's axis names: axes
that we stack (`layers`, `experts`, `qkv`) are separate tensors in a release, `heads` and `head_dim` are one axis there
(head after head), and a linear layer is stored [out, in], which is our [in, out] reversed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from k3train.config.schema import ModelConfig
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.model.layout import slots
from k3train.ops.mx import BLOCK

#: Axes of ours that a release spreads over several tensors.
STACKED = ("layers", "experts", "qkv")
#: A_log of K3 is released with its length rounded up to a multiple of this, zeros beyond the heads.
A_LOG_MULTIPLE = 128

Slices = tuple[slice, ...]
Read = Callable[[Slices], np.ndarray]  # the part of a released tensor within these ranges


class Rule(NamedTuple):
    """One kind of released tensor.

    Args:
        released: name below the layer, or below the model; `{e}` counts experts.
        parts: the parameters it holds, named below the layer; several are joined along `head_dim`, head by head.
        pick: which entry of the axis `qkv`.
        form: "linear" [out, in]; "table" as we store it; "filter" [out, 1, taps]; "row" a vector as [1, n];
            "a_log" one number per head, whose shape differs between releases.
        float32: the release keeps it in float32; everything else is bfloat16 there.
        having: an axis the parameter must have for the rule to apply.
    """

    released: str
    parts: tuple[str, ...]
    pick: int | None = None
    form: str = "linear"
    float32: bool = False
    having: str = ""


MODEL_RULES = (
    Rule("model.embed_tokens.weight", ("embed/table",), form="table"),
    Rule("model.output_attn_res_norm.weight", ("output_reader/gain",)),
    Rule("model.output_attn_res_proj.weight", ("output_reader/query",), form="row"),
    Rule("model.norm.weight", ("norm/gain",)),
    Rule("lm_head.weight", ("head/matrix",)),
)

LAYER_RULES = (
    Rule("input_layernorm.weight", ("mixer_norm/gain",)),
    Rule("post_attention_layernorm.weight", ("channel_norm/gain",)),
    Rule("self_attention_res_norm.weight", ("mixer_reader/gain",)),
    Rule("self_attention_res_proj.weight", ("mixer_reader/query",), form="row"),
    Rule("mlp_res_norm.weight", ("channel_reader/gain",)),
    Rule("mlp_res_proj.weight", ("channel_reader/query",), form="row"),
    # KDA
    *(Rule(f"self_attn.{n}_proj.weight", ("mixer/qkv",), pick=i) for i, n in enumerate("qkv")),
    *(
        Rule(f"self_attn.{n}_conv1d.weight", ("mixer/conv",), pick=i, form="filter", float32=True)
        for i, n in enumerate("qkv")
    ),
    Rule("self_attn.A_log", ("mixer/a_log",), form="a_log", float32=True),
    Rule("self_attn.dt_bias", ("mixer/dt_bias",), float32=True),
    Rule("self_attn.f_a_proj.weight", ("mixer/f_a",)),
    Rule("self_attn.f_b_proj.weight", ("mixer/f_b",)),
    Rule("self_attn.b_proj.weight", ("mixer/beta",)),
    Rule("self_attn.g_a_proj.weight", ("mixer/g_a",)),
    Rule("self_attn.g_b_proj.weight", ("mixer/g_b",)),
    Rule("self_attn.o_norm.weight", ("mixer/o_norm",), float32=True),
    # MLA
    Rule("self_attn.q_a_proj.weight", ("mixer/q_a",)),
    Rule("self_attn.q_a_layernorm.weight", ("mixer/q_a_norm/gain",)),
    Rule("self_attn.q_b_proj.weight", ("mixer/q_b",), having="rank_in"),
    Rule("self_attn.q_proj.weight", ("mixer/q_b",), having="embed"),
    Rule("self_attn.kv_a_proj_with_mqa.weight", ("mixer/kv_a",)),
    Rule("self_attn.kv_a_layernorm.weight", ("mixer/kv_a_norm/gain",)),
    Rule("self_attn.kv_b_proj.weight", ("mixer/k_b", "mixer/v_b")),
    # both mixers
    Rule("self_attn.g_proj.weight", ("mixer/g",)),
    Rule("self_attn.o_proj.weight", ("mixer/o",)),
    # channel mixers
    *(Rule(f"mlp.{n}_proj.weight", (f"channel/{n}",), having="mlp") for n in ("gate", "up", "down")),
    Rule("block_sparse_moe.gate.weight", ("channel/router/weight",)),
    Rule("block_sparse_moe.gate.e_score_correction_bias", ("channel/router/bias",), float32=True),
    Rule("block_sparse_moe.routed_expert_down_proj.weight", ("channel/down",), having="latent"),
    Rule("block_sparse_moe.routed_expert_norm.weight", ("channel/norm/gain",)),
    Rule("block_sparse_moe.routed_expert_up_proj.weight", ("channel/up",), having="latent"),
    *(Rule(f"block_sparse_moe.experts.{{e}}.{n}.weight", (f"channel/{n}",)) for n in ("w1", "w2", "w3")),
    *(
        Rule(f"block_sparse_moe.shared_experts.{n}_proj.weight", (f"channel/shared/{n}",))
        for n in ("gate", "up", "down")
    ),
)


@dataclass(frozen=True)
class Layout:
    """What differs between releases that share the table."""

    prefix: str = ""  # before every name of the text model
    dense_mlp: str = "mlp"  # where a dense layer keeps its MLP
    padded_a_log: bool = False  # A_log [n x 128] with a zero tail; else [1, 1, heads, 1]


LAYOUTS: dict[str, Layout] = {
    "k3": Layout(prefix="language_model.", padded_a_log=True),
    "kimi_linear": Layout(),
    # transformers 5 renames the dense MLP on load and back for every layer on save, dense ones included
    "transformers": Layout(dense_mlp="block_sparse_moe"),
}


def find_layout(names: Mapping[str, object], config: ModelConfig) -> str:
    """Which layout a set of released names has."""
    if any(name.startswith("language_model.") for name in names):
        return "k3"
    dense = (f"model.layers.{layer}.block_sparse_moe.gate_proj.weight" for layer in config.dense_layers)
    return "transformers" if any(name in names for name in dense) else "kimi_linear"


class Spec(NamedTuple):
    """A released tensor: shape and dtype as safetensors writes it, and other shapes that mean the same."""

    shape: tuple[int, ...]
    dtype: str
    also: tuple[tuple[int, ...], ...] = ()


class Leaf(NamedTuple):
    """A parameter or router bias of ours."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def plain(self) -> dict[str, int]:
        """Sizes of the axes that a released tensor has too."""
        return {a: n for a, n in zip(self.axes, self.shape, strict=True) if a not in STACKED}


def released_axes(axes: tuple[str, ...], form: str) -> list[tuple[str, ...]]:
    """Axes of a released tensor, outermost first; each is the product of axes of ours, `()` has one entry."""
    groups: list[tuple[str, ...]] = []
    for axis in axes:
        if axis == "head_dim" and groups and groups[-1] == ("heads",):
            groups[-1] = ("heads", "head_dim")
        else:
            groups.append((axis,))
    if form == "linear":
        return groups[::-1]
    if form == "row":
        return [(), *groups]
    if form == "filter":
        return [groups[0], (), *groups[1:]]
    return groups


@dataclass(frozen=True)
class Entry:
    """A rule applied to one layer (or to the model): one released tensor, or one per expert.

    Args:
        name: full released name; `{e}` counts experts.
        shape: released shape of one tensor.
        paths, parts: full path of every part, and what it is.
        layer: entry of the stack `layers`; None outside the layers.
        number: of the decoder layer; None outside.
    """

    rule: Rule
    name: str
    shape: tuple[int, ...]
    paths: tuple[str, ...]
    parts: tuple[Leaf, ...]
    layer: int | None
    number: int | None

    @property
    def spec(self) -> Spec:
        """One tensor as K3 releases it."""
        also: tuple[tuple[int, ...], ...] = ()
        if self.rule.form == "a_log":
            heads = self.parts[0].plain()["heads"]
            also = (heads,), (_padded(heads),), (1, 1, heads, 1)
        return Spec(self.shape, "F32" if self.rule.float32 else "BF16", also)

    @property
    def num_experts(self) -> int:
        """How many tensors, one per expert; 0: a single tensor."""
        leaf = self.parts[0]
        return leaf.shape[leaf.axes.index("experts")] if "{e}" in self.name else 0

    def names(self) -> list[str]:
        """Names of the tensors, by expert."""
        return [self.name_of(expert) for expert in range(max(self.num_experts, 1))]

    def name_of(self, expert: int) -> str:
        """Name of one expert's tensor, or of the only one."""
        return self.name.replace("{e}", str(expert))

    def where(self, part: int, expert: int = 0) -> tuple[int | slice, ...]:
        """Index of the numbers of one tensor in the stacked array of a part."""
        entry = {"layers": self.layer, "experts": expert, "qkv": self.rule.pick}
        return tuple(entry.get(axis, slice(None)) for axis in self.parts[part].axes)

    def to_released(self, parts: list[np.ndarray]) -> np.ndarray:
        """The released tensor, contiguous, of the parts, each already taken out of its stack by `where`."""
        axes = tuple(self.parts[0].plain())
        order = [axis for group in released_axes(axes, self.rule.form) for axis in group]
        turned = [part.transpose([axes.index(axis) for axis in order]) for part in parts]
        whole = turned[0] if len(turned) == 1 else np.concatenate(turned, axis=order.index("head_dim"))
        if whole.size < prod(self.shape):  # A_log
            whole = np.pad(whole.reshape(-1), (0, prod(self.shape) - whole.size))
        return np.ascontiguousarray(whole).reshape(self.shape)

    def from_released(self, part: int, read: Read, wanted: Slices) -> np.ndarray:
        """Some ranges of a part, one per axis that a released tensor has too; reads whole heads, else no more.

        Raises:
            ValueError: A_log is not zero beyond the heads.
        """
        sizes = self.parts[part].plain()
        if self.rule.form == "a_log":
            return trim_a_log(read(()), sizes["heads"])[wanted]
        before = sum(leaf.plain()["head_dim"] for leaf in self.parts[:part])
        stored = sizes | _joined(self.parts)
        want = {a: w.indices(n)[:2] for (a, n), w in zip(sizes.items(), wanted, strict=True)}
        if before:
            want["head_dim"] = (want["head_dim"][0] + before, want["head_dim"][1] + before)
        ranges, shape, inner, order = [], [], [], []
        for group in released_axes(tuple(sizes), self.rule.form):
            unit = prod(stored[axis] for axis in group[1:])
            start, stop = want[group[0]] if group else (0, 1)
            ranges.append(slice(start * unit, stop * unit))
            order += group
            if group:
                shape += [stop - start, *(stored[axis] for axis in group[1:])]
                inner += [slice(None), *(slice(*want[axis]) for axis in group[1:])]
        array = read(tuple(ranges)).reshape(shape)[tuple(inner)]
        return array.transpose([order.index(axis) for axis in sizes])


def trim_a_log(array: np.ndarray, num_heads: int) -> np.ndarray:
    """A_log [heads] of any released form.

    Raises:
        ValueError: an entry beyond the heads is not zero.
    """
    flat = array.reshape(-1)
    if np.any(flat[num_heads:]):
        entry = num_heads + int(np.flatnonzero(flat[num_heads:])[0])
        raise ValueError(f"entry {entry} is {flat[entry]:.6g}, but only {num_heads} heads exist: it must be zero")
    return flat[:num_heads]


def _padded(num_heads: int) -> int:
    return -(-num_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE


def _joined(parts: tuple[Leaf, ...]) -> dict[str, int]:
    """Released size of the axis along which several parts are joined."""
    return {"head_dim": sum(leaf.plain()["head_dim"] for leaf in parts)} if len(parts) > 1 else {}


def _released_shape(rule: Rule, parts: tuple[Leaf, ...], layout: Layout) -> tuple[int, ...]:
    sizes = parts[0].plain() | _joined(parts)
    if rule.form == "a_log":
        heads = sizes["heads"]
        return (_padded(heads),) if layout.padded_a_log else (1, 1, heads, 1)
    return tuple(prod(sizes[axis] for axis in group) for group in released_axes(tuple(sizes), rule.form))


@cache
def parameters(config: ModelConfig) -> dict[str, Leaf]:
    """Every parameter and router bias of ours, by path; the two trees have no path in common."""
    plan = blueprint(config)
    found = {path: Leaf(info.shape, info.axes) for path, info in leaves(plan.infos)}
    return found | {path: Leaf(x.shape, ("layers", "router_experts")) for path, x in leaves(plan.abstract_bias)}


@cache
def entries(config: ModelConfig, layout: str) -> tuple[Entry, ...]:
    """The released tensors of a model, experts counted once; layer by layer."""
    form, known = LAYOUTS[layout], parameters(config)
    below: dict[str, dict[str, Leaf]] = {}
    for path, leaf in known.items():
        stack, name = _split(path)
        below.setdefault(stack, {})[name] = leaf

    def apply(
        rules: tuple[Rule, ...], stack: str, prefix: str, layer: int | None, number: int | None
    ) -> Iterator[Entry]:
        here = below[stack]
        for rule in rules:
            if all(p in here for p in rule.parts) and (not rule.having or rule.having in here[rule.parts[0]].axes):
                parts = tuple(here[p] for p in rule.parts)
                name = rule.released.replace("mlp.", f"{form.dense_mlp}.", 1)
                shape = _released_shape(rule, parts, form)
                paths = tuple(f"{stack}{p}" for p in rule.parts)
                yield Entry(rule, f"{prefix}{name}", shape, paths, parts, layer, number)

    found = list(apply(MODEL_RULES, "", form.prefix, None, None))
    for number, (run, segment, position, index) in enumerate(slots(config)):
        stack = f"backbone/runs/{run}/{segment}/{position}/"
        found += apply(LAYER_RULES, stack, f"{form.prefix}model.layers.{number}.", index, number)
    missed = known.keys() - {path for entry in found for path in entry.paths}
    assert not missed, f"no released tensor holds {sorted(missed)}"
    return tuple(found)


def _split(path: str) -> tuple[str, str]:
    """(path of the stack of layers, or nothing; name below it)."""
    if not path.startswith("backbone/runs/"):
        return "", path
    *stack, name = path.split("/", 5)
    return "/".join(stack) + "/", name


def names(config: ModelConfig, layout: str, *, packed: bool = False) -> dict[str, Spec]:
    """Every tensor of a release of the text model: name -> shape and dtype.

    Args:
        layout: key of `LAYOUTS`.
        packed: routed experts as MXFP4: nibbles `weight_packed` and a scale per 32 inputs, `weight_scale`.

    Raises:
        ValueError: packed, and an expert's input width is not a multiple of 32.
    """
    found: dict[str, Spec] = {}
    for entry in entries(config, layout):
        if packed and entry.num_experts:
            for suffix, spec in packed_specs(entry).items():
                found.update((name + suffix, spec) for name in entry.names())
        else:
            found.update(dict.fromkeys(entry.names(), entry.spec))
    return found


def packed_specs(entry: Entry) -> dict[str, Spec]:
    """What follows the name of a packed expert matrix, and the tensors of that name."""
    rows, cols = entry.shape
    if cols % BLOCK:
        raise ValueError(f"{entry.name}: {cols} inputs cannot be packed, MXFP4 needs a multiple of {BLOCK}")
    return {"_packed": Spec((rows, cols // 2), "U8"), "_scale": Spec((rows, cols // BLOCK), "U8")}
