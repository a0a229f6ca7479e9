"""The libraries that `xvcomm bench` measures side by side. Frameworks are imported only when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.cli.measure import Buffers, Case, Contender, Meeting
from xvcomm.communicator import Communicator
from xvcomm.errors import BackendUnavailable


class Xvcomm:
    """xvcomm itself."""

    name = "xvcomm"
    communicates = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        return None

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        comm, src, dst = self._comm, buffers.src, buffers.dst
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        out = None if dst is src else dst
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(src, out=out),
            "reduce": lambda: comm.reduce(src, root=0, out=out),
            "broadcast": lambda: comm.broadcast(src, root=0),
            "all_gather": lambda: comm.all_gather(src, out=dst),
            "reduce_scatter": lambda: comm.reduce_scatter(src, out=dst),
            "all_to_all": lambda: comm.all_to_all(src, out=dst),
            "sendrecv": lambda: comm.sendrecv(src, right, dst, left),
            "p2p": lambda: _ping_pong(
                comm.rank, lambda: comm.send(src, 1 - comm.rank), lambda: comm.recv(dst, 1 - comm.rank)
            ),
            "barrier": comm.barrier,
        }
        return calls[case.op]

    def close(self) -> None:
        """Nothing: the communicator belongs to the caller."""


def _ping_pong(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> None:
    if rank == 0:
        send()
        recv()
    else:
        recv()
        send()


class Gloo:
    """Gloo through torch.distributed, on loopback. Sums are in place, the only way it has; out of place adds a copy."""

    name = "gloo"
    communicates = True

    def __init__(self, meeting: Meeting, rendezvous: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._rank, self._size = torch, dist, meeting.rank, meeting.size
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=meeting.rank, world_size=meeting.size)

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        known = hasattr(self._torch, str(case.dtype)) and case.dtype.kind in "fiu"
        if known and not (case.dtype.kind == "u" and case.dtype.itemsize > 1) and str(case.dtype) != "bool":
            return None
        return f"Gloo has no {case.dtype}"

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        dist, rank = self._dist, self._rank
        right, left = (rank + 1) % self._size, (rank - 1) % self._size
        src, dst = self._tensor(case, buffers.src), self._tensor(case, buffers.dst)

        def summed(call: Callable[[], object]) -> Callable[[], object]:
            return call if buffers.dst is buffers.src else lambda: (dst.copy_(src), call())

        def exchange() -> None:
            works = [dist.isend(src, right), dist.irecv(dst, left)]
            for work in works:
                work.wait()

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": summed(lambda: dist.all_reduce(dst)),
            "reduce": summed(lambda: dist.reduce(dst, 0)),
            "broadcast": lambda: dist.broadcast(dst, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(dst, src),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(dst, src),
            "all_to_all": lambda: dist.all_to_all_single(dst, src),
            "sendrecv": exchange,
            "p2p": lambda: _ping_pong(rank, lambda: dist.send(src, 1 - rank), lambda: dist.recv(dst, 1 - rank)),
            "barrier": dist.barrier,
        }
        return calls[case.op]

    def _tensor(self, case: Case, array: Any) -> Any:
        plain = array.view(f"i{case.dtype.itemsize}")
        return self._torch.from_numpy(plain).view(getattr(self._torch, str(case.dtype)))

    def close(self) -> None:
        """Leave the process group."""
        self._dist.destroy_process_group()


class Mpi:
    """MPI through mpi4py; the job must have been started by mpirun."""

    name = "mpi"
    communicates = True

    def __init__(self, meeting: Meeting) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        if (self._comm.rank, self._comm.size) != (meeting.rank, meeting.size):
            raise BackendUnavailable(
                f"rank {meeting.rank}: MPI counts {self._comm.size} ranks, this job {meeting.size}; start the job by "
                "mpirun (`xvcomm bench -n N --peer mpi` does)"
            )

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        known = case.dtype.kind in "iuc" or str(case.dtype) in ("float32", "float64")
        return None if known else f"MPI has no {case.dtype}"

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        comm, rank, place = self._comm, self._comm.rank, self._mpi.IN_PLACE
        right, left = (rank + 1) % comm.size, (rank - 1) % comm.size
        src, dst = buffers.src, buffers.dst
        alike = dst is src
        first = place if alike else src
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.Allreduce(first, dst),
            "reduce": lambda: comm.Reduce(first, dst, root=0) if rank == 0 else comm.Reduce(src, None, root=0),
            "broadcast": lambda: comm.Bcast(dst, root=0),
            "all_gather": lambda: comm.Allgather(src, dst),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(src, dst),
            "all_to_all": lambda: comm.Alltoall(src, dst),
            "sendrecv": lambda: comm.Sendrecv(src, right, recvbuf=dst, source=left),
            "p2p": lambda: _ping_pong(rank, lambda: comm.Send(src, 1 - rank), lambda: comm.Recv(dst, 1 - rank)),
            "barrier": comm.Barrier,
        }
        return calls[case.op]

    def close(self) -> None:
        """Nothing: mpi4py finalizes when the interpreter ends."""


class Memcpy:
    """No communication: every rank copies as many bytes once. What no library that copies at all can beat."""

    name = "memcpy"
    communicates = False

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        return "nothing to copy" if case.op == "barrier" else None

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        source, target = np.zeros(case.bytes, np.uint8), np.zeros(case.bytes, np.uint8)
        source[...] = target[...] = 1
        if case.op != "p2p":
            return lambda: np.copyto(target, source)

        def there_and_back() -> None:
            np.copyto(target, source)
            np.copyto(source, target)

        return there_and_back

    def close(self) -> None:
        """Nothing to let go of."""


def contenders(names: list[str], comm: Communicator, meeting: Meeting, rendezvous: str) -> list[Contender]:
    """xvcomm and the peers asked for, ready to be measured.

    Args:
        names: of `measure.PEERS`.
        comm: xvcomm's communicator over all ranks.
        meeting: where the ranks agree.
        rendezvous: path of a file, the same on all ranks, that does not exist yet.

    Raises:
        BackendUnavailable: a peer's package is missing, or the job was not started the way it needs.
    """
    made: list[Contender] = [Xvcomm(comm)]
    makers: dict[str, Callable[[], Contender]] = {
        "gloo": lambda: Gloo(meeting, rendezvous),
        "mpi": lambda: Mpi(meeting),
        "memcpy": Memcpy,
    }
    for name in names:
        try:
            made.append(makers[name]())
        except ImportError as error:
            raise BackendUnavailable(f"peer {name}: {error}; pip install xvcomm[torch,mpi]") from error
    return made
