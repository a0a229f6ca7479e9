"""The process group: all methods that `torch.distributed` and torch's C++ call on a group.

In Python, torch permits subclasses of `ProcessGroup` only (`c10d::Backend` has no trampoline). Such an object represents the
whole group for all devices: `"cpu:gloo,cuda:xvcomm"` also creates one of these, which serves both.

Method names and arguments are c10d's, see torch/csrc/distributed/c10d/ProcessGroup.hpp. Methods return a `Work`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xvcomm.adapters.torch import collectives, messages, options, versions
from xvcomm.adapters.torch.errors import as_torch, mapped
from xvcomm.adapters.torch.identity import Identity
from xvcomm.adapters.torch.monitored import monitored_barrier
from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.planes import Operation, Plane
from xvcomm.adapters.torch.profiling import profiling, recorded
from xvcomm.adapters.torch.tensors import on_one_device
from xvcomm.adapters.torch.works import NOTHING_LEFT, Done, HostWork, StreamOperation, StreamWork, Work
from xvcomm.errors import ArrayError, ClosedError, XvcommError
from xvcomm.system.forking import FORKED, forks

Tensors = Sequence[Tensor]
_NO_TENSOR: tuple[Tensor, ...] = ()


class ProcessGroup(Identity):
    """A group of ranks on any mix of devices. Created by torch, for the backend `xvcomm`."""

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        """Reduce each tensor in place."""
        tensors, how = _listed(tensors), options.read(op if opts is None else opts, timeout)
        if len(tensors) == 1:
            return self._run_one("all_reduce", collectives.all_reduce, tensors, how)
        return self._run(
            "all_reduce", tensors, how, lambda plane: _each_alone(collectives.all_reduce, plane, how, tensors)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """See `allreduce`."""
        return self.allreduce(tensors, opts)

    def allreduce_sparse(self, tensors: Tensors, opts: Any = None) -> Work:
        """See `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        """Copy the root's tensors to all ranks."""
        root = opts if isinstance(opts, int) else root
        tensors, how = _listed(tensors), options.read(None if isinstance(opts, int) else opts, timeout, root=root)
        if len(tensors) == 1:
            return self._run_one("broadcast", collectives.broadcast, tensors, how)
        return self._run(
            "broadcast", tensors, how, lambda plane: _each_alone(collectives.broadcast, plane, how, tensors)
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Reduce each tensor into the root's."""
        if opts is None or isinstance(opts, int):
            root, opts = opts if root is None else root, op
        tensors, how = _listed(tensors), options.read(opts, timeout, root=root)
        return self._run("reduce", tensors, how, lambda plane: _each(collectives.reduce, plane, how, tensors))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gather the blocks of all ranks, each in its own tensor."""
        outs, ins = _paired(output_tensors, input_tensors)
        how = options.read(opts, timeout)
        results = [t for ranks in outs for t in ranks]
        return self._run(
            "all_gather", results, how, lambda plane: _each(collectives.all_gather, plane, how, outs, ins), ins
        )

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """Like `allgather` for several tensors; rank r's are written to `output_lists[r]`."""
        how = options.read(opts)
        outs, input_list = [[ranks[i] for ranks in output_lists] for i in range(len(input_list))], tuple(input_list)
        results = [t for ranks in output_lists for t in ranks]
        return self._run(
            "all_gather",
            results,
            how,
            lambda plane: _each(collectives.all_gather, plane, how, outs, input_list),
            input_list,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None) -> Work:
        """Concatenate the blocks of all ranks in one tensor."""
        how = options.read(opts, timeout)
        return self._run_one("_allgather_base", collectives.all_gather_into, (output, input), how)

    def all_gather_single_coalesced(self, output_lists: Tensors, input_list: Tensors, opts: Any = None) -> Work:
        """Run `all_gather_single` for each pair of tensors."""
        output_lists, input_list, how = tuple(output_lists), tuple(input_list), options.read(opts)
        return self._run(
            "allgather_into_tensor_coalesced", output_lists, how,
            lambda plane: _each_alone(collectives.all_gather_into, plane, how, output_lists, input_list), input_list,
        )  # fmt: skip

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Reduce over all ranks, and give each rank its block, which are separate tensors."""
        ins, outs = _paired(input_tensors, output_tensors)
        how = options.read(op if opts is None else opts, timeout)
        blocks = [t for ranks in ins for t in ranks]
        return self._run(
            "reduce_scatter", outs, how, lambda plane: _each(collectives.reduce_scatter, plane, how, outs, ins), blocks
        )

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        """Reduce over all ranks, and give each rank its block of one tensor."""
        return self._run_one(
            "_reduce_scatter_base", collectives.reduce_scatter_into, (outputTensor, inputTensor), options.read(opts)
        )

    def reduce_scatter_single_coalesced(self, outputTensors: Tensors, inputTensors: Tensors, opts: Any = None) -> Work:
        """Run `reduce_scatter_single` for each pair of tensors."""
        outputTensors, inputTensors, how = tuple(outputTensors), tuple(inputTensors), options.read(opts)
        return self._run(
            "reduce_scatter_tensor_coalesced", outputTensors, how,
            lambda plane: _each_alone(collectives.reduce_scatter_into, plane, how, outputTensors, inputTensors), inputTensors,
        )  # fmt: skip

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Gather the blocks of all ranks on the root, each in its own tensor."""
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        root, opts = (opts, None) if isinstance(opts, int) else (root, opts)
        how = options.read(opts, timeout, root=root)
        outs, (x,) = (tuple(output_tensors[0]) if output_tensors else _NO_TENSOR), input_tensors
        return self._run("gather", outs, how, lambda plane: collectives.gather(plane, outs, x, how), input_tensors)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Send each rank its block of the root's tensors."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        root, opts = (opts, None) if isinstance(opts, int) else (root, opts)
        how = options.read(opts, timeout, root=root)
        parts, (out,) = (tuple(input_tensors[0]) if input_tensors else _NO_TENSOR), output_tensors
        return self._run("scatter", [out], how, lambda plane: collectives.scatter(plane, out, parts, how), parts)

    def all_to_all_single(
        self, output_tensor: Tensor, input_tensor: Tensor, output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (), opts: Any = None, timeout: Any = None,
    ) -> Work:  # fmt: skip
        """Send rows to each rank and receive rows from each."""
        how = options.read(opts, timeout)
        outs, ins = list(output_split_sizes), list(input_split_sizes)
        return self._run(
            "all_to_all", [output_tensor], how,
            lambda plane: collectives.all_to_all_into(plane, output_tensor, input_tensor, outs, ins, how), [input_tensor],
        )  # fmt: skip

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        """Send a tensor to each rank and receive one from each."""
        output_tensors, input_tensors, how = tuple(output_tensors), tuple(input_tensors), options.read(opts, timeout)
        return self._run(
            "all_to_all", output_tensors, how,
            lambda plane: collectives.all_to_all(plane, output_tensors, input_tensors, how), input_tensors,
        )  # fmt: skip

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait until every rank has called this; with GPUs, also for the work on the current stream."""
        how = options.read(opts, timeout)
        named = _on_gpu(opts) or self._backend == "nccl"  # torch knows that groups of NCCL serve GPUs only
        gpu = self.planes.gpu if named else None
        if gpu is not None and not how.waits:  # the others may wait for what this rank does next
            self._sequence = next(self._numbers)
            with recorded(self._backend, "barrier", _NO_TENSOR):
                return gpu.barrier(how)
        return self._on(gpu or self.planes.host, "barrier", [], how, lambda plane: collectives.barrier(plane, how))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block the host until every rank has called this; the group remains usable if a rank is missing.

        Raises:
            DeadlineExceeded: names the ranks that did not come.
            ClosedError: in a forked child, which shares its connection to the store with its parent.
        """
        if self._forks != forks():
            raise as_torch(ClosedError(FORKED, op="monitored_barrier"))
        limit = self.options._timeout if timeout is None else timeout
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        self._monitored += 1
        with recorded(self._backend, "monitored_barrier", _NO_TENSOR):
            monitored_barrier(self._store, self._rank, self._size, self._monitored, seconds, wait_all_ranks)

    # Messages.

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Send one tensor."""
        with recorded(self._backend, "send", tensors):
            return self._noted(messages.send(self._plane(tensors), tensors, dstRank, tag))

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Receive one tensor."""
        with recorded(self._backend, "recv", tensors):
            return self._noted(messages.receive(self._plane(tensors), tensors, srcRank, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive one tensor from the rank that sends first."""
        with recorded(self._backend, "recvAnySource", tensors):
            return self._noted(messages.receive_from_any(self._plane(tensors), tensors, tag))

    # The names before torch 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Coalescing: operations start when they are called, and never wait for each other's peers. Collectives run in order, so
    # only messages have to be waited for.

    _coalesced: list[Work] | None = None

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._on(self._of(device), "coalesced", [], Options(), lambda plane: _wait_for(works))

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Lifecycle.

    def split_group(
        self, new_ranks: Sequence[int], timeout: Any = None, opts: Any = None, group_name: str | None = None,
        group_desc: str | None = None, device_types: Any = None,
    ) -> ProcessGroup | None:  # fmt: skip
        """Create a group of some of this group's ranks; None on the others."""
        self._splits += 1
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._group_name}:split:{self._splits}"
        left = options.seconds(timeout) or self.options._timeout.total_seconds()
        with mapped():
            planes = self.planes.subgroup(list(new_ranks), name, left)
        store = dist.PrefixStore(f"{name}/", self._store)
        group = ProcessGroup(planes, store, list(new_ranks).index(self._rank), len(new_ranks), left, self._backend)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._group_desc}:split:{self._splits}")
        return group

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> ProcessGroup:
        """Create a group without some ranks, which do not call this, and without those that are lost.

        Args:
            shrink_flags: SHRINK_ABORT stops what is under way on all ranks before; SHRINK_DEFAULT does on this one.
            opts_override: options of the new group, which has those of this one instead; told by a warning.
        """
        if opts_override is not None:
            text = "shrink_group: pg_options have no effect; the new group has the timeout of this one, see set_timeout"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        if shrink_flags:
            self.planes.abort("the process group is shrunk")
        with mapped():
            planes = self.planes.shrink(ranks_to_exclude, self._group_name, self.options._timeout.total_seconds())
        comm = planes.comms["main"]
        return ProcessGroup(
            planes, self._store, comm.rank, comm.size, self.options._timeout.total_seconds(), self._backend
        )

    def comm_split_count(self) -> int:
        """Number of times that this group was split."""
        return self._splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        """No-op: ranks that are not in a group do not take part in its creation."""

    def abort(self) -> None:
        """Make every rank leave its operation; the group is unusable afterwards."""
        self.planes.abort("the process group was aborted")
        self.planes.close()

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        self.planes.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of further operations."""
        self.options._timeout = timeout
        for comm in self.planes.comms.values():
            comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Execution of operations.

    def _run(
        self, what: str, results: Tensors, how: Options, job: Callable[[Plane], None], inputs: Tensors = _NO_TENSOR
    ) -> Work:
        """Run a collective on the plane of its tensors."""
        return self._on(self._plane((*results, *inputs)), what, results, how, job, inputs or results)

    def _run_one(self, what: str, operation: Operation, tensors: Tensors, how: Options) -> Work:
        """Run a collective of one output, which comes first, and at most one input: the usual case, with the least overhead."""
        if profiling():
            with recorded(self._backend, what, tensors[-1:]):
                return self._one(what, operation, tensors, how)
        return self._one(what, operation, tensors, how)

    def _one(self, what: str, operation: Operation, tensors: Tensors, how: Options) -> Work:
        plane = self._plane(tensors)
        self._sequence = next(self._numbers)
        if plane.takes(tensors):
            if not how.waits:
                return self._noted(plane.start(operation, tensors, how, what))
            if plane.ready:
                try:
                    operation(plane, *tensors, how)
                except XvcommError as error:
                    raise as_torch(error) from None
                return NOTHING_LEFT
        job = partial(collectives.on_any, operation, tensors=tensors, how=how)
        return plane.run(job, tensors[:1], what, waits=how.waits, inputs=tensors[1:])

    def _on(
        self, plane: Plane, what: str, results: Tensors, how: Options, job: Callable[[Plane], None],
        shown: Tensors = _NO_TENSOR,
    ) -> Work:  # fmt: skip
        self._sequence = next(self._numbers)
        with recorded(self._backend, what, shown):
            return plane.run(job, results, what, waits=how.waits, inputs=shown)

    def _plane(self, tensors: Tensors) -> Plane:
        """The plane for a call's tensors. Checks that all of them are on its device, which is not checked again below."""
        if len(tensors) > 1:
            on_one_device(tensors)
        if not tensors or tensors[0].is_cpu:
            return self.planes.host
        gpu = self.planes.gpu
        return gpu if gpu is not None and tensors[0].is_cuda else self._of(tensors[0].device)

    def _of(self, device: torch.device) -> Plane:
        if device.type == "cpu":
            return self.planes.host
        gpu = self.planes.gpu
        if gpu is None or device.type != gpu.place.type:
            kinds = " and ".join(d.type for d in self._device_types)
            raise as_torch(
                ArrayError(f"a tensor on {device}: this group serves {kinds}; create or move the tensor there")
            )
        return gpu


# Copies of the caller's lists, as in c10d: the caller may modify its lists during an operation.


def _listed(tensors: Any) -> Any:
    # isinstance(Tensor) would take a microsecond
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)


def _paired(lists: Any, tensors: Any) -> tuple[Any, Any]:
    """Normalize to a list of lists and a list; a list and a tensor are accepted too."""
    return ((tuple(lists),), (tensors,)) if isinstance(tensors, Tensor) else (tuple(map(tuple, lists)), tuple(tensors))


def _each(operation: Callable[..., None], plane: Plane, how: Options, *lists: Tensors) -> None:
    """Run an operation on each tensor of a list, or each pair of two lists."""
    for tensors in zip(*lists, strict=True):
        operation(plane, *tensors, how)


def _each_alone(operation: Operation, plane: Plane, how: Options, *lists: Tensors) -> None:
    """Like `_each`, for operations that `collectives.on_any` runs."""
    for tensors in zip(*lists, strict=True):
        collectives.on_any(operation, plane, tensors, how)


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _on_gpu(opts: Any) -> bool:
    device = getattr(opts, "device", None)
    return bool(getattr(opts, "device_ids", None)) or (device is not None and device.type != "cpu")


versions.untraced(ProcessGroup, Identity, Work, Done, HostWork, StreamWork, StreamOperation)
