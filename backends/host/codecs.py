"""Conversion of low-precision floats to and from float32 in numba, rounding to nearest even like ml_dtypes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int32, types, uint8, uint16, uint32

from xvcomm.jit.inline import intrinsic, register_jitable


@intrinsic(types.float32, types.uint32)
def bits_to_float(builder: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@intrinsic(types.uint32, types.float32)
def float_to_bits(builder: Any, value: Any) -> Any:
    """The bits of a float32."""
    return builder.bitcast(value, ir.IntType(32))


@intrinsic(types.float32, types.uint16)
def _half_to_float(builder: Any, bits: Any) -> Any:
    """Conversion by a CPU instruction."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@intrinsic(types.uint16, types.float32)
def _float_to_half(builder: Any, value: Any) -> Any:
    """Conversion by a CPU instruction."""
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


# Wrappers of the intrinsics, whose names differ between processes: code that references an intrinsic is never found in the disk
# cache.
@register_jitable
def load_half(bits: int) -> float:
    """Convert float16 bits to float32."""
    return _half_to_float(bits)


@register_jitable
def save_half(value: float) -> int:
    """Round float32 to float16 bits."""
    return _float_to_half(value)


@register_jitable
def load_bfloat16(bits: int) -> float:
    """Convert bfloat16 bits to float32."""
    return bits_to_float(uint32(bits) << uint32(16))


@register_jitable
def save_bfloat16(value: float) -> int:
    """Round float32 to bfloat16 bits; NaN stays NaN."""
    u = float_to_bits(value)
    rounded = (u + uint32(0x7FFF) + ((u >> uint32(16)) & uint32(1))) >> uint32(16)
    quiet = (u >> uint32(16)) | uint32(0x40)
    return uint16(quiet if (u & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else rounded)


@register_jitable
def _load_float8(bits: int, mantissa: int, bias: int) -> float:
    """Convert any float8 to float32, ignoring its special values."""
    magnitude = uint32(bits) & uint32(0x7F)
    sign = (uint32(bits) & uint32(0x80)) << uint32(24)
    exponent = magnitude >> uint32(mantissa)
    fraction = magnitude & uint32((1 << mantissa) - 1)
    tiny = bits_to_float(uint32((127 + 1 - bias - mantissa) << 23))
    subnormal = float32(int32(fraction)) * tiny
    normal = ((exponent + uint32(127 - bias)) << uint32(23)) | (fraction << uint32(23 - mantissa))
    return bits_to_float((float_to_bits(subnormal) if exponent == uint32(0) else normal) | sign)


@register_jitable
def _save_float8(value: float, mantissa: int, bias: int) -> int:
    """Round the magnitude to any float8; the code may exceed the largest one."""
    u = float_to_bits(value) & uint32(0x7FFFFFFF)
    if u < uint32((127 + 1 - bias) << 23):
        # Adding a number whose last bit equals the smallest subnormal rounds to a multiple of it.
        magic = bits_to_float(uint32((127 + 24 - bias - mantissa) << 23))
        return uint32(float_to_bits(bits_to_float(u) + magic) - float_to_bits(magic))
    odd = (u >> uint32(23 - mantissa)) & uint32(1)
    u = u + uint32((1 << (22 - mantissa)) - 1) + odd
    return uint32((u >> uint32(23 - mantissa)) - uint32((127 - bias) << mantissa))


@register_jitable
def _sign8(value: float) -> int:
    return (float_to_bits(value) >> uint32(24)) & uint32(0x80)


@register_jitable
def load_e4m3fn(bits: int) -> float:
    """Convert float8_e4m3fn to float32: no infinities, NaN is S.1111.111."""
    value = _load_float8(bits, 3, 7)
    return bits_to_float(uint32(0x7FC00000)) if (bits & 0x7F) == 0x7F else value


@register_jitable
def save_e4m3fn(value: float) -> int:
    """Round float32 to float8_e4m3fn; overflow gives NaN."""
    code = _save_float8(value, 3, 7)
    return uint8((code if code < uint32(0x7F) else uint32(0x7F)) | _sign8(value))


@register_jitable
def load_e5m2(bits: int) -> float:
    """Convert float8_e5m2 to float32: it is the upper byte of a float16."""
    return load_half(uint16(bits) << uint16(8))


@register_jitable
def save_e5m2(value: float) -> int:
    """Round float32 to float8_e5m2; overflow gives infinity."""
    code = _save_float8(value, 2, 15)
    code = code if code < uint32(0x7C) else uint32(0x7C)
    nan = (float_to_bits(value) & uint32(0x7FFFFFFF)) > uint32(0x7F800000)
    return uint8((uint32(0x7E) if nan else code) | _sign8(value))


@register_jitable
def _save_fnuz(code: int, value: float) -> int:
    """Special values of the fnuz formats: a single NaN (0x80), also for overflow, and no negative zero."""
    if code > uint32(0x7F):
        return uint8(0x80)
    return uint8(0) if code == uint32(0) else uint8(code | _sign8(value))


@register_jitable
def load_e4m3fnuz(bits: int) -> float:
    """Convert float8_e4m3fnuz to float32."""
    value = _load_float8(bits, 3, 8)
    return bits_to_float(uint32(0x7FC00000)) if bits == 0x80 else value


@register_jitable
def save_e4m3fnuz(value: float) -> int:
    """Round float32 to float8_e4m3fnuz; overflow gives NaN."""
    return _save_fnuz(_save_float8(value, 3, 8), value)


@register_jitable
def load_e5m2fnuz(bits: int) -> float:
    """Convert float8_e5m2fnuz to float32."""
    value = _load_float8(bits, 2, 16)
    return bits_to_float(uint32(0x7FC00000)) if bits == 0x80 else value


@register_jitable
def save_e5m2fnuz(value: float) -> int:
    """Round float32 to float8_e5m2fnuz; overflow gives NaN."""
    return _save_fnuz(_save_float8(value, 2, 16), value)


@register_jitable
def same(value: Any) -> Any:
    """Identity: the codec of types that the CPU computes with directly."""
    return value
