"""From parameter metadata to what the optimizer needs: routes, matrix views, clip views, decay, and a table to read.

Everything here comes from `core.param.ParamInfo` and from the config's choice among its alternatives; no rule looks at
a path, a rank or a size (docs/k3.md section 3.2).
"""

from dataclasses import dataclass, replace

from k3train.config.schema import OptimConfig
from k3train.core.param import AdamW, Frozen, Muon, ParamInfo
from k3train.core.tree import Tree, leaves, map_leaves
from k3train.optim import joint
from k3train.optim.muon import MatrixView
from k3train.optim.qk_clip import ClipView


def check(infos: Tree) -> None:
    """Every leaf must have a route.

    Raises:
        ValueError: naming the leaves that have none.
    """
    bad = [
        path
        for path, info in leaves(infos)
        if not (isinstance(info, ParamInfo) and isinstance(info.route, Muon | AdamW | Frozen))
    ]
    if bad:
        raise ValueError(f"parameters without an optimizer route: {', '.join(bad)}")


def assigned(config: OptimConfig, infos: Tree) -> Tree:
    """`infos` with the routes that the config chooses: as the model declares them, or an ablation of that.

    Raises:
        ValueError: see `check`.
    """
    check(infos)
    return map_leaves(lambda info: replace(info, route=_route(config, info)), infos)


def _route(config: OptimConfig, info: ParamInfo) -> Muon | AdamW | Frozen:
    route = info.route
    if not isinstance(route, Muon):
        return route
    if config.matrices == "adamw":
        return AdamW(decay=True, source="[ablation] optim.matrices=adamw")
    chosen = []
    if config.muon_heads == "whole" and _per_head(info):
        route = replace(route, rows=_with_heads(route.rows), cols=_with_heads(route.cols))
        chosen.append("optim.muon_heads=whole")
    if config.muon_kv_b == "apart":
        route = replace(route, joint=None)
    elif route.joint is not None:
        chosen.append("optim.muon_kv_b=joint")
    return replace(route, source=f"[ablation] {', '.join(chosen)}") if chosen else route


def _per_head(info: ParamInfo) -> bool:
    """Whether heads are a batch of matrices."""
    return isinstance(info.route, Muon) and "heads" in info.axes and "heads" not in info.route.rows + info.route.cols


def _with_heads(names: tuple[str, ...]) -> tuple[str, ...]:
    """The channels of all heads, head after head, instead of those of one."""
    return tuple(axis for name in names for axis in (("heads", name) if name == "head_dim" else (name,)))


def matrix_views(infos: Tree) -> Tree:
    """`MatrixView` of Muon leaves, `None` elsewhere."""

    def one(info: ParamInfo) -> MatrixView | None:
        if not isinstance(info.route, Muon):
            return None
        rows, cols = (tuple(info.axes.index(name) for name in names) for names in (info.route.rows, info.route.cols))
        return MatrixView(rows, cols)

    return map_leaves(one, infos)


def clip_views(infos: Tree) -> Tree:
    """`ClipView` of leaves that QK-clip rescales, `None` elsewhere."""

    def one(info: ParamInfo) -> ClipView | None:
        if info.clip is None:
            return None
        return ClipView(info.axes.index(info.clip.head_axis), info.axes.index(info.clip.axis), info.clip.parts)

    return map_leaves(one, infos)


def decays(info: ParamInfo) -> bool:
    """Whether decoupled weight decay applies: to every Muon matrix, and where AdamW's metadata says so."""
    return isinstance(info.route, Muon) or (isinstance(info.route, AdamW) and info.route.decay)


def frozen(info: ParamInfo) -> bool:
    """Whether no optimizer touches it."""
    return isinstance(info.route, Frozen)


@dataclass(frozen=True)
class Row:
    """One line of the optimizer table."""

    path: str
    shape: tuple[int, ...]
    route: str  # "Muon embed x head_dim per layers, heads", "AdamW", "none"
    scale: float  # factor on the orthogonalised matrix; 1 for AdamW, 0 for none
    decay: float
    source: str


def _described(info: ParamInfo) -> str:
    if not isinstance(info.route, Muon):
        return "none" if frozen(info) else "AdamW"
    rows, cols = info.route.rows, info.route.cols
    batch = [name for name in info.axes if name not in rows + cols]
    matrix = f"Muon {'*'.join(rows)} x {'*'.join(cols)}"
    if info.route.joint is not None:
        matrix += f" of {info.route.joint.name}"
    return f"{matrix} per {', '.join(batch)}" if batch else matrix


def table(config: OptimConfig, infos: Tree, bias: Tree | None = None) -> list[Row]:
    """The assignment of every parameter under `config`, in the order of the tree; then the router biases.

    Args:
        infos: as the model declares them.
        bias: router biases, or their shapes; no optimizer moves them.
    """
    infos = assigned(config, infos)
    wholes = _wholes(infos)
    rows = []
    for path, info in leaves(infos):
        scale = 0.0 if frozen(info) else 1.0
        if isinstance(info.route, Muon):
            whole = wholes[path]
            scale = config.muon_scale * max(matrix_views({"": whole})[""].sizes(whole.shape)) ** 0.5
        decay = config.weight_decay * decays(info)
        rows.append(Row(path, info.shape, _described(info), scale, decay, info.route.source))
    moved = f"none, optim.balance={config.balance}"
    rows += [Row(path, x.shape, moved, 0.0, 0.0, "[report 2.3.3]") for path, x in leaves(bias or {})]
    return rows


def _wholes(infos: Tree) -> dict[str, ParamInfo]:
    """By path: the matrix that a parameter is, or is a part of."""
    merged = dict(leaves(joint.merged_infos(infos)))
    found = {}
    for path, info in leaves(infos):
        whole = info.route.joint if isinstance(info.route, Muon) else None
        found[path] = merged[path if whole is None else path[: path.rfind("/") + 1] + whole.name]
    return found


def format_table(rows: list[Row]) -> str:
    """The table as text, columns aligned."""
    lines = [("parameter", "shape", "route", "scale", "decay", "source")]
    lines += [
        (r.path, " x ".join(map(str, r.shape)), r.route, f"{r.scale:.3g}", f"{r.decay:.3g}", r.source) for r in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
