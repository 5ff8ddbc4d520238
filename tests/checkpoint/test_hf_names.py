"""The table of released names: complete, invertible, and of the published size."""

import json
from collections import Counter, defaultdict
from functools import cache
from math import prod

import numpy as np
import pytest

from k3train.checkpoint.hf_config import VISION
from k3train.checkpoint.hf_names import LAYOUTS, entries, find_layout, names, parameters, trim_a_log
from k3train.checkpoint.hf_vision import vision_names
from k3train.checkpoint.safetensors_writer import plan_files
from k3train.config.load import load
from k3train.config.schema import VisionConfig
from tests.checkpoint.releases import K3, KIMI, random_parameters, release
from tests.model.golden_models import DATA

BYTES = {"U8": 1, "BF16": 2, "F32": 4}
CASES = [(K3, "k3"), (KIMI, "kimi_linear"), (KIMI, "transformers")]


def weights(tensors):
    return sum(prod(spec.shape) for spec in tensors.values())


def num_bytes(tensors, dtype):
    return sum(prod(spec.shape) * BYTES[dtype] for spec in tensors.values() if spec.dtype == dtype)


@cache
def k3():
    """(model, text tensors, vision tensors) of the release, from the configuration alone."""
    config = load("k3")[0]
    text = names(config.model, "k3", packed=True)
    return config.model, text, vision_names(config.vision, config.model.hidden_size)


def test_all_tensors_of_k3():
    """Counts and bytes of docs/k3.md sections 1.6, 1.7 and 6.1."""
    model, text, vision = k3()
    assert len(vision) == 168
    assert weights({n: s for n, s in vision.items() if n.startswith("vision_tower.")}) == 401_214_464
    assert weights({n: s for n, s in vision.items() if n.startswith("mm_projector.")}) == 46_144_512
    released = text | vision
    assert len(released) == len(text) + len(vision) == 497_220
    assert Counter(spec.dtype for spec in released.values()) == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    assert num_bytes(released, "BF16") == 114_359_769_088
    assert num_bytes(released, "F32") == 44_489_728
    assert sum(num_bytes({n: s}, "U8") for n, s in released.items() if n.endswith("_packed")) == 1_361_370_415_104
    assert sum(num_bytes({n: s}, "U8") for n, s in released.items() if n.endswith("_scale")) == 85_085_650_944
    assert sum(num_bytes(released, dtype) for dtype in BYTES) == 1_560_860_324_864
    assert weights(names(model, "k3")) + weights(vision) == 2_779_931_837_184  # A_log padded
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
        ("vision_tower.encoder.blocks.26.wqkv.weight", (4608, 1024), "BF16"),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1024), "BF16"),
        ("mm_projector.proj.2.weight", (7168, 4096), "BF16"),
    ]:
        assert released[name][:2] == (shape, dtype), name


def test_a_file_for_every_layer_of_k3():
    """As in the release; what lies outside of the layers, the projector and the tower share the last file."""
    _, text, vision = k3()
    layers = defaultdict(dict)
    for name, spec in text.items():
        layer = name.partition(".layers.")[2].partition(".")[0]
        layers[int(layer or 93)][name] = spec
    beside = [{n: s for n, s in vision.items() if n.startswith(p)} for p in ("mm_projector", "vision_tower")]
    planned = plan_files([*(layers[i] for i in range(94)), *beside])
    assert len(planned) == 497_220
    for i in (0, 1, 91, 92):
        assert {planned[name].file for name in layers[i]} == {f"model-{i + 1:05}-of-00094.safetensors"}
    assert planned["mm_projector.proj.0.weight"].file == planned["language_model.lm_head.weight"].file


def test_vision_names_of_the_official_code():
    golden = json.loads((DATA / "vision_tiny" / "names.json").read_text())
    section = golden["config"]["vision_config"]
    vision = VisionConfig(**{knob: section[key] for key, knob in VISION.items()})
    found = vision_names(vision, section["text_hidden_size"])
    assert {name: list(spec.shape) for name, spec in found.items()} == golden["shapes"]
    assert vision_names(VisionConfig(), 80) == {}


def test_all_tensors_of_kimi_linear():
    """docs/k3.md sections 1.9 and 6.2."""
    released = names(load("kimi_linear_48b")[0].model, "kimi_linear")
    # 20 KDA layers of 15 tensors, 7 MLA layers of 5, 26 MoE layers of 768 expert matrices and 5 others, 1 dense layer
    # of 3, 27 layers of 2 norms, and 3 outside of the layers
    assert len(released) == 20 * 15 + 7 * 5 + 26 * (3 * 256 + 5) + 3 + 27 * 2 + 3 == 20_493
    assert weights(released) == 49_122_681_728
    assert Counter(spec.dtype for spec in released.values()) == {"BF16": 20_493 - 20 * 6 - 26, "F32": 20 * 6 + 26}
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
