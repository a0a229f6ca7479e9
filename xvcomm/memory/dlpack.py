"""DLPack's structures, and how memory of ours is shown to frameworks by them."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from xvcomm.memory import vendors
from xvcomm.types.dtype import DType

CPU = 1
READ_ONLY = 1
_CAPSULE_NAME = b"dltensor"


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class ExchangeAPI(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


# Functions of our own: `ctypes.pythonapi` has one object of each for the whole process, whose types JAX and others set.
_PYTHON = ctypes.pythonapi
pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _PYTHON))
name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _PYTHON))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _PYTHON)
)
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


def describe(
    tensor: Tensor, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, kind: str, index: int,
    extents: ctypes.Array[ctypes.c_int64],
) -> None:  # fmt: skip
    """Fill a DLTensor.

    Args:
        extents: room for shape and strides, twice the number of dimensions; as long-lived as the tensor.
    """
    assert dtype.dlpack is not None
    n = len(shape)
    extents[:] = [*shape, *strides]
    tensor.data, tensor.byte_offset = address, 0
    tensor.device_type, tensor.device_id = vendors.of(kind).dlpack_device, index
    tensor.ndim, tensor.lanes = n, 1
    tensor.code, tensor.bits = dtype.dlpack
    tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(ctypes.addressof(extents) + 8 * n, ctypes.POINTER(ctypes.c_int64))


def capsule(managed: Managed) -> Any:
    """A capsule of a tensor that has an owner."""
    return _new_capsule(ctypes.addressof(managed), _CAPSULE_NAME, None)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array whose elements lie one after the other."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Exporter:
    """Memory of a device for a framework to copy from: what a framework asks of an array in `from_dlpack`.

    The framework must be through with it before the memory's owner is. The description of it belongs to the framework,
    which may look at that long after: it lies in C's heap, and C's `free` is its deleter.

    Args:
        owner: keeps the memory, as long as this lives.
        kind, index: the device.
    """

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: DType, kind: str, index: int) -> None:
        self.owner = owner
        self._what = address, shape, row_major(shape), dtype, kind, index

    def __dlpack__(self, **_: Any) -> Any:
        n = len(self._what[1])
        place = _libc.malloc(ctypes.sizeof(Managed) + 16 * n)
        managed = Managed.from_address(place)
        describe(managed.tensor, *self._what, (ctypes.c_int64 * (2 * n)).from_address(place + ctypes.sizeof(Managed)))
        managed.manager_ctx, managed.deleter = None, _FREE
        return capsule(managed)

    def __dlpack_device__(self) -> tuple[int, int]:
        *_, kind, index = self._what
        return vendors.of(kind).dlpack_device, index
