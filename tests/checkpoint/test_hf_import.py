"""Released checkpoints in: exact, onto any mesh, strict both ways, and a run folder at the end."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from k3train.checkpoint.hf_config import read_config
from k3train.checkpoint.hf_import import import_hf, read_hf
from k3train.checkpoint.orbax import Checkpoints
from k3train.checkpoint.safetensors_reader import SafetensorsReader
from k3train.cli import main
from k3train.config.load import from_json
from k3train.core.tree import leaves
from k3train.parallel.mesh import make_mesh
from tests.checkpoint.releases import (
    K3,
    KIMI,
    VISION,
    packed_release,
    random_parameters,
    release,
    released_config,
    vision_config,
    vision_tensors,
    write,
)
from tests.model.golden_models import DATA, imported

BIAS = "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
A_LOG = "language_model.model.layers.1.self_attn.A_log"


def one_device():
    return make_mesh({}, jax.devices()[:1])


def flat(model):
    return dict(leaves(model.params)) | dict(leaves(model.bias))


@pytest.fixture(scope="module")
def values():
    return random_parameters(K3)


@pytest.fixture
def tensors(values):
    return release(K3, "k3", values)


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2, "tensor": 2}, {"expert": 4}, {}], ids=str)
def test_onto_any_mesh(tmp_path, values, tensors, sizes):
    devices = int(np.prod(list(sizes.values()), dtype=int))
    folder = write(tmp_path, released_config(K3), tensors, shards=3)
    got = read_hf(folder, make_mesh(sizes, jax.devices()[:devices]))
    assert got.config == K3  # the padded length of A_log included
    for path, array in flat(got).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, values[path], path)
    if devices > 1:
        w1 = next(a for path, a in flat(got).items() if path.endswith("channel/w1"))
        assert len({str(shard.index) for shard in w1.addressable_shards}) == devices


def test_default_mesh_uses_the_devices(tmp_path, values, tensors):
    """As many as divide every axis over `data`: here two of eight."""
    got = read_hf(write(tmp_path, released_config(K3), tensors))
    assert len(got.params["embed"]["table"].sharding.device_set) == 2
    np.testing.assert_array_equal(got.params["embed"]["table"], values["embed/table"])


def test_bfloat16_becomes_float32_masters(tmp_path, values, tensors):
    """Exactly; numbers that K3 releases in float32 are reported if they were rounded."""
    bf16 = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    got = read_hf(write(tmp_path, released_config(K3), bf16), one_device())
    for path, array in flat(got).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, values[path].astype(ml_dtypes.bfloat16).astype(np.float32), path)
    assert any("tensors that K3 keeps in float32 are stored narrower" in note for note in got.notes)


def test_packed_experts(tmp_path, tensors):
    packed, decoded = packed_release(K3, tensors)
    folder = write(tmp_path, released_config(K3), packed, shards=2)
    got = flat(read_hf(folder, make_mesh({"data": 2, "expert": 2}, jax.devices()[:4])))
    want = flat(read_hf(write(tmp_path / "plain", released_config(K3), tensors | decoded), one_device()))
    assert len(decoded) == 3 * 3 * K3.num_experts
    for path, array in got.items():
        np.testing.assert_array_equal(array, want[path], path)

    scale = next(name for name in packed if name.endswith("w2.weight_scale"))
    broken = dict(packed)
    del broken[scale]
    with pytest.raises(ValueError, match=f"1 missing: {scale}"):
        read_hf(write(tmp_path / "no_scale", released_config(K3), broken), one_device())
    narrow = write(tmp_path / "narrow", released_config(replace(K3, moe_intermediate_size=48)), packed)
    with pytest.raises(ValueError, match=r"narrow: .*w2.weight: 48 inputs cannot be packed, MXFP4 needs a multiple"):
        read_hf(narrow, one_device())
    broken = packed | {scale: np.full_like(packed[scale], 255)}
    with pytest.raises(ValueError, match=r"experts.0.w2.weight: 32 scales are NaN \(byte 255\)"):
        read_hf(write(tmp_path / "nan_scale", released_config(K3), broken), one_device())


def test_transformers_naming_of_the_golden_model(tmp_path):
    """Three names differ; the parameters do not."""
    from safetensors.numpy import load_file

    ours = load_file(DATA / "kimi_linear_tiny" / "model.safetensors")
    theirs = {name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): array for name, array in ours.items()}
    assert len(theirs.keys() - ours.keys()) == 3
    folder = write(tmp_path, {}, theirs)
    (folder / "config.json").write_text((DATA / "kimi_linear_tiny" / "config_transformers.json").read_text())
    got, want = flat(read_hf(folder, one_device())), flat(imported("kimi_linear_tiny"))
    assert got.keys() == want.keys()
    for path, array in got.items():
        np.testing.assert_array_equal(array, want[path], path)


def test_every_fault_in_one_message(tmp_path, tensors):
    norm = "language_model.model.layers.2.block_sparse_moe.routed_expert_norm.weight"
    query = "language_model.model.layers.3.mlp_res_proj.weight"
    del tensors[BIAS], tensors[norm]
    tensors["language_model.model.layers.4.input_layernorm.weight"] = np.ones(16, np.float32)
    tensors["language_model.model.norm.weight"] = np.ones(17, np.float32)
    tensors[query] = tensors[query].astype(np.int32)
    with pytest.raises(ValueError) as caught:
        read_hf(write(tmp_path, released_config(K3), tensors), one_device())
    message = str(caught.value)
    assert "2 missing: " in message and BIAS in message and norm in message
    assert "1 unexpected: language_model.model.layers.4.input_layernorm.weight" in message
    assert "language_model.model.norm.weight: [17], expected [16]" in message
    assert f"{query}: I32, accepted F32, BF16, F16" in message


def test_vision_tensors_are_known_by_name(tmp_path, tensors):
    config = released_config(K3) | {"vision_config": vision_config(VISION, K3.hidden_size)}
    beside = vision_tensors(VISION, K3.hidden_size)
    got = read_hf(write(tmp_path, config, tensors | beside, shards=2), one_device())
    assert "18 tensors of the vision tower and its projector are carried along, not trained" in got.notes

    beside["vision_tower.encoder.blocks.2.wo.weight"] = beside.pop("vision_tower.encoder.blocks.1.wo.weight")
    with pytest.raises(ValueError) as caught:
        read_hf(write(tmp_path / "other", config, tensors | beside), one_device())
    assert "1 missing: vision_tower.encoder.blocks.1.wo.weight" in str(caught.value)
    assert "1 unexpected: vision_tower.encoder.blocks.2.wo.weight" in str(caught.value)


def test_forms_of_a_log(tmp_path, values, tensors):
    names = [name for name in tensors if name.endswith("A_log")]
    assert tensors[A_LOG].shape == (128,) and not tensors[A_LOG][2:].any()
    for number, (shape, length) in enumerate([((2,), 0), ((1, 1, 2, 1), 0)]):
        other = tensors | {name: tensors[name][:2].reshape(shape) for name in names}
        got = read_hf(write(tmp_path / str(number), released_config(K3), other), one_device())
        assert got.config == replace(K3, kda_a_log_length=length)
        for path, array in flat(got).items():
            np.testing.assert_array_equal(array, values[path], path)
    for shape in ((3,), (2, 1), (64,)):
        with pytest.raises(ValueError, match=r"of another shape: .*A_log"):
            read_hf(
                write(tmp_path / "x", released_config(K3), tensors | {A_LOG: np.zeros(shape, np.float32)}), one_device()
            )
    tail = tensors[A_LOG].copy()
    tail[100] = 0.5
    with pytest.raises(ValueError, match=f"{A_LOG}: entry 100 is 0.5, but only 2 heads exist"):
        read_hf(write(tmp_path / "tail", released_config(K3), tensors | {A_LOG: tail}), one_device())
    with pytest.raises(ValueError, match="A_log has several shapes"):
        read_hf(
            write(tmp_path / "mixed", released_config(K3), tensors | {A_LOG: tensors[A_LOG][:2].copy()}), one_device()
        )


def test_command_makes_a_run_folder(tmp_path, capsys):
    values = random_parameters(KIMI)
    config = released_config(KIMI) | {"auto_map": {"AutoModel": "modeling.Model"}}
    folder = write(tmp_path / "release", config, release(KIMI, "kimi_linear", values))
    (folder / "modeling.py").write_text("raise SystemExit('this must never run')")
    run = tmp_path / "runs" / "kimi"
    assert main(["import-hf", str(folder), "--workdir", str(run)]) == 0
    said = capsys.readouterr().err
    assert "kimi_linear layout, plain experts" in said
    assert "auto_map names code of the checkpoint; it was not run" in said and "not run: modeling.py" in said
    assert "tokenizer: byte, because there is neither tokenizer.json nor tiktoken.model" in said

    assert from_json((run / "config.json").read_text()).model == read_config(folder).model == KIMI
    want = read_hf(folder, one_device())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        {"params": want.params, "bias": want.bias},
    )
    with Checkpoints(run / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [0]
        got = checkpoints.restore(0, {"model": shapes})["model"]
    for path, array in leaves(got["params"]):
        np.testing.assert_array_equal(array, values[path], path)
    for path, array in leaves(got["bias"]):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, values[path], path)

    assert main(["import-hf", str(folder), "--workdir", str(run)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_refused_import_leaves_nothing(tmp_path, tensors, capsys):
    del tensors[BIAS]
    folder = write(tmp_path / "release", released_config(K3), tensors)
    assert main(["import-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 2
    assert BIAS in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder that can be written"):
        import_hf(folder, tmp_path / "file" / "run")


def test_the_tokenizer_of_a_release_comes_along(tmp_path, capsys):
    folder = write(tmp_path / "release", released_config(KIMI), release(KIMI, "kimi_linear", random_parameters(KIMI)))
    (folder / "tokenizer.json").write_text('{"any": "text"}')
    run = tmp_path / "run"
    assert main(["import-hf", str(folder), "--workdir", str(run)]) == 0
    kept = from_json((run / "config.json").read_text()).data.tokenizer
    assert f"tokenizer: {kept}\n" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert Path(kept).read_text() == '{"any": "text"}' and Path(kept).is_relative_to(run)


def test_a_process_reads_what_its_devices_hold(tmp_path, values, tensors, monkeypatch):
    """Half of the devices ask for half of what is split, and what several of them hold is read once.

    A_log is read whole for each half of the heads, and kv_b for the keys and for the values.
    """
    folder = write(tmp_path, released_config(K3), tensors, shards=2)
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2}, jax.devices()[:8])
    read = []
    real = SafetensorsReader.read

    def counted(self, name, ranges=()):
        read.append(real(self, name, ranges))
        return read[-1]

    def first_half(shape, sharding, callback):
        """What make_array_from_callback asks for in a process that has four of the eight devices."""
        for device, index in sharding.devices_indices_map(shape).items():
            if device.id < 4:
                callback(index)
        return np.zeros(shape, np.float32)

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    read_hf(folder, mesh)
    everything = sum(array.size for array in read)
    twice = sum(a.size for name, a in tensors.items() if name.endswith(("A_log", "kv_b_proj.weight")))
    assert everything == sum(array.size for array in tensors.values()) + twice
    read.clear()
    monkeypatch.setattr(jax, "make_array_from_callback", first_half)
    read_hf(folder, mesh)
    here = sum(array.size for array in read)
    split = sum(a.size for name, a in tensors.items() if "embed" in name or "experts" in name or "proj" in name)
    assert here < everything - 0.45 * split


def forbidden(*_, **__):
    raise AssertionError("this must never run")


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        ("a path in the index", "'../out.safetensors' is not the name of a file in this folder"),
        ("an absolute path in the index", "is not the name of a file in this folder"),
        ("a link that leads out", "outside of the folder; copy the file into the folder"),
        ("a tokenizer that leads out", "tokenizer.json is a link to"),
        ("a missing shard", "1 files of the index are missing: model-00002-of-00002.safetensors"),
        ("a truncated shard", "model-00002-of-00002.safetensors: damaged or not a safetensors file"),
        ("a wrong dtype", "model.norm.weight: F64, accepted F32, BF16, F16"),
        ("no router bias", f"1 missing: {BIAS}"),
        ("a tail of A_log", f"{A_LOG}: entry 3 is 2, but only 2 heads exist: it must be zero"),
        ("a pickle", "holds pickled weights (pytorch_model.bin), which can run code"),
        ("a pickle in the index", "'model.pt' is not a safetensors file"),
        ("another model_type with code", "model_type='evil': must be kimi_k3; code of a checkpoint is never run"),
        ("an unknown field", "fields that are not understood, each of which may mean another model: beam_size"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(tmp_path, tensors, capsys, monkeypatch, spoil, part):
    monkeypatch.setattr("pickle.load", forbidden)
    monkeypatch.setattr("pickle.loads", forbidden)
    config, folder = released_config(K3), tmp_path / "release"
    index = folder / "model.safetensors.index.json"
    second = folder / "model-00002-of-00002.safetensors"
    if spoil == "a wrong dtype":
        tensors["language_model.model.norm.weight"] = np.ones(16, np.float64)
    if spoil == "no router bias":
        del tensors[BIAS]
    if spoil == "a tail of A_log":
        tensors[A_LOG] = np.concatenate([tensors[A_LOG][:3], np.full(125, 2, np.float32)])
    if spoil == "another model_type with code":
        config |= {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    if spoil == "an unknown field":
        config |= {"beam_size": 4}
    write(folder, config, tensors, shards=2)
    (folder / "modeling.py").write_text("raise SystemExit('this must never run')")
    name = {
        "a path in the index": "../out.safetensors",
        "an absolute path in the index": str(tmp_path / "x.safetensors"),
    }
    name |= {"a pickle in the index": "model.pt"}
    if spoil in name:
        index.write_text(json.dumps({"weight_map": {"a": name[spoil]}}))
    if spoil == "a link that leads out":
        second.rename(tmp_path / "out.safetensors")
        second.symlink_to(tmp_path / "out.safetensors")
    if spoil == "a tokenizer that leads out":
        (folder / "tokenizer.json").symlink_to("/etc/passwd")
    if spoil == "a missing shard":
        second.unlink()
    if spoil == "a truncated shard":
        second.write_bytes(second.read_bytes()[:-9])
    if spoil == "a pickle":
        for file in folder.glob("model*"):
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert main(["import-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert part in err and err.startswith("k3train: ") and "Traceback" not in err and not out
    assert not (tmp_path / "run").exists()
