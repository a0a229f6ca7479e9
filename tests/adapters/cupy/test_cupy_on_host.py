"""`cupyx.distributed`'s methods on ranks in host memory, as in mixed jobs, with numpy arrays and scipy sparse matrices.

The behaviour with CuPy itself is tested in tests/hardware/test_cupy_adapter.py.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from xvcomm.adapters.cupy import NCCLBackend, init_process_group
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError, MismatchError
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.testing import World
from xvcomm.types.dtype import BY_NAME


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks of one island and one of another."""
    with World(islands="a:2,b:1", env={"XVCOMM_DEVICE": "host"}) as ranks:
        yield ranks


def dense(communicator: Communicator) -> None:
    group = NCCLBackend.over(communicator)
    rank, size, last = group.rank, communicator.size, communicator.size - 1
    after = (rank + 1) % size
    for kind in "bBiIlLefdFD":
        x, out = (np.arange(6) + rank).astype(kind), np.zeros(6, kind)
        total = sum((np.arange(6) + r).astype(kind) for r in range(size))
        group.all_reduce(x, out)
        assert (out == total).all() and (x == (np.arange(6) + rank).astype(kind)).all()
        group.all_reduce(x, x)
        assert (x == total).all()
        x = (np.arange(6) + rank).astype(kind)
        group.reduce(x, None if rank else out, 0, "prod")
        assert (
            rank or (out == np.prod([(np.arange(6) + r).astype(kind) for r in range(size)], axis=0, dtype=kind)).all()
        )
        y = np.full(3, rank, kind)
        group.broadcast(y, last)
        assert (y == last).all()
        table, part = (np.arange(2 * size) + rank).astype(kind), np.zeros(2, kind)
        group.reduce_scatter(table, part, 2)
        assert (part == sum((np.arange(2 * size) + r).astype(kind) for r in range(size))[2 * rank : 2 * rank + 2]).all()
        group.reduce_scatter(table, table, 2)  # NCCL's habit: the result overwrites the beginning
        assert (table[:2] == part).all()
        rows = np.zeros((size, 3), kind)
        group.all_gather(np.full(3, rank, kind), rows, 3)
        assert (rows == np.arange(size)[:, None].astype(kind)).all()
        rows[:] = 0
        rows[rank] = rank
        group.all_gather(rows[rank], rows, 3)
        assert (rows == np.arange(size)[:, None].astype(kind)).all()
        group.gather(np.full(3, rank + 1, kind), rows, last)
        assert rank != last or (rows == np.arange(1, size + 1)[:, None].astype(kind)).all()
        y = np.zeros(3, kind)
        group.scatter(np.repeat(np.arange(size), 3).reshape(size, 3).astype(kind), y, 1)
        assert (y == rank).all()
        sent, received = np.full((size, 2), rank, kind), np.zeros((size, 2), kind)
        group.all_to_all(sent, received)
        assert (received == np.arange(size)[:, None].astype(kind)).all()
        if rank == 0:
            group.send(np.full(4, 7, kind), 1)
        elif rank == 1:
            y = np.zeros(4, kind)
            group.recv(y, 0)
            assert (y == 7).all()
        partner = {0: 1, 1: 0}.get(rank, rank)
        y = np.zeros(2, kind)
        group.send_recv(np.full(2, rank, kind), y, partner)
        assert (y == partner).all()
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3) + rank)
    out = np.zeros((2, 3), order="F")
    group.all_reduce(fortran, out, "max")
    assert (out == np.arange(6.0).reshape(2, 3) + last).all()
    group.barrier()
    group.send_recv(np.arange(2), np.zeros(2, int), rank)
    assert after == (rank + 1) % size


def matrix(kind: str, rank: int, by_element: bool) -> Any:
    """A sparse matrix whose pattern and part sizes differ between ranks."""
    full = np.zeros((4, 4), "f")
    full[rank, : rank + 1] = np.arange(1, rank + 2)
    full[3, rank] = 2
    return getattr(sparse, f"{kind}_{'array' if by_element else 'matrix'}")(full)


def thin(communicator: Communicator, kind: str, by_element: bool) -> None:
    """Sparse matrices with every method: results are written into the arrays of the given output."""
    group = NCCLBackend.over(communicator)
    rank, size = group.rank, communicator.size
    mine = matrix(kind, rank, by_element)
    everybodys = [matrix(kind, r, by_element).toarray() for r in range(size)]
    total = sum(everybodys)

    def empty() -> Any:
        return type(mine)((4, 4), dtype="f")

    out = empty()
    group.all_reduce(mine, out)
    assert (out.toarray() == total).all() and out.format == kind
    out = empty()
    group.reduce(mine, out, 1, "prod")
    if rank == 1:
        want = everybodys[0]
        for other in everybodys[1:]:
            want = want * other if by_element else want @ other
        assert (out.toarray() == want).all()
    out = matrix(kind, rank, by_element)
    group.broadcast(out, 1)
    assert (out.toarray() == everybodys[1]).all()
    found: list[Any] = []
    group.all_gather(mine, found, 0)
    assert all((a.toarray() == b).all() for a, b in zip(found, everybodys, strict=True))
    found = []
    group.gather(mine, found, 2)
    gathered = everybodys if rank == 2 else []
    assert all((a.toarray() == b).all() for a, b in zip(found, gathered, strict=True))
    out = empty()
    group.scatter([matrix(kind, r, by_element) for r in range(size)] if rank == 0 else None, out)
    assert (out.toarray() == everybodys[rank]).all()
    out = empty()
    group.reduce_scatter([mine * (r + 1) for r in range(size)], out, 0)
    assert (out.toarray() == total * (rank + 1)).all()
    found = []
    group.all_to_all([mine * (r + 1) for r in range(size)], found)
    assert all((a.toarray() == b * (rank + 1)).all() for a, b in zip(found, everybodys, strict=True))
    out, partner = empty(), {0: 1, 1: 0}.get(rank, rank)
    group.send_recv(mine, out, partner)
    assert (out.toarray() == everybodys[partner]).all()
    if rank == 0:
        group.send(mine, 2)
    elif rank == 2:
        out = empty()
        group.recv(out, 0)
        assert (out.toarray() == everybodys[0]).all()


def refused(communicator: Communicator) -> None:
    group = NCCLBackend.over(communicator)
    x, out = np.zeros((4, 4)), np.zeros(16)
    calls: dict[str, tuple[type[Exception], Callable[[], None]]] = {
        "not contiguous": (ArrayError, lambda: group.all_reduce(x[:, 1], out)),
        "op 'mean'": (ArgumentError, lambda: group.all_reduce(x, out, "mean")),
        "needed are": (ArrayError, lambda: group.all_reduce(x, out[:3])),
        "one for each rank": (ArrayError, lambda: group.all_to_all(np.zeros(communicator.size + 1), out)),
        "dia format": (ArrayError, lambda: group.send(sparse.dia_matrix((3, 3)), (group.rank + 1) % communicator.size)),
        "'sum' and 'prod'": (ArgumentError, lambda: group.reduce(sparse.eye(3, format="csr"), None, 0, "max")),
        "a list of": (ArgumentError, lambda: group.all_to_all([sparse.eye(3, format="csr")], [])),
    }
    for text, (error, call) in calls.items():
        with pytest.raises(error, match=text):
            call()
    group.barrier()


def stopped(communicator: Communicator) -> None:
    """Arguments that differ between ranks raise on all ranks."""
    group = NCCLBackend.over(communicator.split(0))
    with pytest.raises(MismatchError):
        group.all_reduce(np.zeros(3 + group.rank), np.zeros(3 + group.rank))
    group.stop()
    group.stop()


@pytest.mark.parametrize("check", [dense, refused, stopped])
def test_dense(world: World, check: Callable[[Communicator], None]) -> None:
    """Arrays of all types that CuPy supports."""
    world.run(check)


@pytest.mark.parametrize("by_element", [False, True], ids=["matrix", "array"])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_sparse(world: World, kind: str, by_element: bool) -> None:
    """Sparse matrices, whose product is the matrix product, and sparse arrays, whose product is elementwise."""
    world.run(thin, kind, by_element)


RANK = """
import sys
import numpy as np
from xvcomm.adapters.cupy import init_process_group

comm = init_process_group(2, int(sys.argv[1]))
x = np.full(3, comm.rank + 1.0)
comm.all_reduce(x, x)
print(x.tolist())
comm.stop()
"""


def test_ranks_connect_without_a_launcher(tmp_path: Path) -> None:
    """As in cupyx, each process passes its rank. The secret is created once, readable by this user only."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    port = str(20_000 + os.getpid() % 10_000)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
    environment |= {"XVCOMM_DEVICE": "host", "HOME": str(tmp_path), "CUPYX_DISTRIBUTED_PORT": port}
    environment["XVCOMM_KERNEL_CACHE"] = str(Path.home() / ".cache" / "xvcomm")  # what other tests compiled
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["[3.0, 3.0, 3.0]\n"] * 2
    file = tmp_path / ".cache" / "xvcomm" / "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(file.read_text()) == 32
    assert [each.name for each in file.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_devices": 0, "rank": 0}, "rank 0 of 0"),
        ({"n_devices": 2, "rank": 2}, "rank 2 of 2"),
        ({"n_devices": 2, "rank": 0, "backend": "mpi"}, "backend 'mpi'"),
        ({"n_devices": 2, "rank": 0, "host": "node7"}, "XVCOMM_SECRET"),
    ],
)
def test_invalid_arguments(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], text: str) -> None:
    """They raise before any communication."""
    monkeypatch.setenv("XVCOMM_DEVICE", "host")
    monkeypatch.delenv("XVCOMM_SECRET", raising=False)
    with pytest.raises(ValueError, match=text):
        init_process_group(**arguments)


def test_import_does_not_need_cupy() -> None:
    """CuPy is imported when a rank with a GPU joins."""
    code = "import sys, xvcomm.adapters.cupy; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SIGNATURES = """
import inspect
from cupyx import distributed as theirs
from xvcomm.adapters import cupy as ours

def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

names = [n for n, _ in inspect.getmembers(theirs.NCCLBackend, inspect.isfunction) if n[0] != "_"]
for name in [*names, "__init__"]:
    mine, given = (parameters(getattr(m.NCCLBackend, name)) for m in (ours, theirs))
    assert mine == given, (name, mine, given)
assert parameters(ours.init_process_group) == parameters(theirs.init_process_group)
print(len(names))
"""


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed: pip install 'xvcomm[cuda]'")
def test_signatures_are_those_of_cupyx() -> None:
    """Same methods, arguments and defaults. CuPy can be imported without a GPU; it starts MPI if that is installed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIGNATURES], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stdout.split() == ["13"], done.stdout + done.stderr


class Dispatching:
    """An array as in CuPy: without an array API namespace, but with numpy's dispatch protocols."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert function is np.empty_like and args == (self,)
        return np.empty(dtype=np.float32, **kwargs)


def test_results_on_a_gpu_are_created_by_the_inputs_framework() -> None:
    """Also if it only supports numpy's dispatch protocols."""
    x = Dispatching()
    given = ArrayView(0, (2,), BY_NAME["float32"], 2, 8, x, "cuda")
    made = array.empty_like(given, (5,), pytest.fail)
    assert (made.shape, made.dtype) == ((5,), BY_NAME["float32"])
    with pytest.raises(ArrayError, match="pass out="):
        array.empty_like(ArrayView(0, (2,), BY_NAME["float32"], 2, 8, object(), "cuda"), (5,), pytest.fail)
