"""Which layers are stacked together: equal layers share one stack of parameters and are compiled once.

Depth is cut into attention-residual blocks; inside a block the layer pattern is folded into segments (a short period of
layer kinds, repeated); blocks with equal patterns form a run. K3's 93 layers become three runs: the first block, six
equal blocks, the last partial one.
"""

from functools import cache
from typing import NamedTuple

from k3train.config.schema import ModelConfig
from k3train.model.block import LayerKind


class Segment(NamedTuple):
    """`repeats` times the layers of `period`, scanned."""

    offset: int  # first layer, counted from the start of the block
    period: tuple[LayerKind, ...]
    repeats: int


class BlockRun(NamedTuple):
    """`repeats` equal attention-residual blocks, scanned."""

    first_layer: int
    size: int  # layers per block
    repeats: int
    segments: tuple[Segment, ...]


class Slot(NamedTuple):
    """Where a layer's parameters live: model.runs[run][segment][position], entry `index` of the stack."""

    run: int
    segment: int
    position: int
    index: int


def kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Kind of every layer, from the explicit lists of the config."""
    kda, moe = set(config.kda_layers), set(config.moe_layers)
    return tuple(
        LayerKind(
            mixer="kda" if layer in kda else "mla",
            channel="moe" if layer in moe else "dense",
            first=layer == 0 and config.attn_res != "none",
        )
        for layer in range(config.num_layers)
    )


def fold(pattern: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """Segments that cover the pattern with the fewest distinct layers to compile, then the fewest segments."""

    @cache
    def best(start: int) -> tuple[int, int, tuple[Segment, ...]]:
        if start == len(pattern):
            return 0, 0, ()
        options = []
        for length in range(1, len(pattern) - start + 1):
            period = pattern[start : start + length]
            repeats = 1
            while pattern[start + repeats * length : start + (repeats + 1) * length] == period:
                repeats += 1
            for times in range(1, repeats + 1):
                cost, count, rest = best(start + times * length)
                options.append((cost + length, count + 1, (Segment(start, period, times), *rest)))
        return min(options, key=lambda option: option[:2])

    return best(0)[2]


@cache
def layout(config: ModelConfig) -> tuple[BlockRun, ...]:
    """Runs of equal blocks, covering all layers in order."""
    pattern = kinds(config)
    size = config.attn_res_block_size if config.attn_res == "block" else config.num_layers
    runs: list[BlockRun] = []
    for first in range(0, config.num_layers, size):
        block = pattern[first : first + size]
        segments = fold(block)
        if runs and runs[-1].segments == segments and runs[-1].size == len(block):
            runs[-1] = runs[-1]._replace(repeats=runs[-1].repeats + 1)
        else:
            runs.append(BlockRun(first, len(block), 1, segments))
    return tuple(runs)


def num_sources(config: ModelConfig) -> int:
    """Stored sources of the attention residuals at the end of the stack, without the running sum."""
    if config.attn_res == "none":
        return 0
    if config.attn_res == "full":
        return 2 * config.num_layers
    return -(-config.num_layers // config.attn_res_block_size)


def slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Slot of every layer, by layer index."""
    found: dict[int, Slot] = {}
    for r, run in enumerate(layout(config)):
        for block in range(run.repeats):
            for s, segment in enumerate(run.segments):
                for repeat in range(segment.repeats):
                    for position in range(len(segment.period)):
                        layer = run.first_layer + block * run.size + segment.offset
                        layer += repeat * len(segment.period) + position
                        found[layer] = Slot(r, s, position, block * segment.repeats + repeat)
    return tuple(found[layer] for layer in range(config.num_layers))
