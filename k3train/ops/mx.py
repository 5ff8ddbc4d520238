"""MX block formats: rounding while training, and weights as a release stores them (docs/k3.md sections 3.7 and 6.1).

One rounding, `round_mx`, serves both. It works on bit patterns, so numpy and jax arrays give the same numbers; only jax
devices flush denormal numbers (below 2^-126), where the host is exact.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3train.core.axes import MX_BLOCK

BLOCK = MX_BLOCK
#: How the scale of a block follows from its largest magnitude: `round_mx`.
RULES = ("even", "floor")


class Element(NamedTuple):
    """A type of the numbers in a block."""

    name: str
    mantissa: int  # bits
    step: int  # exponent of the smallest difference, that near zero
    exponent: int  # of the largest magnitude
    largest: float
    dtype: Any  # of its codes


E2M1 = Element("E2M1", 1, -1, 2, 6.0, ml_dtypes.float4_e2m1fn)
E4M3 = Element("E4M3", 3, -9, 8, 448.0, ml_dtypes.float8_e4m3fn)
E5M2 = Element("E5M2", 2, -16, 15, 57344.0, ml_dtypes.float8_e5m2)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Value of every 4-bit code: bit 3 is the sign, bits 2-0 count the magnitudes.
_E2M1_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# the two weights of every byte, low nibble first, looked up as one number
_PAIRS = np.stack([np.tile(_E2M1_VALUES, 16), np.repeat(_E2M1_VALUES, 16)], axis=-1).view(np.uint64)[:, 0]
_CODES = np.zeros(13, np.uint8)  # of twice a magnitude
_CODES[[round(2 * x) for x in _MAGNITUDES]] = range(8)
_CACHED_BLOCKS = 4096  # packed at a time: with all that is computed of them they fit into a second-level cache
_SCALES = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)  # of bytes 0 to 254
_NAN_SCALE, _LARGEST_SAFE_SCALE = 255, 252

# float32: 23 bits of mantissa below 8 of exponent, whose field is 127 at 1
_MANTISSA, _BIAS = 23, 127
_MAGNITUDE, _EXPONENT, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_TOP_FIELD = 254
_QUARTER = 1 << 21  # added to a mantissa of 1.75 or more, it carries into the exponent


class Rounded(NamedTuple):
    """Numbers in an MX format: value * 2^(scale - 127)."""

    values: Any  # float32, every one a value of the element type
    scales: Any  # uint8, E8M0: one for each block; 255, NaN, where a number of the block is not finite


def round_mx(x: Any, element: Element, rule: str = "even", axis: int = -1) -> Rounded:
    """Numbers rounded to an element type and, for each block of 32, a shared power of two.

    Magnitudes round to the nearest, ties to the even code; what exceeds the largest element times the scale becomes
    that. The sign of a zero is kept. Rounding a second time changes nothing. A block of zeros has scale byte 0.

    Args:
        x: float32, numpy or jax.
        element: type of the rounded numbers.
        rule: of the scale, 2^(floor(log2 a) - exponent of the largest element) for the largest magnitude a. "even",
            that of the release's tool chain: a is first rounded to one bit of mantissa, so that from 1.75 times a
            power of two on the next one counts. "floor", the MX standard: without that.
        axis: along which the blocks run, a multiple of 32 long.

    Returns:
        Values of the shape of `x`; scales with `axis` 32 times shorter.

    Raises:
        ValueError: `rule` is another, or `axis` is no multiple of 32.
    """
    axis %= x.ndim
    halves, scales = _round(_cut(x, axis), element, rule, axis + 1)
    return Rounded(2 * halves.reshape(x.shape), scales.squeeze(axis + 1).astype(np.uint8))


def _cut(x: Any, axis: int) -> Any:
    """Blocks on an axis of their own, after `axis`."""
    if x.shape[axis] % BLOCK:
        raise ValueError(f"an axis of {x.shape[axis]} cannot be cut into MX blocks of {BLOCK}")
    return x.reshape(*x.shape[:axis], x.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :])


def _round(blocks: Any, element: Element, rule: str, axis: int) -> tuple[Any, Any]:
    """`round_mx` of blocks that lie along `axis`: half the values; scale bytes, int32, which keep that axis.

    Half, because half a value times twice the smallest scale needs no denormal number.
    """
    xp = blocks.__array_namespace__()
    scales = _scales(blocks, element, rule, axis)
    scaled = blocks * _float((_TOP_FIELD - scales) << _MANTISSA)
    # the distance of neighbouring elements around each number, a power of two
    step = (scaled.view(np.int32) & _EXPONENT) - (element.mantissa << _MANTISSA)
    step = xp.maximum(step, (_BIAS + element.step) << _MANTISSA)
    halves = xp.rint(scaled * _float((_TOP_FIELD << _MANTISSA) - step)) * _float(step - (1 << _MANTISSA))
    return xp.clip(halves, -element.largest / 2, element.largest / 2), scales


def _scales(blocks: Any, element: Element, rule: str, axis: int) -> Any:
    if rule not in RULES:
        raise ValueError(f"MX scale rule {rule!r}: must be {' or '.join(RULES)}")
    xp = blocks.__array_namespace__()
    # bit patterns are ordered as magnitudes, infinity and NaN last
    largest = (blocks.view(np.int32) & _MAGNITUDE).max(axis=axis, keepdims=True)
    field = (largest + (_QUARTER if rule == "even" else 0)) >> _MANTISSA
    field = xp.clip(field - element.exponent, 0, _TOP_FIELD - element.exponent)
    return xp.where(largest >= _EXPONENT, _NAN_SCALE, field)


def _float(bits: Any) -> Any:
    return bits.view(np.float32)


def _double(scales: Any) -> Any:
    """Twice the scales of these bytes: all of them normal numbers, or NaN."""
    xp = scales.__array_namespace__()
    return _float(xp.where(scales == _NAN_SCALE, _NAN, (scales + 1) << _MANTISSA))


@dataclass(frozen=True)
class Rounding:
    """Fake quantisation: numbers come back rounded to an MX format, gradients go straight through.

    Attributes:
        element: type of the rounded numbers.
        rule: of the scale, see `round_mx`.
        saturated: gradient where a number exceeds the largest element: "pass", or "zero".
    """

    element: Element
    rule: str = "even"
    saturated: str = "pass"

    def __call__(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """`x`, rounded along `axis`; same shape and dtype, float32 or bfloat16, which holds every rounded number.

        A block with a number that is not finite is NaN.
        """
        assert self.saturated in ("pass", "zero"), self.saturated
        return _fake_quantise(x, self, axis % x.ndim)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _fake_quantise(x: jax.Array, rounding: Rounding, axis: int) -> jax.Array:
    blocks = _cut(x.astype(jnp.float32), axis)
    halves, scales = _round(blocks, rounding.element, rounding.rule, axis + 1)
    return (halves * _double(scales)).reshape(x.shape).astype(x.dtype)


@_fake_quantise.defjvp
def _straight_through(rounding: Rounding, axis: int, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    if rounding.saturated == "zero":
        blocks = _cut(x.astype(jnp.float32), axis)
        scales = _scales(blocks, rounding.element, rounding.rule, axis + 1)
        inside = jnp.abs(blocks) <= 0.5 * rounding.element.largest * _double(scales)
        dx = jnp.where(inside.reshape(x.shape), dx, 0)
    return _fake_quantise(x, rounding, axis), dx


def encode_mxfp4(weights: np.ndarray, rule: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """Weights packed as a release packs them; the inverse of `decode_mxfp4` on what that returns.

    A block of zeros has scale byte 0.

    Args:
        weights: float32 [..., n], blocks of 32 along the last axis.
        rule: of the scale, see `round_mx`.

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
    blocks = weights.reshape(-1, BLOCK)
    packed, scales = np.empty((len(blocks), BLOCK // 2), np.uint8), np.empty((len(blocks), 1), np.uint8)
    for first in range(0, len(blocks), _CACHED_BLOCKS):
        some = slice(first, first + _CACHED_BLOCKS)
        values, scales[some] = round_mx(blocks[some], E2M1, rule)
        codes = _CODES[np.abs(2 * values).astype(np.uint8)] | (values.view(np.uint32) >> 28 & 8).astype(np.uint8)
        packed[some] = codes[:, ::2] | codes[:, 1::2] << 4
    leading = weights.shape[:-1]
    return packed.reshape(*leading, columns // 2), scales.reshape(*leading, columns // BLOCK)


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
