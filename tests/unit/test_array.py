"""Arrays of every protocol, viewed without a copy: address, shape, dtype, and writability."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xvcomm.engine.session import plugins
from xvcomm.errors import ArrayError, DTypeError
from xvcomm.memory import array
from xvcomm.memory.array import empty_like, finish, view
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.dlpack import Exporter
from xvcomm.types.dtype import BY_NAME, DTYPES, DType


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """The memory of the built-in backends is known."""
    plugins.backends()


def nowhere(nbytes: int) -> array.Memory:
    """Host arrays do not allocate memory from a device."""
    raise AssertionError(f"{nbytes} bytes asked for")


class Interface:
    """An array with `__array_interface__` only."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.__array_interface__ = data.__array_interface__


class OldCapsule:
    """A library whose `__dlpack__` does not support versions."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __dlpack__(self) -> Any:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


class NewCapsule(OldCapsule):
    """A library whose `__dlpack__` supports versions."""

    def __dlpack__(self, *, max_version: Any = None) -> Any:
        return self.data.__dlpack__(max_version=max_version)


class Stubborn:
    """A library that refuses to export."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("Cannot export: the array is sharded\nand more lines")


def contents(x: ArrayView) -> bytes:
    return ctypes.string_at(x.address, x.nbytes)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (0, 7), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy(dtype: DType, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype.numpy)
    v = view(x, output=True)
    assert (v.address, v.shape, v.dtype) == (x.ctypes.data, shape, dtype)
    assert (v.count, v.nbytes, v.device, v.array) == (x.size, x.nbytes, "host", x)
    assert not v.immutable
    assert finish(v) is x


@pytest.mark.parametrize("wrapper", [Interface, OldCapsule, NewCapsule])
@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex128", "uint16"])
def test_protocols_share_memory(wrapper: Any, name: str) -> None:
    data = np.arange(12).reshape(3, 4).astype(name)
    v = view(wrapper(data), output=True)
    assert (v.address, v.shape, v.dtype.name) == (data.ctypes.data, (3, 4), name)
    assert isinstance(finish(v), wrapper)


@pytest.mark.parametrize("wrapper", [OldCapsule, NewCapsule])
def test_cached_properties_of_one_array_are_not_used_for_another(wrapper: Any) -> None:
    first, second = np.zeros((3, 4)), np.ones((3, 4))
    assert not view(wrapper(first)).immutable
    if wrapper is NewCapsule:
        second.flags.writeable = False
    v = view(wrapper(second))
    assert (v.address, v.immutable, contents(v)) == (second.ctypes.data, wrapper is NewCapsule, second.tobytes())
    for other in (first.reshape(4, 3), first.astype("float32"), first[:2]):
        v = view(wrapper(other))
        assert (v.address, v.shape) == (other.ctypes.data, other.shape)
        assert (v.dtype.name, v.nbytes) == (other.dtype.name, other.nbytes)


def test_many_shapes() -> None:
    for n in [*range(100), *range(100)]:
        assert view(OldCapsule(np.zeros((n, 2, 1), np.int16))).shape == (n, 2, 1)
    deep = np.zeros((1, 2, 1, 3, 1, 2, 2))
    assert view(OldCapsule(deep)).shape == deep.shape


def test_invalid_capsules() -> None:
    used = np.zeros(3).__dlpack__()
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(used, b"used_dltensor")
    for capsule in (used, None):
        with pytest.raises(ValueError, match="PyCapsule"):
            view(type("Odd", (), {"__dlpack__": lambda self, capsule=capsule, **_: capsule})())
    rename(used, b"dltensor")


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_parts_of_arrays(offset: int) -> None:
    data = np.arange(20, dtype=np.int32)
    for x in (data[offset:10], OldCapsule(data[offset:10])):
        v = view(x)
        assert contents(v) == data[offset:10].tobytes()
    assert view(data.reshape(4, 5)[offset]).count == 5


@pytest.mark.parametrize("wrapper", [np.asarray, Interface, OldCapsule])
def test_not_contiguous(wrapper: Any) -> None:
    data = np.arange(24.0).reshape(4, 6)
    for x in (data.T, data[:, 1:3], data[::2, :], data[:, ::-1], np.broadcast_to(data[0], (3, 6))):
        with pytest.raises((ArrayError, BufferError), match=r"contiguous|readonly"):
            view(wrapper(x))
    assert view(wrapper(data[2:3, 1:4].T[:1])).count == 1


def test_read_only() -> None:
    data = np.arange(4.0)
    data.flags.writeable = False
    for x in (data, Interface(data), np.frombuffer(b"12345678"), NewCapsule(data)):
        assert view(x).immutable
        with pytest.raises(ArrayError, match="read-only"):
            view(x, output=True)
    fresh = empty_like(view(data), (2,), nowhere)
    assert not fresh.immutable
    assert isinstance(finish(fresh), np.ndarray)


@pytest.mark.parametrize("x", [3.0, None, "text", [1, 2], (1.0,), {"a": 1}, b"bytes", object()])
def test_objects_that_are_not_arrays(x: Any) -> None:
    with pytest.raises(ArrayError, match="is no array"):
        view(x)


def test_numpy_scalars_are_inputs_only() -> None:
    v = view(np.float32(3))
    assert (v.shape, v.dtype.name, contents(v)) == ((), "float32", np.float32(3).tobytes())
    with pytest.raises(ArrayError, match="read-only"):
        view(np.float32(3), output=True)
    assert isinstance(finish(empty_like(v, (2,), nowhere)), np.ndarray)


def test_unsupported_dtypes() -> None:
    for x in (np.zeros(2, "M8[s]"), Interface(np.zeros(2, ">i4")), np.zeros(2, ml_dtypes.int4), np.zeros(2, "f4,f4")):
        with pytest.raises(DTypeError):
            view(x)


def test_errors_are_one_line() -> None:
    with pytest.raises(ArrayError, match=r"Stubborn does not show its memory: Cannot export: the array is sharded; "):
        view(Stubborn())


@pytest.mark.parametrize("wrapper", [Interface, OldCapsule, NewCapsule])
def test_views_keep_memory_alive(wrapper: Any) -> None:
    x = wrapper(np.arange(1000.0))
    alive = weakref.ref(x.data)
    v = view(x)
    del x
    gc.collect()
    assert alive() is not None
    assert contents(v) == np.arange(1000.0).tobytes()
    del v
    gc.collect()
    assert alive() is None


def test_outputs_of_libraries_without_an_allocator() -> None:
    for x in (Interface(np.ones(3)), OldCapsule(np.ones(3))):
        fresh = empty_like(view(x), (2, 2), nowhere)
        assert (fresh.shape, fresh.dtype.name) == ((2, 2), "float64")
        assert isinstance(finish(fresh), np.ndarray)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype.name)
    x = torch.zeros(4, 3 * dtype.itemsize, dtype=torch.uint8).view(kind)
    v = view(x, output=True)
    assert (v.address, v.shape, v.dtype, v.device) == (x.data_ptr(), (4, 3), dtype, "host")
    assert finish(v) is x
    inner = view(x[1:3])
    assert (inner.address, inner.shape) == (x.data_ptr() + 3 * dtype.itemsize, (2, 3))
    fresh = empty_like(v, (5,), nowhere)
    y = finish(fresh)
    assert (type(y), y.dtype, tuple(y.shape), y.data_ptr()) == (type(x), kind, (5,), fresh.address)


def test_torch_refused() -> None:
    torch = pytest.importorskip("torch")
    for x in (torch.ones(3, 4).t(), torch.ones(8)[::2], torch.ones(1, 3).expand(2, 3)):
        with pytest.raises(ArrayError, match="contiguous"):
            view(x)
    for x in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(ArrayError, match="does not show its memory"):
            view(x)
    with pytest.raises(DTypeError):
        view(torch.zeros(2, dtype=torch.float8_e8m0fnu))
    assert view(torch.nn.Parameter(torch.ones(3)), output=True).count == 3
    assert view(torch.ones(0, 3)[:, ::2]).count == 0


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]
)
def test_jax(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    data = np.arange(12).reshape(3, 4).astype(BY_NAME[name].numpy)
    x = jnp.asarray(data)
    v = view(x, output=True)
    assert v.immutable and not v.staged
    assert (v.shape, v.dtype.name, contents(v)) == ((3, 4), name, data.tobytes())
    assert finish(v) is x
    fresh = empty_like(v, (12,), nowhere)
    ctypes.memmove(fresh.address, v.address, v.nbytes)
    y = finish(fresh)
    assert type(y) is type(x) and y.dtype == x.dtype and y.shape == (12,)
    assert np.asarray(y).tobytes() == data.tobytes()


def test_torch_views_that_are_not_computed() -> None:
    torch = pytest.importorskip("torch")
    z = torch.tensor([1 + 2j, 3 - 4j])
    for x in (z.conj(), z.conj().imag):
        with pytest.raises(ArrayError, match="resolve_conj"):
            view(x)
        assert view(x.resolve_conj().resolve_neg()).count == 2


def test_jax_results_that_are_still_computed() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((600, 600))
    for _ in range(8):
        x = x @ x / 600
    assert np.frombuffer(contents(view(x)), np.float32).max() == pytest.approx(1.0, rel=1e-3)


def test_types_of_functions_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries set the types of Python's functions, of which ctypes has one object for the whole process."""
    monkeypatch.setattr(ctypes.pythonapi.PyCapsule_New, "argtypes", [ctypes.CFUNCTYPE(None)])
    data = np.arange(5.0)
    assert (np.from_dlpack(Exporter(data, data.ctypes.data, (5,), BY_NAME["float64"], "host", 0)) == data).all()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.numpy.isbuiltin == 1], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_memory_that_is_exported(dtype: DType, shape: tuple[int, ...]) -> None:
    """numpy takes it over, and frees its description with C's own function, whenever that is."""
    data = np.arange(24).astype(dtype.numpy)
    exported = Exporter(data, data.ctypes.data, shape, dtype, "host", 0)
    seen = [np.from_dlpack(exported) for _ in range(3)]
    del exported
    gc.collect()
    count = int(np.prod(shape))
    for x in seen:
        assert x.shape == shape and x.dtype == dtype.numpy and (x.reshape(-1) == data[:count]).all()
    data[:] = 0
    assert not seen[0].any()
