"""Layers fold into few stacks, and every layer has its place."""

import pytest

from k3train.config.schema import ModelConfig
from k3train.model.layout import kinds, layout, num_sources, slots


def config(num_layers, mla, block=0, dense=(0,)):
    layers = range(num_layers)
    return ModelConfig(
        num_layers=num_layers,
        mla_layers=tuple(mla),
        kda_layers=tuple(i for i in layers if i not in mla),
        dense_layers=tuple(dense),
        moe_layers=tuple(i for i in layers if i not in dense),
        attn_res="block" if block else "none",
        attn_res_block_size=block or 1,
    )


K3 = config(93, [*range(3, 92, 4), 92], block=12)
KIMI_LINEAR = config(27, [3, 7, 11, 15, 19, 23, 26])
GOLDEN = config(13, [3, 7, 11, 12], block=3)
ODD = config(7, [2, 5], block=3, dense=(0, 4))
ONE = config(1, [], block=12)


@pytest.mark.parametrize("model", [K3, KIMI_LINEAR, GOLDEN, ODD, ONE], ids=["k3", "kimi", "golden", "odd", "one"])
def test_every_layer_has_one_slot_of_its_kind(model):
    runs, expected = layout(model), kinds(model)
    places = slots(model)
    assert len(set(places)) == model.num_layers
    for layer, slot in enumerate(places):
        run = runs[slot.run]
        segment = run.segments[slot.segment]
        assert segment.period[slot.position] == expected[layer]
        assert 0 <= slot.index < run.repeats * segment.repeats


def test_k3_compiles_as_three_runs_of_few_layers():
    runs = layout(K3)
    assert [(run.first_layer, run.size, run.repeats) for run in runs] == [(0, 12, 1), (12, 12, 6), (84, 9, 1)]
    assert sum(len(segment.period) for run in runs for segment in run.segments) <= 17
    assert num_sources(K3) == 8


def test_kimi_linear_is_one_block_without_sources():
    assert len(layout(KIMI_LINEAR)) == 1 and num_sources(KIMI_LINEAR) == 0
    assert sum(len(segment.period) for segment in layout(KIMI_LINEAR)[0].segments) <= 11
