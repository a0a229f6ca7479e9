"""Checks that arrays of each framework go in and come out as what they are.

Frameworks are imported by name when a check runs: xvcomm itself needs none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.communicator import Communicator
from xvcomm.dtype import BY_NAME, DTYPES
from xvcomm.testing.arrays import Array
from xvcomm.testing.cases import Reducing, assert_equal, assert_same_bits, distinct

ON_HOST = ("numpy", "torch", "jax", "interface")
"""`interface` stands for any library whose arrays have `__array_interface__` and nothing else."""

ON_GPUS = ("torch", "cupy")


@dataclass(frozen=True, slots=True)
class Framework:
    """How to make an array of a numpy array (always a copy), how to read one, and what it can hold.

    Attributes:
        mutable: whether operations fill its arrays in place.
    """

    make: Callable[[Array], Any]
    read: Callable[[Any], Array]
    dtypes: tuple[str, ...]
    mutable: bool = True


class Interface:
    """The least that is an array."""

    def __init__(self, data: Array) -> None:
        self.data = data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__


def missing(comm: Communicator, name: str) -> str:
    """Why a framework cannot make arrays for this rank, or nothing."""
    try:
        framework(comm, name).make(np.zeros(1, np.float32))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def framework(comm: Communicator, name: str) -> Framework:
    """The Framework of this name, for the memory of this rank's device.

    Raises:
        ImportError: it is not installed.
    """
    names = tuple(d.name for d in DTYPES)
    if name == "torch":
        return _torch(names, "cpu" if comm._context.kind == "host" else f"cuda:{comm._context.index}")
    if name == "cupy":
        return _cupy(comm._context.index)
    if name == "jax":
        jnp = importlib.import_module("jax.numpy")
        # By default JAX has no 64-bit numbers.
        return Framework(jnp.asarray, np.asarray, tuple(n for n in names if jnp.zeros(1, n).dtype.name == n), False)
    if name == "interface":
        return Framework(lambda x: Interface(x.copy()), lambda y: np.asarray(y).copy(), ("float32", "int64", "complex128"))
    return Framework(np.copy, np.asarray, names)


def _torch(names: tuple[str, ...], device: str) -> Framework:
    torch = importlib.import_module("torch")

    def make(x: Array) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy())
        return bits.to(device).view(getattr(torch, x.dtype.name)).reshape(x.shape)

    def read(y: Any) -> Array:
        kind = BY_NAME[str(y.dtype).removeprefix("torch.")].numpy
        flat: Array = y.reshape(-1).view(torch.uint8).cpu().numpy().view(kind)
        return flat.reshape(tuple(y.shape))

    return Framework(make, read, names)


def _cupy(index: int) -> Framework:
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(index).use()
    names = tuple(d.name for d in DTYPES if d.numpy.isbuiltin == 1)  # not those of ml_dtypes
    return Framework(cupy.array, cupy.asnumpy, names)


def check_collectives(comm: Communicator, name: str) -> None:
    """Every dtype the framework has, by every collective."""
    f = framework(comm, name)
    for dtype in f.dtypes:
        _check_reducing(comm, f, dtype)
        _check_moving(comm, f, dtype)


def _check_reducing(comm: Communicator, f: Framework, dtype: str) -> None:
    rows = 6 * comm.size
    case = Reducing.of(comm, dtype, "sum", (rows, 5))
    mine = case.inputs[comm.rank]
    own = slice(6 * comm.rank, 6 * comm.rank + 6)

    x = f.make(mine)
    y = comm.all_reduce(x)
    assert_equal(f.read(y), case.result, f"all_reduce of {dtype}")
    assert (y is x) == f.mutable and type(y) is type(x)
    if not f.mutable:
        assert_equal(f.read(x), mine, f"immutable input of {dtype}")

    x, out = f.make(mine), f.make(np.zeros_like(mine))
    y = comm.all_reduce(x, out=out)
    assert_equal(f.read(y), case.result, f"all_reduce of {dtype} into out")
    assert (y is out) == f.mutable and type(y) is type(x)
    assert_equal(f.read(x), mine, f"input of all_reduce of {dtype}")

    y = comm.reduce(f.make(mine), comm.size - 1)
    assert_equal(f.read(y), case.result if comm.rank == comm.size - 1 else mine, f"reduce of {dtype}")
    y = comm.reduce_scatter(f.make(mine), async_op=True).wait()
    assert_equal(f.read(y), case.result[own], f"reduce_scatter of {dtype}")


def _check_moving(comm: Communicator, f: Framework, dtype: str) -> None:
    everything = distinct(BY_NAME[dtype], (2 * comm.size, 7), seed=1)
    own = slice(2 * comm.rank, 2 * comm.rank + 2)
    last = comm.size - 1

    shown = everything if comm.rank == last else np.zeros_like(everything)
    x = f.make(shown)
    y = comm.broadcast(x, last)
    assert_same_bits(f.read(y), everything, f"broadcast of {dtype}")
    assert type(y) is type(x)
    assert_same_bits(f.read(comm.all_gather(f.make(everything[own]))), everything, f"all_gather of {dtype}")
    y = comm.gather(f.make(everything[own]))
    if comm.rank == 0:
        assert_same_bits(f.read(y), everything, f"gather of {dtype}")
    assert_same_bits(f.read(comm.scatter(f.make(shown), last)), everything[own], f"scatter of {dtype}")
    out = f.make(np.zeros_like(everything[own]))
    y = comm.scatter(f.make(shown) if comm.rank == last else None, last, out=out)
    assert_same_bits(f.read(y), everything[own], f"scatter of {dtype} into out")
    y = comm.all_to_all(f.make(np.repeat(everything[own], comm.size, axis=0)))
    want = np.concatenate([np.repeat(everything[2 * r : 2 * r + 2], comm.size, axis=0)[own] for r in range(comm.size)])
    assert_same_bits(f.read(y), want, f"all_to_all of {dtype}")


def check_messages(comm: Communicator, name: str) -> None:
    """Every dtype the framework has, to the next rank and from the one before."""
    f = framework(comm, name)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, dtype in enumerate(f.dtypes):
        mine, theirs = (distinct(BY_NAME[dtype], (3, 5), seed=rank) for rank in (comm.rank, before))
        empty = f.make(np.zeros_like(mine))
        y = comm.sendrecv(f.make(mine), after, empty, before, tag, tag)
        assert_same_bits(f.read(y), theirs, f"sendrecv of {dtype}")
        assert (y is empty) == f.mutable and type(y) is type(empty)
        empty = f.make(np.zeros_like(mine))
        coming = comm.irecv(empty, before, tag)
        comm.isend(f.make(mine), after, tag).wait()
        y = coming.wait()
        assert_same_bits(f.read(y), theirs, f"irecv of {dtype}")
        assert (y is empty) == f.mutable and type(y) is type(empty)
