"""Fine-tuned with quantisation, exported, imported: what is served is what was trained, bit for bit."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import k3train
from k3train.checkpoint.hf_export import export_hf
from k3train.checkpoint.hf_import import import_hf
from k3train.config.schema import Config, DataConfig, LogConfig, MeshConfig, OptimConfig, QuantConfig
from k3train.core.tree import leaves
from k3train.ops.mx import decode_mxfp4
from k3train.parallel.mesh import make_mesh
from k3train.train.loop import train
from tests.checkpoint.releases import K3, make_run, random_parameters, release
from tests.checkpoint.test_hf_export import config_of, same_bytes, strange_reader

MODEL = replace(
    K3, vocab_size=264, pad_token_id=257, num_layers=2, kda_layers=(0,), mla_layers=(1,), moe_layers=(1,),
    kda_a_log_length=0, moe_intermediate_size=64,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """sft: two steps on a mesh from made-up weights. out: its export. again: that, imported. out2: that, exported."""
    folder = tmp_path_factory.mktemp("sft")
    (folder / "text.txt").write_text("one two three four. " * 60)
    values = {path: array / 16 for path, array in random_parameters(MODEL).items()}
    config = Config(model=MODEL, data=DataConfig(source="text", path=str(folder / "text.txt"), seq_len=32))
    make_run(folder / "first", config, values)
    sft = replace(
        config,
        data=replace(config.data, batch_size=4, eval_fraction=0.0),
        mesh=MeshConfig(expert=4, tensor=2),
        optim=OptimConfig(peak_lr=1e-2, final_lr=1e-2),
        quant=QuantConfig(experts="mxfp4_mxfp8", weight_scale="floor"),
        log=LogConfig(tensorboard=False),
        phase="sft",
        num_steps=2,
        init_from=str(folder / "first"),
    )
    assert train(sft, folder / "sft") == 0
    export_hf(folder / "sft", folder / "out")
    import_hf(folder / "out", folder / "again")
    export_hf(folder / "again", folder / "out2")
    return folder


@pytest.fixture(scope="module")
def sft(folder):
    return k3train.load(folder / "sft")


@pytest.fixture(scope="module")
def again(folder):
    return k3train.load(folder / "again")


def test_the_export_holds_the_weights_of_the_forward_pass(folder, sft):
    """Each expert once, packed and with scales; what they decode to is what the forward pass multiplied with."""
    seen = {path: np.asarray(array) for path, array in (*leaves(sft.weights.params), *leaves(sft.weights.bias))}
    wanted = release(MODEL, "k3", seen)
    tensors = strange_reader(folder / "out")
    packed = {name.removesuffix("_packed") for name in tensors if name.endswith("_packed")}
    experts = {name for name in wanted if ".experts." in name}
    assert packed == experts and len(experts) == 3 * MODEL.num_experts * len(MODEL.moe_layers)
    assert tensors.keys() == (wanted.keys() - experts) | {f"{n}_{end}" for n in experts for end in ("packed", "scale")}
    for name, weights in wanted.items():
        got = decode_mxfp4(tensors[f"{name}_packed"], tensors[f"{name}_scale"]) if name in experts else tensors[name]
        assert got.tobytes() == weights.tobytes(), name
    quantization = config_of(folder / "out")["text_config"]["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized"


def test_export_import_export_changes_nothing(folder):
    same_bytes(strange_reader(folder / "out2"), strange_reader(folder / "out"))
    assert config_of(folder / "out2") == config_of(folder / "out")


def test_the_imported_model_computes_what_training_computed(sft, again):
    """Logits of one forward pass bit for bit, and what decoding takes for the likeliest token."""
    assert again.config.quant == QuantConfig(experts="mxfp4_mxfp8")
    wanted = sft.logits(TOKENS)
    np.testing.assert_array_equal(again.logits(TOKENS), wanted)
    prompt = TOKENS[0, :10]
    found = again.generate([prompt], max_tokens=6, temperature=0.0, stop=())[0]
    text = np.concatenate([prompt, found])[None]
    np.testing.assert_array_equal(np.argmax(sft.logits(text)[0, 9:-1], axis=-1), found)


def test_masters_are_not_what_is_exported(folder, sft, caplog):
    """An export in full precision has the masters, and says that no forward pass saw them."""
    plain = export_hf(folder / "sft", folder / "f32", experts="f32")
    assert "not rounded, though the forward pass of training rounds them" in caplog.text
    masters = strange_reader(plain.folder)
    name = next(name for name in masters if ".experts." in name)
    tensors = strange_reader(folder / "out")
    rounded = decode_mxfp4(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
    assert (masters[name] != rounded).mean() > 0.9


def test_a_mesh_that_would_cut_blocks_cannot_hold_the_run(folder):
    with pytest.raises(ValueError, match="routed experts: expert_in has 32 entries, no whole blocks of 32 on"):
        k3train.load(folder / "sft", mesh=make_mesh({"data": 2}, jax.devices()[:2]))


def test_an_import_may_leave_the_inputs_alone(folder, again):
    import_hf(folder / "out", folder / "plain", quant="none")
    assert json.loads((folder / "plain" / "config.json").read_text())["quant"]["experts"] == "none"
    plain = k3train.load(folder / "plain")
    for (path, one), (_, other) in zip(leaves(plain.weights.params), leaves(again.weights.params), strict=True):
        np.testing.assert_array_equal(one, other, path)
