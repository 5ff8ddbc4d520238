"""Checkpoints out: the bytes of a release, read by code that shares nothing with the importer; whole or not at all."""

import errno
import json
import os
from dataclasses import replace
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from k3train.checkpoint import hf_export
from k3train.checkpoint.hf_export import export_hf
from k3train.checkpoint.hf_import import import_hf, read_hf
from k3train.checkpoint.orbax import Stored
from k3train.checkpoint.safetensors_writer import plan_files
from k3train.cli import main
from k3train.config.check import ConfigError
from k3train.config.schema import Config, DataConfig
from k3train.core.tree import leaves
from k3train.parallel.mesh import make_mesh
from tests.checkpoint.releases import (
    K3,
    KIMI,
    VISION,
    make_run,
    random_parameters,
    release,
    released_config,
    stored,
    vision_config,
    vision_tensors,
    write,
)
from tests.model.golden_models import DATA, io
from tests.tolerances import assert_close

NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}


def file_tensors(file):
    """name -> array, by the format's description alone: length of the header, header, numbers without holes."""
    data, found, end = file.read_bytes(), {}, 0
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end, name
        end = entry["data_offsets"][1]
        numbers = np.frombuffer(data[start + entry["data_offsets"][0] : start + end], NUMPY[entry["dtype"]])
        found[name] = numbers.reshape(entry["shape"])
    assert start + end == len(data) and start % 8 == 0
    return found


def golden_tensors(folder):
    return {n: a for file in sorted(folder.glob("model*.safetensors")) for n, a in file_tensors(file).items()}


def strange_reader(folder):
    """name -> array of all files of an export; the index must agree."""
    found, files = {}, {}
    for file in folder.glob("*.safetensors"):
        tensors = file_tensors(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
        files |= dict.fromkeys(tensors, file.name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    return found


def same_bytes(got, wanted):
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def k3_values():
    return random_parameters(K3)


@pytest.fixture(scope="module")
def k3_tiny(tmp_path_factory):
    """Export of the golden K3."""
    folder = tmp_path_factory.mktemp("k3_tiny")
    import_hf(DATA / "k3_tiny", folder / "run")
    export_hf(folder / "run", folder / "out")
    return folder / "out"


def test_the_golden_k3_comes_back(k3_tiny):
    same_bytes(strange_reader(k3_tiny), golden_tensors(DATA / "k3_tiny"))
    assert config_of(k3_tiny) == json.loads((DATA / "k3_tiny" / "config.json").read_text())


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "transformers"])
def test_golden_kimi_linear_comes_back(tmp_path, name):
    """To the byte, with their configuration; the tensors of transformers differ from Moonshot's in three names."""
    source = DATA / "kimi_linear_tiny"
    wanted = golden_tensors(source)
    config = json.loads((source / "config.json").read_text())
    if name == "transformers":
        wanted = {key.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): a for key, a in wanted.items()}
        config = json.loads((source / "config_transformers.json").read_text())
        source = write(tmp_path / "source", config, wanted)
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    same_bytes(strange_reader(tmp_path / "out"), wanted)
    assert config_of(tmp_path / "out") == config
    assert not (tmp_path / "out.partial").exists()


def test_a_layer_recomputed_from_the_file(k3_tiny):
    """The dense MLP of the golden K3, by numpy from an export, against what the official code computed."""
    file, golden = strange_reader(k3_tiny), io("k3_tiny")
    prefix = "language_model.model.layers.0."
    x, wanted = golden["mlp_in_row0"][0], golden["mlp_out_row0"][0]
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * file[f"{prefix}post_attention_layernorm.weight"]
    gate, up = (x @ file[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    inner = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    got = inner @ file[f"{prefix}mlp.down_proj.weight"].T
    assert_close(got, wanted, "layer tensor")


MXFP4 = replace(
    K3,
    hidden_size=128,
    num_layers=2,
    kda_layers=(0,),
    mla_layers=(1,),
    moe_layers=(1,),
    num_experts=8,
    moe_intermediate_size=96,
    moe_latent_size=64,
    compute_dtype="bfloat16",
)


@pytest.fixture
def mxfp4_release(tmp_path):
    """The golden MoE layer inside a model of two layers, with a vision tower; (folder, tensors)."""
    golden = golden_tensors(DATA / "k3_mxfp4_ckpt")
    rest = stored(release(MXFP4, "k3", random_parameters(MXFP4)), MXFP4, "k3")
    tensors = {name: array for name, array in rest.items() if "experts." not in name or "shared" in name}
    assert len(golden) == 56 and len(golden.keys() - tensors.keys()) == 48  # the others replace random ones
    tensors |= golden | vision_tensors(VISION, MXFP4.hidden_size)
    config = released_config(MXFP4) | {"dtype": "bfloat16", "vision_config": vision_config(VISION, 128)}
    quantization = json.loads((DATA / "k3_mxfp4_ckpt" / "config.json").read_text())["text_config"]
    config["text_config"]["quantization_config"] = quantization["quantization_config"]
    return write(tmp_path / "release", config, tensors, shards=3), tensors


def test_packed_experts_and_vision_tower_come_back(tmp_path, mxfp4_release):
    folder, tensors = mxfp4_release
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    same_bytes(strange_reader(tmp_path / "out"), tensors)
    assert config_of(tmp_path / "out") == config_of(folder)

    first = dict(leaves(read_hf(folder).params))
    for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("f32", np.float32)):
        export_hf(tmp_path / "run", tmp_path / kind, experts=kind)
        plain = strange_reader(tmp_path / kind)
        assert {a.dtype for n, a in plain.items() if ".experts." in n} == {np.dtype(dtype)}
        assert not any(n.endswith(("_packed", "_scale")) for n in plain)
        assert "quantization_config" not in config_of(tmp_path / kind)["text_config"]
        same_bytes({n: plain[n] for n in tensors if n in plain}, {n: a for n, a in tensors.items() if n in plain})
        for path, array in leaves(read_hf(tmp_path / kind).params):
            np.testing.assert_array_equal(array, first[path], path)


def test_experts_pack_to_the_bytes_of_the_release_tool_chain(tmp_path, mxfp4_release):
    """bfloat16 experts of a run that never saw packed ones."""
    folder, tensors = mxfp4_release
    import_hf(folder, tmp_path / "packed")
    export_hf(tmp_path / "packed", tmp_path / "plain", experts="bf16")
    plain = strange_reader(tmp_path / "plain") | file_tensors(DATA / "k3_mxfp4_ckpt" / "source_bf16.safetensors")
    source = write(tmp_path / "source", config_of(tmp_path / "plain"), plain)
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out", experts="mxfp4")
    same_bytes(strange_reader(tmp_path / "out"), tensors)
    ignored = config_of(tmp_path / "out")["text_config"]["quantization_config"].pop("ignore")
    wanted = config_of(folder)["text_config"]["quantization_config"].pop("ignore")
    assert ignored[: len(wanted)] == wanted  # more is said here than in the release


@pytest.fixture
def run(tmp_path, k3_values):
    """A float32 run that was never imported."""
    return make_run(tmp_path / "run", Config(model=K3, data=DataConfig(seq_len=77)), k3_values)


def test_a_fresh_run(tmp_path, run, k3_values, capsys):
    """K3's layout because the model has K3's switches; float32 as it computes; importing it again changes no bit."""
    assert main(["export-hf", "--workdir", str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "step 0, k3 layout, F32 experts, 142 tensors, " in said and " bytes in 1 files" in said
    same_bytes(strange_reader(tmp_path / "out"), release(K3, "k3", k3_values))
    config = config_of(tmp_path / "out")
    assert config["model_type"] == "kimi_k3" and config["text_config"]["max_position_embeddings"] == 77
    assert config["eos_token_id"] is None  # the byte tokenizer's 256 is not among 24 ids
    again = import_hf(tmp_path / "out", tmp_path / "again")
    assert again.config == K3
    for tree in (again.params, again.bias):
        for path, array in leaves(tree):
            np.testing.assert_array_equal(array, k3_values[path], path)


def test_a_run_that_computes_in_bfloat16(tmp_path, k3_values):
    """Stored as a release is: bfloat16, and float32 where that keeps it. Any step can be asked for."""
    config = Config(model=replace(K3, compute_dtype="bfloat16"))
    run = make_run(tmp_path / "run", config, k3_values, steps=(3, 8))
    wanted = {path: array + np.float32(3) for path, array in k3_values.items()}
    export_hf(run, tmp_path / "out", step=3)
    same_bytes(strange_reader(tmp_path / "out"), stored(release(K3, "k3", wanted), K3, "k3"))
    assert config_of(tmp_path / "out")["text_config"]["dtype"] == "bfloat16"
    assert export_hf(run, tmp_path / "newest").step == 8
    with pytest.raises(ValueError, match="no checkpoint of step 4 in .*; complete: 3, 8"):
        export_hf(run, tmp_path / "no", step=4)


def test_layouts_can_be_chosen(tmp_path, run, k3_values):
    values = random_parameters(KIMI)
    kimi = make_run(tmp_path / "kimi", Config(model=KIMI), values)
    for layout in (None, "transformers"):
        out = tmp_path / str(layout)
        export_hf(kimi, out, layout=layout)
        same_bytes(strange_reader(out), release(KIMI, layout or "kimi_linear", values))
        assert read_hf(out).config == KIMI
    assert config_of(tmp_path / "transformers")["layer_types"].count("full_attention") == 1
    export_hf(run, tmp_path / "flat", layout="kimi_linear")  # K3's text model alone
    same_bytes(strange_reader(tmp_path / "flat"), release(K3, "kimi_linear", k3_values))
    with pytest.raises(ValueError, match="transformers has no such kimi_linear: model.attn_res='block', only 'none'; "):
        export_hf(run, tmp_path / "no", layout="transformers")
    with pytest.raises(ValueError, match="layout='hf': must be k3, kimi_linear, transformers"):
        export_hf(run, tmp_path / "no", layout="hf")
    with pytest.raises(ValueError, match="16 inputs cannot be packed, MXFP4 needs a multiple of 32"):
        export_hf(kimi, tmp_path / "no", experts="mxfp4")
    with pytest.raises(ValueError, match="experts='fp8': must be mxfp4, bf16, f32"):
        export_hf(kimi, tmp_path / "no", experts="fp8")
    assert not list(tmp_path.glob("no*"))


def test_a_run_that_started_from_a_release_gives_its_form(tmp_path, mxfp4_release, caplog):
    """Also through a run between them: names, dtypes, configuration, tokenizer, vision tower."""
    folder, tensors = mxfp4_release
    (folder / "tiktoken.model").write_text("YQ== 0")
    (folder / "tokenization.py").write_text("raise SystemExit('this must never run')")
    import_hf(folder, tmp_path / "imported")
    values = random_parameters(MXFP4, seed=1)
    config = Config(model=replace(MXFP4, remat="sublayer"), init_from=str(tmp_path / "imported"))
    first = make_run(tmp_path / "first", config, values)
    second = make_run(tmp_path / "second", replace(config, init_from=str(first)), values)
    export_hf(second, tmp_path / "out")
    got = strange_reader(tmp_path / "out")
    assert {n: (a.dtype, a.shape) for n, a in got.items()} == {n: (a.dtype, a.shape) for n, a in tensors.items()}
    vision = vision_tensors(VISION, MXFP4.hidden_size)
    same_bytes({name: got[name] for name in vision}, vision)
    assert config_of(tmp_path / "out") == config_of(folder)
    assert (tmp_path / "out" / "tiktoken.model").read_text() == "YQ== 0"
    assert (tmp_path / "out" / "tokenization.py").read_text() == (folder / "tokenization.py").read_text()

    (tmp_path / "imported").rename(tmp_path / "moved")
    export_hf(second, tmp_path / "without", experts="mxfp4")
    assert f"init_from={tmp_path / 'imported'} is not there" in caplog.text
    assert strange_reader(tmp_path / "without").keys() == tensors.keys() - vision.keys()


def test_pieces_of_a_sharded_checkpoint(tmp_path, k3_values, monkeypatch):
    """What eight devices saved is read in the pieces they saved, and written in files of a layer each."""
    mesh = make_mesh({"data": 2, "expert": 4}, jax.devices())
    run = make_run(tmp_path / "run", Config(model=K3), k3_values, mesh=mesh)
    read, real = [], Stored.__getitem__

    def counted(self, index):
        read.append(real(self, index))
        return read[-1]

    monkeypatch.setattr(Stored, "__getitem__", counted)
    monkeypatch.setattr(hf_export, "plan_files", lambda groups: plan_files(groups, limit=60_000))
    export_hf(run, tmp_path / "out")
    wanted = release(K3, "k3", k3_values)
    same_bytes(strange_reader(tmp_path / "out"), wanted)
    experts = [a.shape for a in read if a.ndim == 4 and a.shape[2:] == (32, 32)]
    assert experts and {shape[1] for shape in experts} == {1}  # one of four at a time
    assert sum(a.size for a in read) == sum(a.size for a in k3_values.values())
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 4
    layer = {weight_map[n] for n in wanted if ".layers.0." in n}
    assert layer == {files[0]}


def test_nothing_half_written_stays(tmp_path, run, k3_values, monkeypatch):
    path = next(path for path in k3_values if path.endswith("channel/router/weight"))
    broken = dict(k3_values) | {path: np.full_like(k3_values[path], np.nan)}
    bad = make_run(tmp_path / "bad", Config(model=K3), broken)
    with pytest.raises(
        ValueError, match=r"layers.1.block_sparse_moe.gate.weight: its largest weight is nan, which F32"
    ):
        export_hf(bad, tmp_path / "out")
    broken[path] = np.full_like(k3_values[path], 3.4e38)
    bad = make_run(tmp_path / "huge", Config(model=replace(K3, compute_dtype="bfloat16")), broken)
    with pytest.raises(ValueError, match="gate.weight: its largest weight is .*e.38, which BF16 cannot hold"):
        export_hf(bad, tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("k3train.checkpoint.safetensors_writer.os.pwrite", no_space)
        with pytest.raises(ValueError, match="cannot be written: No space left on device"):
            export_hf(run, tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(hf_export.shutil, "disk_usage", lambda _: Free(1000))
        with pytest.raises(ValueError, match=r"needs \d+,\d+ bytes, 1,000 are free"):
            export_hf(run, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))

    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ValueError, match="out.partial is being written, or was left by an export cut short"):
        export_hf(run, tmp_path / "out")
    (tmp_path / "out.partial").rmdir()
    (tmp_path / "out").mkdir()
    export_hf(run, tmp_path / "out")  # empty: taken
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    assert main(["export-hf", "--workdir", str(run), str(tmp_path / "out")]) == 2
    with pytest.raises(ValueError, match="is there already and not an empty folder"):
        export_hf(run, tmp_path / "run" / "config.json")
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before


class Free(NamedTuple):
    free: int


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_of_another_model_is_refused(tmp_path, run):
    """The configuration beside the checkpoint says otherwise, or the record of the release does."""
    import_hf(DATA / "kimi_linear_tiny", tmp_path / "imported")
    record = tmp_path / "imported" / "release" / "release.json"
    text = record.read_text()
    record.write_text(text.replace('"routed_scaling_factor": 2.446', '"routed_scaling_factor": 2.5'))
    with pytest.raises(ConfigError, match=r"cannot say this model: model.moe_routed_scaling_factor=2.446, only 2.5"):
        export_hf(tmp_path / "imported", tmp_path / "out")
    record.write_text(text[:-10])
    with pytest.raises(ValueError, match="release.json is damaged"):
        export_hf(tmp_path / "imported", tmp_path / "out")
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"vocab_size": 24', '"vocab_size": 25'))
    with pytest.raises(ValueError, match="is of another model or optimizer:\n.*differs  params/embed/table"):
        export_hf(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
