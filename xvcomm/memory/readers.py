"""How arrays of each framework are read; no framework is imported.

Tried in order: numpy arrays; DLPack's C exchange API (`__dlpack_c_exchange_api__`, a table of C functions on the
type: no Python object is made); CuPy's attributes; a DLPack capsule; the array interface. The project apache-tvm-ffi
would do this too, but importing it imports torch.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.errors import ArrayError
from xvcomm.memory import vendors
from xvcomm.memory.array_view import ArrayView, new_kind
from xvcomm.memory.dlpack import READ_ONLY, ExchangeAPI, name_of, pointer_of
from xvcomm.memory.dlpack_reader import FAILED, NAMES, NOWHERE, SEEN, UNKNOWN, Known, look, see
from xvcomm.types import dtype as dtypes
from xvcomm.types.dtype import DType

_FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_FIELDS = tuple(SEEN.fields or ())
_FLAGS = _FIELDS.index("flags")


class _Scratch(threading.local):
    """Where a thread lets C functions write a `SEEN`."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * len(_FIELDS))()
        self.both = self.words, ctypes.addressof(self.words)


_scratch = _Scratch()
_Kept = tuple[tuple[int, ...], DType, int, int, str, int, int | None, int]
"""What is known of arrays that differ in their addresses alone: `shape` to `stream` of ArrayView, but its user's, and `kind`."""

_KINDS_KEPT = 1000
Reader = Callable[[Any], ArrayView]
READERS: dict[type, Reader] = {}
"""By type of array, what reads them; `reader_of` adds to it."""
_known, _adding = Known(), threading.Lock()


def view(x: Any, *, output: bool = False) -> ArrayView:
    """See `x` as an ArrayView; nothing is copied.

    Args:
        x: a numpy array, anything with DLPack or the array interface, or an ArrayView, which comes back as it is.
        output: whether xvcomm will write into it.

    Raises:
        ArrayError: not an array, not contiguous, or read-only though it is an output.
        DTypeError: its element type is not carried.
    """
    kind = type(x)
    if kind is ArrayView:
        return x  # type: ignore[no-any-return]  # it was checked when it was made
    found = (READERS.get(kind) or reader_of(kind))(x)
    if output and found.immutable and not is_functional(x):
        raise ArrayError("the output array is read-only; pass a writable array (x.copy())")
    return found


def reader_of(kind: type) -> Reader:
    """What reads arrays of a type; adds it to `READERS`."""
    found: Reader = _from_numpy if issubclass(kind, np.ndarray) else _from_protocols
    if any(base.__module__ == "cupy" and base.__name__ == "ndarray" for base in kind.__mro__):
        found = _from_cupy(sys.modules["cupy"])
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if found is not _from_numpy and capsule is not None and name_of(capsule) == b"dlpack_exchange_api":
        api = ExchangeAPI.from_address(pointer_of(capsule, b"dlpack_exchange_api"))
        if api.tensor_from_object:
            found = _from_exchange(api.tensor_from_object, api.current_stream or 0, hasattr(kind, "is_neg"))
    READERS[kind] = found
    return found


def _from_exchange(tensor: int, stream: int, lazy: bool) -> Reader:
    """By the C exchange API. Read as plain words: fields of a ctypes structure take three times as long.

    Args:
        tensor, stream: addresses of `dltensor_from_py_object_no_sync` and of `current_work_stream`, 0 if it has none.
        lazy: whether arrays may be noted down only as the conjugate or negation of others.
    """

    def read(x: Any) -> ArrayView:
        known = _known
        words, address = _scratch.both
        number = see(tensor, stream, id(x), address, known.address)
        if number == FAILED:
            raise _refused(type(x), _complaint(x, tensor, address))
        if number == UNKNOWN and lazy and (x.is_neg() or x.is_conj()):
            raise _lazy()
        kin = known.seen[number] if number != UNKNOWN else _learnt(words)
        shape, dtype, count, nbytes, device, index, on, kind = kin
        if lazy and (x.is_neg() or (dtype.kind == "c" and x.is_conj())):
            raise _lazy()
        if not words[0] and count:
            raise ArrayError(
                f"a {type(x).__name__} of {count} elements without memory: it is a fake one, or its storage was freed"
            )
        trusted = device != "host"
        return ArrayView(words[0], shape, dtype, count, nbytes, x, device, index, False, None, False, on, trusted, kind)

    return read


def _from_cupy(cupy: Any) -> Reader:
    """By CuPy's own attributes: its capsules and its array interface take four times as long, and tell no stream on HIP."""
    device = vendors.kind_in(cupy)
    memory, current = cupy.cuda.memory, cupy.cuda.get_current_stream
    own = memory.PooledMemory, memory.Memory, memory.MemoryAsync
    known: dict[tuple[Any, ...], tuple[DType, int, int, int]] = {}

    def read(x: Any) -> ArrayView:
        data, shape = x.data, x.shape
        index = data.device_id
        form = shape, x.strides, x.dtype, index
        found = known.get(form)
        if found is None:
            if not x.flags.c_contiguous:
                raise _scattered(shape)
            if len(known) >= _KINDS_KEPT:
                known.clear()
            dtype = dtypes.from_numpy(x.dtype)
            found = known[form] = dtype, x.size, x.size * dtype.itemsize, new_kind()
        dtype, count, nbytes, kind = found
        trusted, stream = type(data.mem) in own, current(index).ptr
        return ArrayView(
            data.ptr, shape, dtype, count, nbytes, x, device, index, False, None, False, stream, trusted, kind
        )

    return read


def _learnt(words: ctypes.Array[ctypes.c_int64]) -> _Kept:
    """What is to be known of an array as a framework describes it."""
    global _known
    _, place, what, shape_at, _, _, stream, count, contiguous, _ = words[:]
    ndim = what & 0xFFFFFFFF
    shape = tuple(_words[shape_at >> 3 : (shape_at >> 3) + ndim])
    if not contiguous:
        raise _scattered(shape)
    dtype = dtypes.from_dlpack(what >> 32 & 0xFF, what >> 40 & 0xFF, what >> 48)
    device = vendors.kind_of(place & 0xFFFFFFFF)
    on = None if stream == NOWHERE or device == "host" else stream
    with _adding:
        if _known.full():
            _known = Known()
        kind = new_kind() if device != "host" and _known.takes(shape) else 0
        kept = shape, dtype, count, count * dtype.itemsize, device, place >> 32, on, kind
        _known.add(place, what, stream, shape, kept)
    return kept


def _lazy() -> ArrayError:
    """Of what torch has noted only, and DLPack does not show."""
    return ArrayError(
        "the tensor is the conjugate or negation of another, not yet computed; pass x.resolve_conj().resolve_neg()"
    )


def _complaint(x: Any, tensor: int, address: int) -> Exception:
    """What the framework raises when it is asked for a tensor that it does not show."""
    try:
        _FromObject(tensor)(x, address)
    except Exception as error:
        return error
    return ArrayError("no reason given")


def _from_numpy(x: np.ndarray[Any, Any]) -> ArrayView:
    flags = x.flags.num  # one look-up for all of them
    if not flags & _CONTIGUOUS:
        raise ArrayError(
            f"array of shape {x.shape} and strides {x.strides} is not contiguous; pass numpy.ascontiguousarray(x)"
        )
    dtype, count = dtypes.from_numpy(x.dtype), x.size
    address, immutable = _words[(id(x) + _POINTER) >> 3], not flags & _WRITEABLE
    return ArrayView(address, x.shape, dtype, count, count * dtype.itemsize, x, "host", 0, immutable, x)


# Where the elements lie is told by the array object's first field. Reading it takes a tenth of the time of
# `x.ctypes.data` or of the array interface, which counts in a small message.
_words = (ctypes.c_ssize_t * (1 << 58)).from_address(0)
_POINTER = object.__basicsize__
_CONTIGUOUS, _WRITEABLE = 0x1, 0x400
_probe = np.empty(1)
assert _words[(id(_probe) + _POINTER) >> 3] == _probe.ctypes.data, "numpy's array objects have changed their layout"
assert _probe.flags.num & (_CONTIGUOUS | _WRITEABLE) == _CONTIGUOUS | _WRITEABLE, "numpy's flags have changed"


def _from_protocols(x: Any) -> ArrayView:
    """By capsule, else by the array interface; the capsule is kept, unconsumed, so that its memory stays."""
    if type(x).__name__.endswith("Tracer") and is_functional(x):
        raise ArrayError(
            f"{type(x).__name__} is a tracer, which holds no data: inside JAX's transformations call the operations of "
            "xvcomm.adapters.jax"
        )
    if hasattr(x, "__dlpack__"):
        # An array that says its stream is ordered on it by us; any other orders itself on the default stream.
        stream = (getattr(x, "__cuda_array_interface__", None) or {}).get("stream")
        capsule = _capsule(x, {} if stream is None else {"stream": -1})
        known, functional = _known, is_functional(x)
        words, address = _scratch.both
        number = look(id(capsule), NAMES, NOWHERE if stream is None else stream, address, known.address)
        if number == FAILED:
            pointer_of(capsule, b"dltensor")  # raises what is wrong with it
        kin = known.seen[number] if number != UNKNOWN else _learnt(words)
        shape, dtype, count, nbytes, device, index, on, kind = kin
        immutable = functional or words[_FLAGS] & READ_ONLY != 0
        kind = 0 if immutable else kind
        found = ArrayView(
            words[0], shape, dtype, count, nbytes, x, device, index, immutable, capsule, False, on, False, kind
        )
        if functional and device != "host":
            x.block_until_ready()  # nobody can be told on which stream JAX fills it
        return found
    if hasattr(x, "__array_interface__"):
        found = _from_numpy(np.asarray(x))
        found.array = x
        found.immutable = found.immutable or isinstance(x, np.generic)  # of a numpy scalar that is a copy
        return found
    raise ArrayError(f"{type(x).__name__} is no array: it has neither __dlpack__ nor __array_interface__")


def _capsule(x: Any, keywords: dict[str, Any]) -> Any:
    try:
        return x.__dlpack__(max_version=(1, 0), **keywords)
    except TypeError:
        return x.__dlpack__(**keywords)
    except Exception as error:
        raise _refused(type(x), error) from error


def _scattered(shape: tuple[int, ...]) -> ArrayError:
    return ArrayError(f"array of shape {shape} is not contiguous; pass a contiguous copy (x.contiguous())")


def _refused(kind: type, error: Exception) -> ArrayError:
    reason = str(error).partition("\n")[0]
    return ArrayError(f"{kind.__name__} does not show its memory: {reason}; pass a dense array that holds data")


def owner(found: ArrayView) -> Any:
    """What keeps an array's memory, also if the array is given another one (torch's `set_`): its capsule, or numpy's array."""
    x = found.array
    if found.keep is not None or not hasattr(x, "__dlpack__"):
        return found.keep
    return _capsule(x.detach() if hasattr(x, "detach") else x, {})  # torch gives the memory to another tensor


def is_functional(x: Any) -> bool:
    """Whether the framework's arrays never change (JAX): results are then new arrays."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")
