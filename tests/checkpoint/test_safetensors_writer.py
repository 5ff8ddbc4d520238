"""Which file a tensor goes to, and that the package of the format reads what is written in any order."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3train.checkpoint.safetensors_reader import Header, SafetensorsReader
from k3train.checkpoint.safetensors_writer import SafetensorsWriter, plan_files


def group(**sizes):
    return {name: Header((size,), "U8", "") for name, size in sizes.items()}


def files(planned):
    found = {}
    for name, header in planned.items():
        found.setdefault(header.file, []).append(name)
    return ["".join(found[file]) for file in sorted(found)]


def test_groups_stay_together_where_they_fit():
    assert files(plan_files([group(a=4, b=4), group(c=2), group(d=5)], limit=10)) == ["abc", "d"]
    assert files(plan_files([group(a=6), group(b=6), group(c=4)], limit=10)) == ["a", "bc"]
    assert files(plan_files([group(a=3), group(b=7, c=7, d=2), group(e=11), group(f=1)], limit=10)) == [
        "a",
        "b",
        "cd",
        "e",
        "f",
    ]
    assert list(plan_files([group(a=1)]).values()) == [Header((1,), "U8", "model-00001-of-00001.safetensors")]


def test_any_order(tmp_path):
    draw = np.random.default_rng(0)
    tensors = {
        "odd": draw.integers(0, 255, (3, 1), dtype=np.uint8),
        "wide": draw.normal(size=(2, 3)).astype(np.float32),
        "turned": np.asfortranarray(draw.normal(size=(4, 5))).astype(ml_dtypes.bfloat16),
        "one": np.float32([7]),
    }
    kinds = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
    headers = plan_files([{name: Header(a.shape, kinds[a.dtype], "") for name, a in tensors.items()}], limit=20)
    writer = SafetensorsWriter(tmp_path, headers)
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.finish(30)
    got = {name: array for file in tmp_path.glob("*.safetensors") for name, array in load_file(file).items()}
    assert got.keys() == tensors.keys() and len(set(files(headers))) > 1
    for name, array in tensors.items():
        np.testing.assert_array_equal(got[name], array)
    with SafetensorsReader(tmp_path) as reader:
        assert reader.headers == headers


def test_every_tensor_once(tmp_path):
    writer = SafetensorsWriter(tmp_path, plan_files([group(a=2, b=1)]))
    writer.write("a", np.uint8([1, 2]))
    with pytest.raises(AssertionError, match="a"):
        writer.write("a", np.uint8([1, 2]))
    with pytest.raises(AssertionError, match="never written: \\['b'\\]"):
        writer.finish(3)
