"""Checks that bad input raises the right error before anything moves, and that the communicator works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.communicator import Communicator
from xvcomm.dtype import premul_sum
from xvcomm.errors import ArgumentError, ArrayError, DTypeError, XvcommError
from xvcomm.testing.cases import assert_equal


def check_arrays_refused(comm: Communicator) -> None:
    """Arrays that are none, not contiguous, read-only as outputs, of a wrong size or type."""
    x, frozen = np.zeros((4 * comm.size, 3)), np.zeros(4)
    frozen.flags.writeable = False
    wrong_type = np.zeros(x.shape, np.float32)
    _refuses(comm, ArrayError, {
        "a list": lambda: comm.all_reduce([1.0, 2.0]),
        "None": lambda: comm.all_gather(None),
        "a transposed array": lambda: comm.all_reduce(x.T),
        "every other element": lambda: comm.all_reduce(np.zeros(8)[::2]),
        "out not contiguous": lambda: comm.all_reduce(np.zeros(4), out=np.zeros(8)[::2]),
        "read-only in place": lambda: comm.all_reduce(frozen),
        "read-only out": lambda: comm.all_reduce(np.zeros(4), out=frozen),
        "numpy scalar in place": lambda: comm.all_reduce(np.float64(1)),
        "bytes as output": lambda: comm.all_reduce(np.zeros(4, np.uint8), out=np.frombuffer(b"abcd", np.uint8)),
        "out too small": lambda: comm.all_reduce(np.zeros(4), out=np.zeros(3)),
        "out of another type": lambda: comm.all_reduce(x, out=wrong_type),
        "all_gather, out too large": lambda: comm.all_gather(x, out=np.zeros((4 * comm.size**2 + 1, 3))),
        "reduce_scatter, out of another type": lambda: comm.reduce_scatter(x, out=np.zeros((4, 3), np.int64)),
        "reduce_scatter of a scalar": lambda: comm.reduce_scatter(np.zeros(())),
        "all_to_all in place": lambda: comm.all_to_all(x, out=x),
    })  # fmt: skip
    if comm.size > 1:
        _refuses(comm, ArrayError, {
            "rows that do not divide": lambda: comm.reduce_scatter(np.zeros(comm.size + 1)),
            "all_to_all rows that do not divide": lambda: comm.all_to_all(np.zeros(comm.size + 1)),
        })  # fmt: skip


def check_dtypes_refused(comm: Communicator) -> None:
    """Element types that are not carried, and reductions that a type does not have."""
    z, f, b, n = np.zeros(4, np.complex64), np.zeros(4, np.float32), np.zeros(4, bool), np.zeros(4, np.int32)
    _refuses(comm, DTypeError, {
        "dates": lambda: comm.all_reduce(np.zeros(4, "datetime64[s]")),
        "a structured type": lambda: comm.broadcast(np.zeros(4, [("a", "f4"), ("b", "i8")])),
        "objects": lambda: comm.all_gather(np.array([object(), None])),
        "text": lambda: comm.all_gather(np.array(["a", "b"])),
        "the other byte order": lambda: comm.all_reduce(np.zeros(4, ">f4")),
        "long double": lambda: comm.all_reduce(np.zeros(4, np.longdouble)),
        "bitwise on floats": lambda: comm.all_reduce(f, "band"),
        "bitwise on complex": lambda: comm.reduce_scatter(np.zeros(comm.size, np.complex128), "bxor"),
        "min on complex": lambda: comm.all_reduce(z, "min"),
        "max on complex": lambda: comm.reduce(z, 0, "max"),
        "avg on bool": lambda: comm.all_reduce(b, "avg"),
        "premul_sum on bool": lambda: comm.all_reduce(b, premul_sum(2)),
        "a fraction on integers": lambda: comm.all_reduce(n, premul_sum(0.5)),
        "infinity on integers": lambda: comm.all_reduce(n, premul_sum(float("inf"))),
        "an unknown reduction": lambda: comm.all_reduce(f, "median"),
        "premul_sum without a factor": lambda: comm.all_reduce(f, "premul_sum"),
    })  # fmt: skip


def check_arguments_refused(comm: Communicator) -> None:
    """Ranks and counts out of range."""
    x, size = np.zeros(2 * comm.size), comm.size
    one = [2] * size
    cases: dict[str, Callable[[], Any]] = {
        "root too large": lambda: comm.broadcast(x, size),
        "root negative": lambda: comm.reduce(x, -1),
        "gather's root": lambda: comm.gather(x, size + 7),
        "scatter's root": lambda: comm.scatter(x, -2),
        "scatter without anything": lambda: comm.scatter(None, 0),
        "counts too short": lambda: comm.reduce_scatter(x, counts=one[1:]),
        "counts too long": lambda: comm.all_gather(np.zeros(2), counts=[*one, 0]),
        "counts with another sum": lambda: comm.reduce_scatter(x, counts=[3] * size),
        "negative counts": lambda: comm.reduce_scatter(x, counts=[2 * size + 1, *([0] * (size - 2)), -1][:size]),
        "counts that are not mine": lambda: comm.all_gather(np.zeros(3), counts=one),
        "counts of fractions": lambda: comm.all_gather(np.zeros(2), counts=[2.0] * size),  # type: ignore[list-item]
        "one side of all_to_all": lambda: comm.all_to_all(x, send_counts=one),
        "recv_counts too long": lambda: comm.all_to_all(x, send_counts=one, recv_counts=[*one, 1]),
        "split by a fraction": lambda: comm.split(0.5),  # type: ignore[arg-type]
    }
    _refuses(comm, ArgumentError, cases)


def check_messages_refused(comm: Communicator) -> None:
    """Point-to-point: ranks, tags and arrays that cannot be."""
    x, other, frozen = np.zeros(4), (comm.rank + 1) % comm.size, np.zeros(4)
    frozen.flags.writeable = False
    cases: dict[str, Callable[[], Any]] = {
        "send to myself": lambda: comm.send(x, comm.rank),
        "receive from myself": lambda: comm.irecv(x, comm.rank),
        "rank too large": lambda: comm.isend(x, comm.size),
        "rank negative": lambda: comm.recv(x, -1),
        "sendrecv with nobody": lambda: comm.sendrecv(x, comm.size, x, comm.size),
    }
    arrays: dict[str, Callable[[], Any]] = {}
    if comm.size > 1:
        cases["tag negative"] = lambda: comm.send(x, other, -1)
        cases["tag too large"] = lambda: comm.recv(x, other, 1 << 62)
        cases["sendrecv, bad tag"] = lambda: comm.sendrecv(x, other, x.copy(), other, recv_tag=-3)
        arrays = {
            "every other element": lambda: comm.send(np.zeros(8)[::2], other),
            "read-only buffer": lambda: comm.recv(frozen, other),
            "no array": lambda: comm.isend("text", other),
        }
    _refuses(comm, ArgumentError, cases)
    _refuses(comm, ArrayError, arrays)
    if comm.size > 1:
        _refuses(comm, DTypeError, {"dates": lambda: comm.send(np.zeros(4, "datetime64[D]"), other)})
        try:
            with comm.group():
                pending = comm.isend(x, other)
                comm.irecv(x, comm.size)
        except ArgumentError:
            assert pending.done(), "an operation of a group that was given up never ends"
        else:
            raise AssertionError("a group with a rank out of range was accepted")
    _works(comm, "a group that was given up")


def _refuses(comm: Communicator, error: type[XvcommError], cases: dict[str, Callable[[], Any]]) -> None:
    """Each case raises the error on every rank, and on one alone; other ranks notice nothing."""
    for what, call in cases.items():
        for ranks in (range(comm.size), [comm.size - 1]):
            if comm.rank in ranks:
                try:
                    call()
                except error as refused:
                    assert len(str(refused)) > 10, f"{what}: the message says nothing"
                else:
                    raise AssertionError(f"{what} was accepted")
            _works(comm, what)


def _works(comm: Communicator, after: str) -> None:
    total = comm.all_reduce(np.full(3, comm.rank + 1))
    assert_equal(total, np.full(3, comm.size * (comm.size + 1) // 2), f"all_reduce after {after}")
