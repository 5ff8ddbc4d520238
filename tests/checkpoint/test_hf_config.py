"""`config.json` of a release: every spelling read as data, other models refused."""

import json
from dataclasses import replace

import pytest

from k3train.checkpoint.hf_config import read_config
from k3train.config.check import ConfigError
from tests.checkpoint.releases import K3, KIMI, VISION, released_config, vision_config
from tests.model.golden_models import DATA


def written(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_both_forms(tmp_path):
    """Everything but the length of A_log, which the tensors tell."""
    for model, wanted in ((K3, replace(K3, kda_a_log_length=0)), (KIMI, KIMI)):
        tree = released_config(model)
        got = read_config(written(tmp_path, tree))
        assert got.model == wanted and not got.vision.num_layers and got.tree == tree


def test_the_dtype_is_said_once(tmp_path):
    """K3 says it outside of `text_config`."""
    tree = released_config(K3) | {"dtype": "bfloat16"}
    assert read_config(written(tmp_path, tree)).model.compute_dtype == "bfloat16"
    tree["text_config"]["torch_dtype"] = "float32"
    assert read_config(written(tmp_path, tree)).model.compute_dtype == "float32"


def test_moonshot_and_transformers_write_the_same_model(tmp_path):
    ours = read_config(DATA / "kimi_linear_tiny").model
    text = (DATA / "kimi_linear_tiny" / "config_transformers.json").read_text()
    theirs = read_config(written(tmp_path, text)).model
    assert ours == theirs and ours.num_layers == 5
    # a model made in transformers has no section of Moonshot's and no first_k_dense_replace
    config = json.loads(text)
    del config["linear_attn_config"], config["first_k_dense_replace"]
    assert read_config(written(tmp_path, config)).model == ours
    config["layer_types"][0] = "full_attention"
    assert read_config(written(tmp_path, config)).model.mla_layers == (0, 3)


def test_fields_that_are_not_understood_are_listed(tmp_path):
    """And refused, because any of them may mean another model; one that says nothing is passed over."""
    config = released_config(K3) | {"auto_map": {"AutoConfig": "evil.Config"}, "beam_size": 4, "clip_qkv": None}
    config["text_config"] |= {"rope_theta": 1e4, "rope_scaling": None, "sliding_window": 128}
    config["text_config"]["linear_attn_config"]["mode"] = "fused"
    (tmp_path / "evil.py").write_text("raise SystemExit('this must never run')")
    unknown = ("beam_size", "text_config.sliding_window", "text_config.linear_attn_config.mode")
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, config))
    assert f"fields that are not understood, each of which may mean another model: {', '.join(unknown)};" in str(
        caught.value
    )
    assert read_config(tmp_path, unknown).model == replace(K3, kda_a_log_length=0)
    with pytest.raises(ConfigError, match=r"mean another model: beam_size;.*\n.*names what it need not: nonsense"):
        read_config(tmp_path, (*unknown[1:], "nonsense"))


def test_vision_tower(tmp_path):
    config = released_config(K3) | {"vision_config": vision_config(VISION, K3.hidden_size)}
    got = read_config(written(tmp_path, config))
    assert got.vision == VISION
    config["vision_config"] |= {"vt_hidden_size": "8", "merge_kernel_size": [2, 1], "text_hidden_size": 17}
    del config["vision_config"]["patch_size"]
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, config))
    for part in (
        "patch_size is missing",
        "vt_hidden_size='8'",
        "merge_kernel_size=[2, 1]",
        "text_hidden_size=17: must",
    ):
        assert f"vision_config.{part}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "linear", "message"),
    [
        ({"num_experts": ...}, {}, "text_config.num_experts is missing"),
        ({"latent_moe_use_norm": ...}, {}, "text_config.latent_moe_use_norm is missing"),
        ({"activation_situ_beta": ...}, {}, "text_config.activation_situ_beta is missing"),
        ({}, {"head_dim": ...}, "text_config.linear_attn_config.head_dim is missing"),
        ({"hidden_size": "16"}, {}, "text_config.hidden_size='16': must be a whole number"),
        ({"moe_renormalize": 1}, {}, "text_config.moe_renormalize=1: must be true or false"),
        ({}, {"kda_layers": [1, 2.0, 4]}, "kda_layers=[1, 2.0, 4]: must be a list of whole numbers"),
        ({}, {"kda_layers": [0, 1, 3]}, "must name layers 1 to 4 once each"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu': must be situ or silu"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings=True: only False is known here"),
        ({"mla_use_nope": False}, {}, "mla_use_nope=False: only True is known here"),
        ({"num_nextn_predict_layers": 1}, {}, "num_nextn_predict_layers=1: only 0 is known here"),
        (
            {"model_type": "llama"},
            {},
            "text_config.model_type='llama': must be kimi_linear; code of a checkpoint is never",
        ),
        ({"num_expert_group": 8}, {}, "num_expert_group=8: only 1 is known here"),
        ({"num_key_value_heads": 1}, {}, "num_key_value_heads=1: must equal num_attention_heads=2"),
        ({"layer_types": ["full_attention"] * 4}, {}, "layer_types and text_config.linear_attn_config.kda_layers name"),
        ({"mlp_layer_types": ["sparse"] * 4}, {}, "mlp_layer_types and first_k_dense_replace name different layers"),
    ],
)
def test_refusals(tmp_path, changes, linear, message):
    config = released_config(K3)
    for target, values in ((config["text_config"], changes), (config["text_config"]["linear_attn_config"], linear)):
        for key, value in values.items():
            target[key] = value
            if value is ...:
                del target[key]
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, config))
    assert message in str(caught.value)


def test_all_problems_at_once_and_broken_files(tmp_path):
    config = released_config(KIMI)
    del config["vocab_size"], config["v_head_dim"]
    with pytest.raises(ConfigError, match=r"vocab_size is missing\n.*v_head_dim is missing"):
        read_config(written(tmp_path, config))
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_config(written(tmp_path, "{"))
    with pytest.raises(ConfigError, match="must hold one JSON object"):
        read_config(written(tmp_path, "[]"))
    with pytest.raises(ConfigError, match=r"config.json: No such file"):
        read_config(tmp_path / "nowhere")
