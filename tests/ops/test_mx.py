"""Packed MXFP4 weights decode to the very numbers that the format's own library gives."""

import numpy as np
import pytest

from k3train.ops.mx import decode_mxfp4
from tests.model.golden_models import DATA


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
