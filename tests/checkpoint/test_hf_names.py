"""The table of released names: complete, invertible, and of the published size."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from k3train.checkpoint.hf_names import LAYOUTS, entries, find_layout, names, parameters, trim_a_log
from k3train.config.load import load
from tests.checkpoint.releases import K3, KIMI, random_parameters, release

BYTES = {"U8": 1, "BF16": 2, "F32": 4}
CASES = [(K3, "k3"), (KIMI, "kimi_linear"), (KIMI, "transformers")]
#: Tensors of the vision tower and projector, all bfloat16: docs/k3.md sections 1.6 and 6.1.
VISION_TENSORS, VISION_WEIGHTS = 168, 401_214_464 + 46_144_512


def test_all_tensors_of_k3():
    released = names(load("k3")[0].model, "k3", packed=True)
    assert len(released) + VISION_TENSORS == 497_220
    counts = Counter(spec.dtype for spec in released.values())
    assert counts == {"U8": 494_592, "BF16": 2_122 - VISION_TENSORS, "F32": 506}
    size = sum(prod(spec.shape) * BYTES[spec.dtype] for spec in released.values())
    assert size + 2 * VISION_WEIGHTS == 1_560_860_324_864
    plain = names(load("k3")[0].model, "k3")
    stored = sum(prod(spec.shape) for spec in plain.values())
    assert stored + VISION_WEIGHTS == 2_779_931_837_184  # A_log padded
    prefix = "language_model.model.layers"
    for name, shape, dtype in [
        (f"{prefix}.90.self_attn.A_log", (128,), "F32"),
        (f"{prefix}.0.self_attn.q_conv1d.weight", (12288, 1, 4), "F32"),
        (f"{prefix}.92.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        (f"{prefix}.91.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        (f"{prefix}.1.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), "U8"),
        (f"{prefix}.92.block_sparse_moe.experts.0.w2.weight_scale", (3584, 96), "U8"),
        (f"{prefix}.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        (f"{prefix}.0.self_attention_res_proj.weight", (1, 7168), "BF16"),
        ("language_model.lm_head.weight", (163840, 7168), "BF16"),
    ]:
        assert released[name][:2] == (shape, dtype), name


def test_all_tensors_of_kimi_linear():
    released = names(load("kimi_linear_48b")[0].model, "kimi_linear")
    assert sum(prod(spec.shape) for spec in released.values()) == 49_122_681_728
    for name, shape in [
        ("model.layers.0.self_attn.A_log", (1, 1, 32, 1)),
        ("model.layers.26.self_attn.q_proj.weight", (6144, 2304)),
        ("model.layers.3.self_attn.kv_b_proj.weight", (8192, 512)),
        ("model.layers.1.self_attn.g_b_proj.weight", (4096, 128)),
        ("model.layers.26.block_sparse_moe.experts.255.w2.weight", (2304, 1024)),
        ("lm_head.weight", (163840, 2304)),
    ]:
        assert released[name].shape == shape, name


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[layout for _, layout in CASES])
def test_every_number_goes_out_and_comes_back(model, layout):
    values = random_parameters(model)
    released = release(model, layout, values)
    assert {n: a.shape for n, a in released.items()} == {n: s.shape for n, s in names(model, layout).items()}
    assert find_layout(released, model) == layout
    back = {path: np.full(leaf.shape, np.nan, np.float32) for path, leaf in parameters(model).items()}
    for entry in entries(model, layout):
        for e, name in enumerate(entry.names()):
            for part, path in enumerate(entry.paths):
                whole = tuple(slice(0, n) for n in entry.parts[part].plain().values())
                back[path][entry.where(part, e)] = entry.from_released(part, lambda r, n=name: released[n][r], whole)
    for path, value in values.items():
        np.testing.assert_array_equal(back[path], value, path)


@pytest.mark.parametrize(("model", "layout"), CASES[:2], ids=["k3", "kimi_linear"])
def test_a_device_reads_its_share(model, layout):
    """Half of every axis that a mesh may split: the right numbers, and no more than these are read (A_log apart)."""
    values, draw = random_parameters(model), np.random.default_rng(1)
    released = release(model, layout, values)
    for entry in entries(model, layout):
        for part, path in enumerate(entry.paths):
            wanted = []
            for axis, size in entry.parts[part].plain().items():
                half = size // 2 if axis not in ("head_dim", "conv_tap") else size
                start = int(draw.integers(0, size - half + 1))
                wanted.append(slice(start, start + half))
            read = []

            last_name = entry.names()[-1]

            def reader(ranges, name=last_name, read=read):
                read.append(released[name][ranges])
                return read[-1]

            got = entry.from_released(part, reader, tuple(wanted))
            last = values[path][entry.where(part, max(entry.num_experts - 1, 0))]
            np.testing.assert_array_equal(got, last[tuple(wanted)], path)
            joined = sum(leaf.plain()["head_dim"] for leaf in entry.parts) if len(entry.parts) > 1 else 1
            own = entry.parts[part].plain()["head_dim"] if len(entry.parts) > 1 else 1
            if entry.rule.form != "a_log":
                assert read[0].size * own == got.size * joined, path


def test_two_layouts_differ_where_they_should():
    ours, theirs = (set(names(KIMI, layout)) for layout in ("kimi_linear", "transformers"))
    assert ours - theirs == {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert theirs - ours == {f"model.layers.0.block_sparse_moe.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert {name.removeprefix("language_model.") for name in names(K3, "k3")} == set(names(K3, "kimi_linear"))
    assert set(LAYOUTS) == {"k3", "kimi_linear", "transformers"}


def test_tail_of_a_log():
    np.testing.assert_array_equal(trim_a_log(np.float32([[1], [2], [0]]), 2), [1, 2])
    with pytest.raises(ValueError, match=r"entry 2 is 3, but only 2 heads exist"):
        trim_a_log(np.float32([1, 2, 3]), 2)


def test_widths_that_cannot_be_packed():
    with pytest.raises(ValueError, match="16 inputs cannot be packed, MXFP4 needs a multiple of 32"):
        names(KIMI, "kimi_linear", packed=True)
