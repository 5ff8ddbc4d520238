"""MX block formats as a release stores them (docs/k3.md sections 3.7 and 6.1).

Packing works on host arrays, where the arithmetic is exact, denormal numbers included; the rounding itself also takes
jax arrays.
"""

from typing import Any, NamedTuple

import numpy as np

#: Weights that share one scale, along the input axis.
BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Value of every 4-bit code: bit 3 is the sign, bits 2-0 count the magnitudes.
E2M1 = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# the two weights of every byte, low nibble first, looked up as one number
_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1).view(np.uint64)[:, 0]
_SCALES = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)  # of bytes 0 to 254
_NAN_SCALE, _LARGEST_SAFE_SCALE = 255, 252
_BIAS = 127
_LOWEST, _HIGHEST = -127, 125  # exponents of a scale: above 125 a 4 times the scale would exceed float32
_LARGEST_EXPONENT = 2  # of an E2M1 magnitude: 4 and 6
_BUMP = 0.875  # mantissa, as frexp gives it, from which one bit of it rounds up to the next power of two


class Rounded(NamedTuple):
    """Blocks in MXFP4: value = E2M1[code] * 2^exponent."""

    codes: Any  # uint8 [..., n, 32]
    exponents: Any  # int32 [..., n]


def round_mxfp4(blocks: Any, rule: str = "even") -> Rounded:
    """Blocks of 32 numbers rounded to E2M1 with a shared power of two.

    Magnitudes round to the nearest, ties to the even code; what exceeds 6 times the scale becomes that. The sign of a
    zero is kept, so that rounding a second time changes no code.

    Args:
        blocks: float32 [..., n, 32], numpy or jax, finite; one scale per row.
        rule: how the scale follows from the largest magnitude a. "even", the rule of the release's tool chain: a is
            first rounded to one bit of mantissa, then 2^(floor(log2 a) - 2); "floor", the MX standard: without that
            rounding.

    Raises:
        ValueError: `rule` is another.
    """
    if rule not in ("even", "floor"):
        raise ValueError(f"MX scale rule {rule!r}: must be even or floor")
    xp = blocks.__array_namespace__()
    magnitude = xp.abs(blocks)
    largest = magnitude.max(axis=-1)
    mantissa, exponent = xp.frexp(largest)
    bump = (mantissa >= _BUMP) if rule == "even" else 0
    exponent = xp.clip(exponent - 1 + bump - _LARGEST_EXPONENT, _LOWEST, _HIGHEST)
    exponent = xp.where(largest > 0, exponent, _LOWEST).astype(np.int32)
    scaled = magnitude * xp.ldexp(xp.ones_like(largest), -exponent)[..., None]
    # codes count steps of 1/2 up to 2, of 1 up to 4, of 2 beyond: the smallest of the three counts is the right one
    steps = xp.minimum(xp.rint(2 * scaled), 2 + xp.rint(scaled))
    codes = xp.minimum(xp.minimum(steps, 4 + xp.rint(scaled / 2)), 7).astype(np.uint8)
    return Rounded(codes | xp.signbit(blocks).astype(np.uint8) << 3, exponent)


def encode_mxfp4(weights: np.ndarray, rule: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """Weights packed as a release packs them; the inverse of `decode_mxfp4` on what that returns.

    A block of zeros has scale byte 0.

    Args:
        weights: float32 [..., n], blocks of 32 along the last axis.
        rule: of the scale, see `round_mxfp4`.

    Returns:
        (uint8 [..., n / 2] nibbles, the low one the even column; uint8 [..., n / 32] E8M0 scales)

    Raises:
        ValueError: n is not a multiple of 32, or a weight is not finite.
    """
    columns = weights.shape[-1]
    if columns % BLOCK:
        raise ValueError(f"{columns} columns cannot be packed, MXFP4 needs a multiple of {BLOCK}")
    if not np.all(np.isfinite(weights)):
        raise ValueError(f"{np.count_nonzero(~np.isfinite(weights))} weights are not finite, MXFP4 cannot hold them")
    codes, exponents = round_mxfp4(weights.reshape(*weights.shape[:-1], columns // BLOCK, BLOCK), rule)
    pairs = codes.reshape(*weights.shape[:-1], columns // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + _BIAS).astype(np.uint8)


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights of packed MXFP4 nibbles: E2M1 value * 2^(scale - 127).

    Args:
        packed: uint8 [..., n / 2]; the low nibble is the even column.
        scale: uint8 [..., n / 32], E8M0: one exponent per block of 32 columns.

    Returns:
        float32 [..., n], exact.

    Raises:
        ValueError: dtypes or shapes do not belong together, a scale is NaN (byte 255), or a weight exceeds float32.
    """
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"MXFP4 is stored as uint8, got {packed.dtype} nibbles and {scale.dtype} scales")
    if (*packed.shape[:-1], 2 * packed.shape[-1]) != (*scale.shape[:-1], BLOCK * scale.shape[-1]):
        raise ValueError(f"{list(scale.shape)} scales do not cover {list(packed.shape)} bytes, {BLOCK // 2} bytes each")
    largest = scale.max(initial=0)
    if largest == _NAN_SCALE:
        raise ValueError(f"{np.count_nonzero(scale == _NAN_SCALE)} scales are NaN (byte {_NAN_SCALE})")
    weights = _PAIRS[packed].view(np.float32).reshape(*scale.shape, BLOCK)
    with np.errstate(over="ignore"):
        weights *= _SCALES[scale][..., None]
    if largest > _LARGEST_SAFE_SCALE and not np.all(np.isfinite(weights)):
        raise ValueError(f"a weight exceeds float32: largest scale byte {largest}")
    return weights.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
