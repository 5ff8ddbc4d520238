"""From parameter metadata to what the optimizer needs: matrix views, clip views, decay, and a table to read.

Everything here comes from `core.param.ParamInfo`; no rule looks at a path, a rank or a size (docs/k3.md section 3.2).
"""

from dataclasses import dataclass

from k3train.core.param import AdamW, Frozen, Muon, ParamInfo
from k3train.core.tree import Tree, leaves, map_leaves
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
    route: str  # "Muon embed x head_dim per layers, heads", "AdamW", "frozen"
    scale: float  # factor on the orthogonalised matrix; 1 for AdamW, 0 for frozen
    decay: float
    source: str


def _route(info: ParamInfo) -> str:
    if not isinstance(info.route, Muon):
        return "frozen" if frozen(info) else "AdamW"
    rows, cols = info.route.rows, info.route.cols
    batch = [name for name in info.axes if name not in rows + cols]
    matrix = f"Muon {'*'.join(rows)} x {'*'.join(cols)}"
    return f"{matrix} per {', '.join(batch)}" if batch else matrix


def table(infos: Tree, *, muon_scale: float, weight_decay: float) -> list[Row]:
    """The assignment of every parameter, in the order of the tree."""
    check(infos)
    rows = []
    for path, info in leaves(infos):
        scale = 0.0 if frozen(info) else 1.0
        if isinstance(info.route, Muon):
            view = matrix_views({"": info})[""]
            scale = muon_scale * max(view.sizes(info.shape)) ** 0.5
        rows.append(Row(path, info.shape, _route(info), scale, weight_decay * decays(info), info.route.source))
    return rows


def format_table(rows: list[Row]) -> str:
    """The table as text, columns aligned."""
    lines = [("parameter", "shape", "route", "scale", "decay", "source")]
    lines += [
        (r.path, " x ".join(map(str, r.shape)), r.route, f"{r.scale:.3g}", f"{r.decay:.3g}", r.source) for r in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
