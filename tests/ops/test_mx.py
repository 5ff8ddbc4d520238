"""MX formats against the release's libraries and exact arithmetic: the same codes, scales, numbers and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3train.ops.mx import E2M1, E4M3, E5M2, RULES, Rounding, decode_mxfp4, encode_mxfp4, round_mx
from tests.model.golden_models import DATA
from tests.tolerances import assert_close


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


FORMATS = {"mxfp4": E2M1, "mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2}


def codes(values, element):
    return values.astype(element.dtype).view(np.uint8)


@pytest.mark.parametrize("element", FORMATS.values(), ids=FORMATS)
def test_every_value_tie_and_neighbour(element):
    """Round to nearest, ties to the even code, saturation; beside the largest power of two the scale is 1."""
    probe = golden("element_tables")
    name = element.name.lower()
    blocks = np.zeros((len(probe[f"{name}_probe"]), 32), np.float32)
    blocks[:, 0], blocks[:, 1] = probe[f"{name}_probe"], 2.0**element.exponent
    got = round_mx(blocks, element, "floor")
    fixed = np.abs(blocks[:, 0]) < 2.0 ** (element.exponent + 1)  # a larger one asks for a larger scale
    assert fixed.mean() > 0.8
    np.testing.assert_array_equal(got.scales[fixed], 127)
    np.testing.assert_array_equal(codes(got.values, element)[fixed, 0], probe[f"{name}_probe_codes"][fixed])


# what no finite float32 can decode; blocks whose scale a peer divides by wrongly (goldens' README_B)
NOT_CT = {"f32_max"}
NOT_TORCHAO = {"f32_max", "tiny_2m120", "tiny_2m124", "tiny_2m125", "min_normal_2m126", "all_denormal"}


@pytest.mark.parametrize(
    ("name", "rule", "peer", "apart"),
    [
        ("mxfp4", "even", "torchao_even", {"f32_max", "min_normal_2m126"}),
        ("mxfp4", "even", "ct", NOT_CT),
        ("mxfp4", "floor", "spec_floor_f64", set()),
        ("mxfp8_e4m3", "even", "ct", NOT_CT),
        ("mxfp8_e4m3", "floor", "spec_floor_f64", set()),
        ("mxfp8_e5m2", "even", "torchao_even", NOT_TORCHAO),
        ("mxfp8_e5m2", "floor", "spec_floor_f64", set()),
    ],
)
def test_scale_rules(name, rule, peer, apart):
    cases, element = golden(name), FORMATS[name]
    keep = ~np.isin(cases["names"], list(apart))
    if peer == "torchao_even":  # it rounds the largest to all bits of the element, the release's tool chain to one
        mantissa = np.frexp(np.abs(cases["x"]).max(axis=1))[0] * 2
        keep &= (mantissa < 1.75) | (mantissa >= 2 - 2.0 ** -(element.mantissa + 1))
    x = cases["x"][keep]
    assert len(x) > 110
    got = round_mx(x, element, rule)
    wanted = cases[f"{peer}__codes"][keep]
    if peer == "ct" and element is E2M1:  # which drops the sign of a zero, though not that of what rounds to zero
        wanted = np.where((x == 0) & np.signbit(x), 8, wanted)
    np.testing.assert_array_equal(got.scales, cases[f"{peer}__scale"][keep])
    np.testing.assert_array_equal(codes(got.values, element), wanted)


@pytest.mark.parametrize(
    ("name", "rule", "peer"),
    [(name, "floor", "spec_floor_f64__dequant") for name in FORMATS]
    + [(name, "even", "ct__fake_quant") for name in ("mxfp4", "mxfp8_e4m3")],
)
def test_fake_quantisation_bit_for_bit(name, rule, peer):
    """On a device, which flushes denormal numbers: such results are zero there, and only those."""
    cases, rounding = golden(name), Rounding(FORMATS[name], rule)
    keep = (cases["names"] != "f32_max") | (rule == "floor")
    x, wanted = cases["x"][keep], cases[peer][keep]
    wanted = np.where((x == 0) & np.signbit(x), x, wanted)
    wanted = np.where(np.abs(wanted) >= 2.0**-126, wanted, np.copysign(np.float32(0), x))
    largest = np.abs(x).max(axis=1)

    @jax.jit
    def run(x):
        once, half = rounding(x), rounding(x.astype(jnp.bfloat16))
        return once, rounding(x.T, axis=0).T, rounding(once), half, rounding(half.astype(jnp.float32))

    once, across, twice, half, half_twice = run(x)
    some = largest >= 2.0**-125  # below, a block is denormal in part
    np.testing.assert_array_equal(np.asarray(once)[some].view(np.int32), wanted[some].view(np.int32))
    assert np.isfinite(once).all() and (np.abs(once[~some]) < 2.0**-123).all()
    np.testing.assert_array_equal(across, once)
    np.testing.assert_array_equal(twice, once)
    assert half.dtype == jnp.bfloat16
    some &= largest < 3e38  # the largest float32 is no bfloat16
    np.testing.assert_array_equal(half[some], half_twice[some])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_is_not_finite_is_nan(name, rule):
    """As in the release's tool chain; the blocks beside it are as ever."""
    cases = golden("nonfinite")
    got, scales = jax.jit(lambda x: (Rounding(FORMATS[name], rule)(x), round_mx(x, FORMATS[name], rule).scales))(
        cases["x"]
    )
    np.testing.assert_array_equal(got, cases[f"{name}__ct__fake_quant"])
    assert np.isnan(got[:5]).all() and np.isfinite(got[5]).all()
    assert (scales[:5] == 255).all() and scales[5] != 255


@pytest.mark.parametrize(
    ("mode", "of_w", "of_x"),
    [("w_floor_x_floor", "floor", "floor"), ("w_even_x_floor", "even", "floor"), ("w_even_x_even", "even", None)],
)
def test_straight_through_product(mode, of_w, of_x):
    """y = Q(x) Q(w)^T, dx = g Q(w), dw = g^T Q(x)."""
    case = golden("ste_linear")

    @jax.jit
    def run(x, w, g):
        def product(x, w):
            # the rows of the last mode were rounded by another "even": they come as they are
            return (Rounding(E4M3, of_x)(x) if of_x else x) @ Rounding(E2M1, of_w)(w).T

        y, pull = jax.vjp(product, x, w)
        return Rounding(E4M3, of_x or "even")(x), Rounding(E2M1, of_w)(w), y, *pull(g)

    fqx, fqw, y, dx, dw = run(case["x"] if of_x else case[f"{mode}__fqx"], case["w"], case["g"])
    np.testing.assert_array_equal(fqw, case[f"{mode}__fqw"])
    np.testing.assert_array_equal(fqx, case[f"{mode}__fqx"])
    assert_close(y, case[f"{mode}__y"], "op")
    assert_close(dx, case[f"{mode}__dx"], "op gradient")
    assert_close(dw, case[f"{mode}__dw"], "op gradient")


@pytest.mark.parametrize("element", FORMATS.values(), ids=FORMATS)
def test_gradients_go_straight_through_or_stop_where_saturated(element):
    x = golden("mxfp4")["x"]
    largest = np.abs(x).max(axis=1)
    x = jnp.asarray(x[(largest > 1e-30) & (largest < 1e38)]).at[:, 5].set(0)
    dy = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def pulled(saturated, rule):
        return jax.jit(lambda x: jax.vjp(Rounding(element, rule, saturated), x)[1](dy)[0])(x)

    np.testing.assert_array_equal(pulled("pass", "floor"), dy)
    scales = np.ldexp(1.0, round_mx(np.asarray(x), element, "floor").scales.astype(int) - 127)
    beyond = np.abs(np.asarray(x, float)) > element.largest * scales
    assert 0 < beyond.sum() < 0.2 * x.size
    np.testing.assert_array_equal(pulled("zero", "floor"), np.where(beyond, 0, dy))
    if element is E4M3:  # its largest number is 1.75 times a power of two: under the rule "even" nothing is beyond it
        np.testing.assert_array_equal(pulled("zero", "even"), dy)
    zeros = jnp.zeros((3, 64))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: Rounding(element)(x).sum()))(zeros), 1)


def test_packing_and_rounding_in_training_agree():
    for rule in RULES:
        x = golden("mxfp4")["x"]
        x = x[np.abs(x).max(axis=1) > 1e-30]
        packed, scale = encode_mxfp4(x, rule)
        weights = decode_mxfp4(packed, scale)
        np.testing.assert_array_equal(jax.jit(Rounding(E2M1, rule))(x), weights)
        for other in RULES:  # what is packed stays as it is, whatever the rule
            for array, same in zip(encode_mxfp4(weights, other), (packed, scale), strict=True):
                np.testing.assert_array_equal(array, same)


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


def test_refuses_to_pack():
    with pytest.raises(ValueError, match="48 columns cannot be packed, MXFP4 needs a multiple of 32"):
        encode_mxfp4(np.zeros((2, 48), np.float32))
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="1 weights are not finite"):
            encode_mxfp4(np.float32([[*[1] * 31, value]]))
    with pytest.raises(ValueError, match="MX scale rule 'ceil': must be even or floor"):
        encode_mxfp4(np.zeros((1, 32), np.float32), "ceil")
    with pytest.raises(ValueError, match="an axis of 48 cannot be cut into MX blocks of 32"):
        Rounding(E4M3)(jnp.zeros((2, 48)))
