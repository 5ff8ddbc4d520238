"""MX block formats as a release stores them (docs/k3.md sections 3.7 and 6.1).

On host arrays, where the arithmetic is exact, denormal numbers included.
"""

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
