"""Checks that invalid input raises the right error before any data moves, and that the communicator works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError, DTypeError, XvcommError
from xvcomm.testing.arrays import DeviceArray, DeviceArrays, arrays
from xvcomm.testing.cases import assert_equal
from xvcomm.types.dtype import premul_sum

Cases = dict[str, Callable[[], Any]]


def check_arrays_refused(comm: Communicator) -> None:
    """Arrays that are not arrays, not contiguous, of a wrong size or dtype, or on another device."""
    a, size = arrays(comm), comm.size
    x, four, eight = a.put(np.zeros((4 * size, 3))), a.put(np.zeros(4)), a.put(np.zeros(8))
    too_large, other_type = a.put(np.zeros((4 * size**2 + 1, 3))), a.put(np.zeros((4, 3), np.int64))
    three, scalar, float32 = a.put(np.zeros(3)), a.put(np.zeros(())), a.put(np.zeros((4 * size, 3), np.float32))
    _refuses(comm, ArrayError, {
        "a list": lambda: comm.all_reduce([1.0, 2.0]),
        "None": lambda: comm.all_gather(None),
        "a transposed array": lambda: comm.all_reduce(x.T),
        "every other element": lambda: comm.all_reduce(eight[::2]),
        "out not contiguous": lambda: comm.all_reduce(four, out=eight[::2]),
        "out too small": lambda: comm.all_reduce(four, out=three),
        "out of another type": lambda: comm.all_reduce(x, out=float32),
        "all_gather, out too large": lambda: comm.all_gather(x, out=too_large),
        "reduce_scatter, out of another type": lambda: comm.reduce_scatter(x, out=other_type),
        "reduce_scatter of a scalar": lambda: comm.reduce_scatter(scalar),
        "all_to_all in place": lambda: comm.all_to_all(x, out=x),
    })  # fmt: skip
    if size > 1:
        odd = a.put(np.zeros(size + 1))
        _refuses(comm, ArrayError, {
            "rows that do not divide": lambda: comm.reduce_scatter(odd),
            "all_to_all rows that do not divide": lambda: comm.all_to_all(odd),
        })  # fmt: skip
    if isinstance(a, DeviceArrays):
        _check_places_refused(comm, a)
    else:
        _check_read_only_refused(comm)


def _check_read_only_refused(comm: Communicator) -> None:
    """Read-only host arrays as outputs."""
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    _refuses(comm, ArrayError, {
        "read-only in place": lambda: comm.all_reduce(frozen),
        "read-only out": lambda: comm.all_reduce(np.zeros(4), out=frozen),
        "numpy scalar in place": lambda: comm.all_reduce(np.float64(1)),
        "bytes as output": lambda: comm.all_reduce(np.zeros(4, np.uint8), out=np.frombuffer(b"abcd", np.uint8)),
    })  # fmt: skip


def _check_places_refused(comm: Communicator, a: DeviceArrays) -> None:
    """Arrays on another device than this rank's, and invalid streams."""
    x, out, host = a.put(np.zeros(4)), a.put(np.zeros(4)), np.zeros(4)
    elsewhere, foreign = a.put(np.zeros(4)), a.put(np.zeros(4))
    elsewhere.tensor.device_id += 1
    foreign.tensor.device_type = 12 - foreign.tensor.device_type  # CUDA's array on ROCm, ROCm's on CUDA
    hosts: Cases = {
        "a host array": lambda: comm.all_reduce(host),
        "out on the host": lambda: comm.all_reduce(x, out=host),
    }
    _refuses(comm, ArrayError, hosts, naming=("host", a.kind))
    others: Cases = {
        "an array of another device": lambda: comm.all_reduce(elsewhere),
        "out on another device": lambda: comm.all_reduce(x, out=elsewhere),
        "an array of another vendor": lambda: comm.all_reduce(foreign),
    }
    _refuses(comm, ArrayError, others, naming=(a.kind,))
    runtime = getattr(a.device, "runtime", None)
    if isinstance(runtime, Runtime):
        freed = _freed(a, runtime)
        _refuses(comm, ArrayError, {"an array that was freed": lambda: comm.all_reduce(freed, out=out)})
        for handle in sorted(runtime.invalid_streams):
            x.handle = handle
            _refuses(comm, ArgumentError, {f"stream {handle}": lambda: comm.all_reduce(x)})


_FREED = 64 << 20
"""Large, because small allocations may still be known as device memory after they are freed."""


def _freed(a: DeviceArrays, runtime: Runtime) -> DeviceArray:
    """An array whose memory was returned to the vendor; nothing is allocated afterwards, which could reuse the address."""
    made = a.put(np.zeros(4))
    before = runtime.current()
    runtime.use(a.index)
    address = runtime.allocate(_FREED)
    runtime.free(address)
    runtime.use(before)
    made.tensor.data = address
    return made


def check_dtypes_refused(comm: Communicator) -> None:
    """Unsupported dtypes, and reductions that are not defined for a dtype."""
    a = arrays(comm)
    z, f, b, n = (a.put(np.zeros(4 * comm.size, t)) for t in (np.complex64, np.float32, bool, np.int32))
    _refuses(comm, DTypeError, {
        "bitwise on floats": lambda: comm.all_reduce(f, "band"),
        "bitwise on complex": lambda: comm.reduce_scatter(z, "bxor"),
        "min on complex": lambda: comm.all_reduce(z, "min"),
        "max on complex": lambda: comm.reduce(z, 0, "max"),
        "avg on bool": lambda: comm.all_reduce(b, "avg"),
        "premul_sum on bool": lambda: comm.all_reduce(b, premul_sum(2)),
        "a fraction on integers": lambda: comm.all_reduce(n, premul_sum(0.5)),
        "infinity on integers": lambda: comm.all_reduce(n, premul_sum(float("inf"))),
        "an unknown reduction": lambda: comm.all_reduce(f, "median"),
        "premul_sum without a factor": lambda: comm.all_reduce(f, "premul_sum"),
    })  # fmt: skip
    if isinstance(a, DeviceArrays):
        vectors = a.put(np.zeros(4))
        vectors.tensor.lanes = 4
        _refuses(comm, DTypeError, {"vectors as elements": lambda: comm.all_reduce(vectors)})
        return
    _refuses(comm, DTypeError, {
        "dates": lambda: comm.all_reduce(np.zeros(4, "datetime64[s]")),
        "a structured type": lambda: comm.broadcast(np.zeros(4, [("a", "f4"), ("b", "i8")])),
        "objects": lambda: comm.all_gather(np.array([object(), None])),
        "text": lambda: comm.all_gather(np.array(["a", "b"])),
        "the other byte order": lambda: comm.all_reduce(np.zeros(4, ">f4")),
        "long double": lambda: comm.all_reduce(np.zeros(4, np.longdouble)),
    })  # fmt: skip


def check_arguments_refused(comm: Communicator) -> None:
    """Ranks, counts and timeouts out of range."""
    a, size = arrays(comm), comm.size
    x, two, three = a.put(np.zeros(2 * size)), a.put(np.zeros(2)), a.put(np.zeros(3))
    one = [2] * size
    cases: Cases = {
        "root too large": lambda: comm.broadcast(x, size),
        "root negative": lambda: comm.reduce(x, -1),
        "gather's root": lambda: comm.gather(x, size + 7),
        "scatter's root": lambda: comm.scatter(x, -2),
        "scatter without anything": lambda: comm.scatter(None, 0),
        "counts too short": lambda: comm.reduce_scatter(x, counts=one[1:]),
        "counts too long": lambda: comm.all_gather(two, counts=[*one, 0]),
        "counts with another sum": lambda: comm.reduce_scatter(x, counts=[3] * size),
        "negative counts": lambda: comm.reduce_scatter(x, counts=[2 * size + 1, *([0] * (size - 2)), -1][:size]),
        "counts that are not mine": lambda: comm.all_gather(three, counts=one),
        "counts of fractions": lambda: comm.all_gather(two, counts=[2.0] * size),  # type: ignore[list-item]
        "one side of all_to_all": lambda: comm.all_to_all(x, send_counts=one),
        "recv_counts too long": lambda: comm.all_to_all(x, send_counts=one, recv_counts=[*one, 1]),
        "split by a fraction": lambda: comm.split(0.5),  # type: ignore[arg-type]
        "a timeout below 0": lambda: comm.all_reduce(x, timeout=-1),
        "a timeout that is no number": lambda: comm.broadcast(x, timeout=float("nan")),
        "a timeout that is text": lambda: comm.barrier(timeout="5"),  # type: ignore[arg-type]
    }
    _refuses(comm, ArgumentError, cases)


def check_messages_refused(comm: Communicator) -> None:
    """Point-to-point: invalid ranks, tags, channels and arrays."""
    a, other = arrays(comm), (comm.rank + 1) % comm.size
    x, y, eight = a.put(np.zeros(4)), a.put(np.zeros(4)), a.put(np.zeros(8))
    cases: Cases = {
        "send to myself": lambda: comm.send(x, comm.rank),
        "receive from myself": lambda: comm.irecv(x, comm.rank),
        "rank too large": lambda: comm.isend(x, comm.size),
        "rank negative": lambda: comm.recv(x, -1),
        "sendrecv with nobody": lambda: comm.sendrecv(x, comm.size, x, comm.size),
        "probe of myself": lambda: comm.probe(comm.rank),
        "probe of a rank too large": lambda: comm.iprobe(comm.size),
        "probe of rank -1": lambda: comm.iprobe(-1),
        "probe of rank -2": lambda: comm.probe(-2),
    }
    wrong: Cases = {}
    if comm.size > 1:
        cases["tag negative"] = lambda: comm.send(x, other, -1)
        cases["timeout negative"] = lambda: comm.recv(x, other, timeout=-0.5)
        cases["tag too large"] = lambda: comm.recv(x, other, 1 << 62)
        cases["sendrecv, bad tag"] = lambda: comm.sendrecv(x, other, y, other, recv_tag=-3)
        cases.update(_channels(comm, x, y, other))
        wrong["every other element"] = lambda: comm.send(eight[::2], other)
        wrong["no array"] = lambda: comm.isend("text", other)
        if isinstance(a, DeviceArrays):
            host, elsewhere = np.zeros(4), a.put(np.zeros(4))
            elsewhere.tensor.device_id += 1
            wrong["a host array"] = lambda: comm.send(host, other)
            wrong["a buffer on another device"] = lambda: comm.irecv(elsewhere, other)
        else:
            frozen = np.zeros(4)
            frozen.flags.writeable = False
            wrong["read-only buffer"] = lambda: comm.recv(frozen, other)
    _refuses(comm, ArgumentError, cases)
    _refuses(comm, ArrayError, wrong)
    if comm.size > 1:
        if not isinstance(a, DeviceArrays):
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


def _channels(comm: Communicator, x: Any, y: Any, other: int) -> Cases:
    """Invalid channels, and probes of invalid ranks."""

    def probe_in_group() -> None:
        with comm.group():
            comm.iprobe()

    cases: Cases = {
        "channel too large": lambda: comm.send(x, other, channel=32),
        "channel negative": lambda: comm.irecv(x, other, channel=-1),
        "probe of a channel too large": lambda: comm.probe(channel=32),
        "sendrecv, channel too large": lambda: comm.sendrecv(x, other, y, other, channel=99),
        "probe in a group": probe_in_group,
    }
    none: tuple[Any, ...] = (True, False, 1.0, "1", None, np.bool_(True))
    for wrong in none:
        cases[f"channel {wrong!r}"] = partial(comm.isend, x, other, channel=wrong)
        cases[f"probe of channel {wrong!r}"] = partial(comm.iprobe, channel=wrong)
        if wrong is not None:
            cases[f"probe of rank {wrong!r}"] = partial(comm.probe, wrong)
    return cases


def _refuses(comm: Communicator, error: type[XvcommError], cases: Cases, naming: Sequence[str] = ()) -> None:
    """Each case raises the error on every rank, and on a single one without effect on other ranks."""
    for what, call in cases.items():
        for ranks in (range(comm.size), [comm.size - 1]):
            if comm.rank in ranks:
                try:
                    call()
                except error as refused:
                    assert len(str(refused)) > 10, f"{what}: the message says nothing"
                    assert all(name in str(refused) for name in naming), f"{what}: {refused}"
                else:
                    raise AssertionError(f"{what} was accepted")
            _works(comm, what)


def _works(comm: Communicator, after: str) -> None:
    a = arrays(comm)
    total = comm.all_reduce(a.put(np.full(3, comm.rank + 1)))
    assert_equal(a.get(total), np.full(3, comm.size * (comm.size + 1) // 2), f"all_reduce after {after}")
