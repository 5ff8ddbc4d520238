"""`config.json` out: what the reader takes for the same model, in the released words; what it cannot say is refused."""

import json
from dataclasses import replace

import pytest

from k3train.checkpoint.hf_config import read_tree
from k3train.checkpoint.hf_config_write import TokenIds, layout_of, new_config, said, with_quantization
from k3train.config.check import ConfigError
from k3train.config.load import load
from k3train.config.schema import ModelConfig
from tests.checkpoint.releases import K3, KIMI
from tests.model.golden_models import DATA

IDS = TokenIds(1, [2, 3])
FLAT = replace(KIMI, mla_q_lora_rank=6, num_shared_experts=2)


@pytest.mark.parametrize("model", [K3, KIMI, FLAT, ModelConfig()], ids=["k3", "kimi", "flat", "default"])
@pytest.mark.parametrize("layout", ["k3", "kimi_linear", "transformers"])
def test_reads_back_as_the_same_model(model, layout):
    if layout == "transformers" and layout_of(model) == "k3":
        return
    tree = json.loads(json.dumps(new_config(model, layout, IDS, 99)))
    assert said(read_tree(tree, "here").model) == said(model)
    assert ("text_config" in tree) == (layout == "k3")
    assert tree["eos_token_id"] == [2, 3]


@pytest.mark.parametrize(("name", "golden"), [("k3", "k3_tiny"), ("kimi_linear_48b", "kimi_linear_tiny")])
def test_says_what_the_release_says(name, golden):
    """Every field of the golden files but those that nothing depends on, and no field that they lack."""
    model = load(name)[0].model
    got = new_config(model, layout_of(model), TokenIds(), 1)
    wanted = json.loads((DATA / golden / "config.json").read_text())
    levels = [(got, wanted)]
    if "text_config" in wanted:
        levels.append((got["text_config"], wanted["text_config"]))
    for mine, theirs in levels:
        left_out = {"rope_theta", "rope_scaling", "head_dim", "ignore_index", "media_placeholder_token_id"}
        left_out |= {"transformers_version", "use_grouped_topk"}
        assert theirs.keys() - mine.keys() <= left_out
        assert mine.keys() - theirs.keys() <= {"attention_bias", "attention_dropout"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_res": "full"}, "model.attn_res='full', only 'block'"),
        ({"kda_gate_rank": 8}, "model.kda_gate_rank=8, only 4"),
        ({"mla_norm_eps": 1e-5}, "model.mla_norm_eps=1e-05, only 1e-06"),
        ({"dense_layers": (1,), "moe_layers": (0, 2, 3)}, "model.dense_layers=(1,), only (0,); model.moe_layers="),
    ],
)
def test_what_the_file_cannot_say(changes, message):
    with pytest.raises(ConfigError) as caught:
        new_config(replace(K3, **changes), "k3", IDS, 99)
    assert str(caught.value).startswith("config.json of layout k3 cannot say this model: ") and message in str(
        caught.value
    )


def test_transformers_may_have_dense_layers_anywhere():
    model = replace(KIMI, dense_layers=(1,), moe_layers=(0, 2, 3))
    assert read_tree(new_config(model, "transformers", IDS, 99), "here").model.dense_layers == (1,)
    with pytest.raises(ConfigError, match="model.dense_layers="):
        new_config(model, "kimi_linear", IDS, 99)


def test_quantization_is_said_as_released():
    """In `text_config` where there is one; what a file says already is kept, and goes with plain experts."""
    golden = json.loads((DATA / "k3_mxfp4_ckpt" / "config.json").read_text())["text_config"]["quantization_config"]
    tree = new_config(K3, "k3", IDS, 99)
    got = with_quantization(tree, True)["text_config"]["quantization_config"]
    assert "quantization_config" not in tree["text_config"]
    ignore = got.pop("ignore")
    assert ignore[: len(golden["ignore"])] == golden.pop("ignore") and got == golden
    said_already = {"quantization_config": {"some": "thing"}}
    assert with_quantization(said_already, True) == said_already and with_quantization(said_already, False) == {}
