"""The only files that are opened lie in the folder, are whole, and hold nothing but numbers."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from k3train.checkpoint.safetensors_reader import SafetensorsReader
from tests.checkpoint.releases import write

TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(2, np.uint8)}


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_ranges_of_sharded_tensors(tmp_path):
    with SafetensorsReader(write(tmp_path, {}, TENSORS, shards=2)) as reader:
        assert {name: header[:2] for name, header in reader.headers.items()} == {
            "a": ((3, 4), "F32"),
            "b": ((2,), "U8"),
        }
        np.testing.assert_array_equal(reader.read("a"), TENSORS["a"])
        np.testing.assert_array_equal(reader.read("a", (slice(1, 3), slice(0, 2))), TENSORS["a"][1:, :2])


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/out.safetensors", "sub/out.safetensors", "..\\out.safetensors", "..", ""]
)
def test_index_names_a_path(tmp_path, name):
    """Refused whether or not such a file exists."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "out.safetensors")
    index(folder, {"a": name})
    with pytest.raises(ValueError, match="is not the name of a file in this folder"):
        SafetensorsReader(folder)


def test_links_may_not_lead_out(tmp_path):
    folder = write(tmp_path / "model", {}, TENSORS)
    (folder / "model.safetensors").rename(folder / "here.safetensors")
    (folder / "model.safetensors").symlink_to("here.safetensors")
    with SafetensorsReader(folder) as reader:
        assert set(reader.headers) == {"a", "b"}
    (folder / "here.safetensors").rename(tmp_path / "there.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "there.safetensors")
    with pytest.raises(ValueError, match=r"is a link to .*there.safetensors, outside of the folder"):
        SafetensorsReader(folder)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"holds pickled weights \(pytorch_model.bin\), which can run code"):
        SafetensorsReader(tmp_path)
    index(tmp_path, {"a": "pytorch_model.bin"})
    with pytest.raises(ValueError, match="'pytorch_model.bin' is not a safetensors file"):
        SafetensorsReader(tmp_path)


def test_what_is_missing_or_damaged(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        SafetensorsReader(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        SafetensorsReader(tmp_path)
    folder = write(tmp_path / "model", {}, TENSORS, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for cut in (whole[:-1], whole[:20], b""):
        shard.write_bytes(cut)
        with pytest.raises(ValueError, match=r"00002.safetensors: damaged or not a safetensors file"):
            SafetensorsReader(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"1 files of the index are missing: model-00002-of-00002.safetensors"):
        SafetensorsReader(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index of safetensors files"):
        SafetensorsReader(folder)


def test_index_and_files_must_agree(tmp_path):
    folder = write(tmp_path, {}, TENSORS, shards=2)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index(folder, {"a": second, "c": first})
    with pytest.raises(ValueError) as caught:
        SafetensorsReader(folder)
    for part in (f"a: the index says {second}, it is in {first}", "c: the index says", f"b: in {second}, not in the"):
        assert part in str(caught.value)
    save_file(TENSORS, folder / second)
    with pytest.raises(ValueError, match=f"a is in {first} and in {second}"):
        SafetensorsReader(folder)
