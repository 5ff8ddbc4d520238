"""MXFP4 against the libraries of the release: weights decode to the same numbers and pack to the same bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3train.ops.mx import decode_mxfp4, encode_mxfp4, round_mxfp4
from tests.model.golden_models import DATA


def golden(name):
    with np.load(DATA / "mx" / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("expert", [0, 7])
def test_released_experts(expert):
    with np.load(DATA / "k3_mxfp4_ckpt" / "experts.npz") as golden:
        for matrix in ("w1", "w2", "w3"):
            packed, scale, wanted = (
                golden[f"{expert}.{matrix}.{kind}"] for kind in ("weight_packed", "weight_scale", "dequant")
            )
            got = decode_mxfp4(packed, scale)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, wanted)


def test_low_nibble_first_and_every_scale():
    packed = np.tile(np.uint8([[0x21, 0xF7]]), (1, 8))  # 0.5, 1, 6, -6
    for byte in (0, 1, 127, 252):
        got = decode_mxfp4(packed, np.uint8([[byte]]))
        np.testing.assert_array_equal(got[0, :4].astype(np.float64), np.array([0.5, 1, 6, -6]) * 2.0 ** (byte - 127))


def test_refusals():
    packed, scale = np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"\[2, 1\] scales do not cover \[2, 32\] bytes"):
        decode_mxfp4(packed, scale[:, :1])
    with pytest.raises(ValueError, match="MXFP4 is stored as uint8, got uint8 nibbles and float32 scales"):
        decode_mxfp4(packed, scale.astype(np.float32))
    with pytest.raises(ValueError, match="4 scales are NaN"):
        decode_mxfp4(packed, scale + np.uint8(255))
    with pytest.raises(ValueError, match="a weight exceeds float32: largest scale byte 254"):
        decode_mxfp4(packed + np.uint8(7), scale + np.uint8(254))


def test_every_value_tie_and_neighbour():
    """Round to nearest, ties to the even code, saturation at 6; beside a 4 the scale is 1."""
    probe = golden("element_tables")
    blocks = np.zeros((len(probe["e2m1_probe"]), 32), np.float32)
    blocks[:, 0], blocks[:, 1] = probe["e2m1_probe"], 4
    got = round_mxfp4(blocks, "floor")
    fixed = np.abs(probe["e2m1_probe"]) < 8  # a larger one asks for a larger scale
    assert fixed.sum() > 55
    np.testing.assert_array_equal(got.exponents[fixed], 0)
    np.testing.assert_array_equal(got.codes[fixed, 0], probe["e2m1_probe_codes"][fixed])


@pytest.mark.parametrize(
    ("rule", "peer", "apart"),
    [
        # what no finite float32 can decode, and blocks whose scale the peer divides by wrongly (goldens' README_B)
        ("even", "torchao_even", {"f32_max", "min_normal_2m126"}),
        ("even", "ct", {"f32_max"}),
        ("floor", "spec_floor_f64", set()),
    ],
)
def test_scale_rules(rule, peer, apart):
    cases = golden("mxfp4")
    keep = ~np.isin(cases["names"], list(apart))
    x = cases["x"][keep]
    codes, exponents = round_mxfp4(x[:, None], rule)
    wanted = cases[f"{peer}__codes"][keep]
    if peer == "ct":  # which drops the sign of a zero, though not that of a number that rounds to zero
        wanted = np.where((x == 0) & np.signbit(x), 8, wanted)
    np.testing.assert_array_equal(exponents + 127, cases[f"{peer}__scale"][keep])
    np.testing.assert_array_equal(codes[:, 0], wanted)
    packed, scale = encode_mxfp4(x, rule)
    again = encode_mxfp4(decode_mxfp4(packed, scale), rule)
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scale)


def test_largest_float32_stays_finite():
    weights = np.full((1, 32), np.finfo(np.float32).max)
    np.testing.assert_array_equal(decode_mxfp4(*encode_mxfp4(weights)), np.full((1, 32), np.ldexp(np.float32(6), 125)))


def test_packs_to_the_bytes_of_the_release_tool_chain():
    matrix = golden("packed_weight")
    packed, scale = encode_mxfp4(matrix["weight"])
    np.testing.assert_array_equal(packed, matrix["bf16__weight_packed"])
    np.testing.assert_array_equal(scale, matrix["bf16__weight_scale"])
    source = load_file(DATA / "k3_mxfp4_ckpt" / "source_bf16.safetensors")
    shards = [load_file(file) for file in sorted((DATA / "k3_mxfp4_ckpt").glob("model-*.safetensors"))]
    wanted = {name: array for shard in shards for name, array in shard.items()}
    assert len(source) == 24
    for name, weights in source.items():
        packed, scale = encode_mxfp4(weights.astype(np.float32))
        np.testing.assert_array_equal(packed, wanted[f"{name}_packed"], name)
        np.testing.assert_array_equal(scale, wanted[f"{name}_scale"], name)


def test_same_on_a_device():
    x = golden("mxfp4")["x"]
    x = x[np.abs(x).max(axis=1) > 1e-30]  # devices flush denormal numbers
    for rule in ("even", "floor"):
        host, device = (
            round_mxfp4(x[:, None], rule),
            jax.jit(round_mxfp4, static_argnums=1)(jnp.asarray(x[:, None]), rule),
        )
        np.testing.assert_array_equal(device.exponents, host.exponents)
        np.testing.assert_array_equal(device.codes, host.codes)


def test_refuses_to_pack():
    with pytest.raises(ValueError, match="48 columns cannot be packed, MXFP4 needs a multiple of 32"):
        encode_mxfp4(np.zeros((2, 48), np.float32))
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="1 weights are not finite"):
            encode_mxfp4(np.float32([[*[1] * 31, value]]))
    with pytest.raises(ValueError, match="MX scale rule 'ceil': must be even or floor"):
        encode_mxfp4(np.zeros((1, 32), np.float32), "ceil")
