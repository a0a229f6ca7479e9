"""The libraries that `xvcomm bench` compares. Frameworks are imported only when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xvcomm.cli.bench.case import Buffers, Case, one_way, ping_pong
from xvcomm.cli.bench.cupy_peer import CupyNccl
from xvcomm.cli.bench.measure import PEERS, Contender, Meeting
from xvcomm.cli.bench.memory import Memory
from xvcomm.cli.bench.torch_peers import Copies, Gloo, TorchLibrary, TorchRanks
from xvcomm.comm.communicator import Communicator
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

        def send(array: Any) -> None:
            comm.send(array, 1 - comm.rank)

        def recv(array: Any) -> None:
            comm.recv(array, 1 - comm.rank)

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(src, out=out),
            "reduce": lambda: comm.reduce(src, root=0, out=out),
            "broadcast": lambda: comm.broadcast(src, root=0),
            "all_gather": lambda: comm.all_gather(src, out=dst),
            "reduce_scatter": lambda: comm.reduce_scatter(src, out=dst),
            "all_to_all": lambda: comm.all_to_all(src, out=dst),
            "gather": lambda: comm.gather(src, root=0, out=dst if comm.rank == 0 else None),
            "scatter": lambda: comm.scatter(src if comm.rank == 0 else None, root=0, out=dst),
            "sendrecv": lambda: comm.sendrecv(src, right, dst, left),
            "send": one_way(comm.rank, send, recv, src, dst),
            "p2p": ping_pong(comm.rank, send, recv, src, dst),
            "barrier": comm.barrier,
        }
        return calls[case.op]

    def close(self) -> None:
        """No-op: the communicator belongs to the caller."""


class Mpi:
    """MPI through mpi4py; the job must have been started with mpirun."""

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
        first = place if dst is src else src

        def send(array: Any) -> None:
            comm.Send(array, 1 - rank)

        def recv(array: Any) -> None:
            comm.Recv(array, 1 - rank)

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.Allreduce(first, dst),
            "reduce": lambda: comm.Reduce(first, dst, root=0) if rank == 0 else comm.Reduce(src, None, root=0),
            "broadcast": lambda: comm.Bcast(dst, root=0),
            "all_gather": lambda: comm.Allgather(src, dst),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(src, dst),
            "all_to_all": lambda: comm.Alltoall(src, dst),
            "gather": lambda: comm.Gather(src, dst if rank == 0 else None, root=0),
            "scatter": lambda: comm.Scatter(src if rank == 0 else None, dst, root=0),
            "sendrecv": lambda: comm.Sendrecv(src, right, recvbuf=dst, source=left),
            "send": one_way(rank, send, recv, src, dst),
            "p2p": ping_pong(rank, send, recv, src, dst),
            "barrier": comm.Barrier,
        }
        return calls[case.op]

    def close(self) -> None:
        """No-op: mpi4py finalizes MPI at interpreter exit."""


class Memcpy:
    """No communication: every rank copies the same number of bytes once, a lower bound for libraries that copy."""

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
        """No-op."""


def contenders(
    names: Sequence[str], comm: Communicator, meeting: Meeting, memory: Memory, rendezvous: str
) -> list[Contender]:
    """Create the requested libraries.

    Args:
        names: `xvcomm`, or keys of `measure.PEERS`.
        comm: xvcomm's communicator over all ranks.
        meeting: for exchanges between the ranks.
        memory: of this rank's device.
        rendezvous: path of a file, the same on all ranks, that does not exist yet.

    Raises:
        BackendUnavailable: a peer's package is missing, the peer does not support the device, or the job was started in another
            way than it needs.
    """
    ranks = TorchRanks(meeting, rendezvous)
    makers: dict[str, Callable[[], Contender]] = {
        "xvcomm": lambda: Xvcomm(comm),
        "gloo": lambda: Gloo(ranks),
        "mpi": lambda: Mpi(meeting),
        "memcpy": Memcpy,
        "nccl": lambda: TorchLibrary("nccl", "nccl", ranks),
        "nccl-shm": lambda: TorchLibrary("nccl-shm", "nccl", ranks),
        "nccl-socket": lambda: TorchLibrary("nccl-socket", "nccl", ranks),
        "nccl-cupy": lambda: CupyNccl(meeting),
        "raw": lambda: Copies(memory, comm.topology, comm.rank),
    }
    made = []
    for name in names:
        if name in PEERS and not PEERS[name].serves(memory.kind):
            raise BackendUnavailable(f"peer {name} is not for {memory.kind} memory")
        try:
            made.append(makers[name]())
        except ImportError as error:
            raise BackendUnavailable(f"peer {name}: {error}; pip install xvcomm[torch,mpi,cuda]") from error
    return made
