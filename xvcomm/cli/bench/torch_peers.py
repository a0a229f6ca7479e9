"""Libraries that `xvcomm bench` uses through torch: Gloo, NCCL, and copies between a GPU and host memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from xvcomm.cli.bench.case import Buffers, Case, one_way, ping_pong
from xvcomm.cli.bench.measure import Meeting
from xvcomm.cli.bench.memory import Memory, TorchMemory
from xvcomm.errors import BackendUnavailable
from xvcomm.types.topology import Topology

Call = Callable[[], object]


class TorchRanks:
    """Process groups of torch.distributed over the ranks, created on first use.

    Args:
        meeting: rank and size.
        rendezvous: path of a file, the same on all ranks, that does not exist yet.
    """

    def __init__(self, meeting: Meeting, rendezvous: str) -> None:
        self.rank, self.size, self._rendezvous = meeting.rank, meeting.size, rendezvous

    def group(self, backend: str) -> Any:
        """A process group of all ranks over `gloo` or `nccl`."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{self._rendezvous}", rank=self.rank, world_size=self.size
            )
        return dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)

    def close(self) -> None:
        """Destroy all groups. Idempotent."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class TorchLibrary:
    """A backend of torch.distributed. It supports sums in place only; out of place adds a copy."""

    communicates = True

    def __init__(self, name: str, backend: str, ranks: TorchRanks) -> None:
        import torch
        import torch.distributed as dist

        self.name, self._torch, self._dist, self._ranks = name, torch, dist, ranks
        self._group = ranks.group(backend)

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        known = hasattr(self._torch, str(case.dtype)) and case.dtype.kind in "fiu"
        if known and not (case.dtype.kind == "u" and case.dtype.itemsize > 1) and str(case.dtype) != "bool":
            return None
        return f"{self.name} has no {case.dtype}"

    def bind(self, case: Case, buffers: Buffers) -> Call:
        """See `Contender.bind`."""
        return self._calls(buffers.src, buffers.dst)[case.op]

    def _calls(self, src: Any, dst: Any) -> dict[str, Call]:
        dist, group, rank, size = self._dist, self._group, self._ranks.rank, self._ranks.size
        right, left = (rank + 1) % size, (rank - 1) % size

        def summed(call: Call) -> Call:
            return call if dst is src else lambda: (dst.copy_(src), call())

        def exchange() -> None:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, src, right, group), dist.P2POp(dist.irecv, dst, left, group)]
            )
            for work in works:
                work.wait()

        def send(tensor: Any) -> None:
            dist.send(tensor, 1 - rank, group)

        def recv(tensor: Any) -> None:
            dist.recv(tensor, 1 - rank, group)

        return {
            "all_reduce": summed(lambda: dist.all_reduce(dst, group=group)),
            "reduce": summed(lambda: dist.reduce(dst, 0, group=group)),
            "broadcast": lambda: dist.broadcast(dst, 0, group),
            "all_gather": lambda: dist.all_gather_into_tensor(dst, src, group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(dst, src, group=group),
            "all_to_all": lambda: dist.all_to_all_single(dst, src, group=group),
            "gather": lambda: dist.gather(src, list(dst.chunk(size)) if rank == 0 else None, 0, group),
            "scatter": lambda: dist.scatter(dst, list(src.chunk(size)) if rank == 0 else None, 0, group),
            "sendrecv": exchange,
            "send": one_way(rank, send, recv, src, dst),
            "p2p": ping_pong(rank, send, recv, src, dst),
            "barrier": lambda: dist.barrier(group),
        }

    def close(self) -> None:
        """Destroy the process groups."""
        self._ranks.close()


class Gloo(TorchLibrary):
    """Gloo on loopback. Operations that it does not support on GPU memory go through pinned host memory, as users would do."""

    def __init__(self, ranks: TorchRanks) -> None:
        super().__init__("gloo", "gloo", ranks)

    def bind(self, case: Case, buffers: Buffers) -> Call:
        if buffers.memory.kind == "host":
            src, dst = (self._tensor(case, array) for array in (buffers.src, buffers.dst))
            return self._calls(src, src if buffers.dst is buffers.src else dst)[case.op]
        if case.op in ("all_reduce", "broadcast", "barrier"):
            return super().bind(case, buffers)
        return self._staged(case, buffers)

    def _tensor(self, case: Case, array: Any) -> Any:
        plain = array.view(f"i{case.dtype.itemsize}")
        return self._torch.from_numpy(plain).view(getattr(self._torch, str(case.dtype)))

    def _staged(self, case: Case, buffers: Buffers) -> Call:
        rank, src, dst = self._ranks.rank, buffers.src, buffers.dst
        out = self._torch.empty_like(src, device="cpu", pin_memory=True)
        back = out if dst is src else self._torch.empty_like(dst, device="cpu", pin_memory=True)
        calls = self._calls(out, back)

        def send(tensor: Any) -> None:
            self._dist.send(out.copy_(tensor), 1 - rank, self._group)

        def recv(tensor: Any) -> None:
            self._dist.recv(back, 1 - rank, self._group)
            tensor.copy_(back)

        def staged() -> None:
            out.copy_(src)
            calls[case.op]()
            dst.copy_(back)

        pairs = {"send": one_way(rank, send, recv, src, dst), "p2p": ping_pong(rank, send, recv, src, dst)}
        return pairs.get(case.op, staged)


class Copies:
    """No communication: each rank copies between its GPU and pinned host memory, in collectives what must cross the border of
    two equal islands. An upper bound for transfers through the host.
    """

    name = "raw"
    communicates = False

    def __init__(self, memory: Memory, topology: Topology, rank: int) -> None:
        if not isinstance(memory, TorchMemory):
            raise BackendUnavailable("peer raw needs torch for this GPU")
        import torch

        self._torch, self._topology, self._rank = torch, topology, rank
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        if self._nbytes(case) is None:
            return f"{case.op} is not a copy, or there are not two islands of the same number of ranks"
        return None

    def bind(self, case: Case, buffers: Buffers) -> Call:
        """See `Contender.bind`."""
        torch, (one, other) = self._torch, self._streams
        out, back = self._nbytes(case) or (0, 0)
        sent, received = buffers.src.view(torch.uint8)[:out], buffers.dst.view(torch.uint8)[:back]
        outside, inside = (torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in (out, back))
        if not back:
            return lambda: outside.copy_(sent, non_blocking=True)
        if not out:
            return lambda: received.copy_(inside, non_blocking=True)

        def both_ways() -> None:
            with torch.cuda.stream(one):
                outside.copy_(sent, non_blocking=True)
            with torch.cuda.stream(other):
                received.copy_(inside, non_blocking=True)

        return both_ways

    def close(self) -> None:
        """No-op."""

    def _nbytes(self, case: Case) -> tuple[int, int] | None:
        """Bytes to copy from the GPU, and to it."""
        if case.op == "send":
            return (case.bytes, 0) if self._rank == 0 else (0, case.bytes)
        if case.op == "sendrecv":
            return case.bytes, case.bytes
        return case.crossing(self._topology, self._rank)
