"""NCCL and RCCL as native libraries: one implementation over `vendor.Library`.

The communicators are blocking, because non-blocking ones start a thread for each call. Only joining, and the first contact with
a peer, can block for long. So joining happens on a thread that can be abandoned; and `error`, which the watchdog calls ten
times per second, breaks off a call whose deadline has passed.

A communicator is freed once, by the thread that takes its handle under the lock. Calls use it without the lock: each announces
that it is inside the library before it reads the abort word, and `abort` sets the abort word before it checks for such calls.
It waits a moment for a call to return, and then aborts the library concurrently, which makes a blocked call return.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from xvcomm.abc.collective import Collective, CollectiveForm, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Allocation, Device, Stream
from xvcomm.abc.launch import EnqueuedCall
from xvcomm.abc.store import Store
from xvcomm.backends.ccl.calls import ENQUEUE, State, prepared
from xvcomm.backends.ccl.joining import Member, join, meet
from xvcomm.backends.ccl.routes import Calls, LibraryCall, Native, Part, Route, Scale, cut, parts, route
from xvcomm.backends.gpu.vendor import IN_PROGRESS, SUCCESS, Library, Runtime, VendorError
from xvcomm.config import Config
from xvcomm.errors import Aborted, BackendUnavailable
from xvcomm.memory.ring import Reason
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import DTYPES, DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

_STAGE_BYTES = 32 << 20
"""Scratch memory for reductions that the library does not support; longer arrays are processed in pieces."""

_ALIGN = 64
_REMOTE_ERROR = 6
_PREMULS_KEPT = 64
_GRACE_SECONDS = 1.0
"""Time for a call to return before its communicator is freed: a kernel launched later would read freed memory. If the call
waited for a message that has been stopped, CUDA still loads the kernel, which takes 0.15 s.
"""

_TOLD_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_PAUSE_SECONDS = 0.001
_REDUCTIONS = (OpCode.ALL_REDUCE, OpCode.BARRIER, OpCode.REDUCE, OpCode.REDUCE_SCATTER)


class CclCollective(Collective):
    """One member's NCCL or RCCL communicator of an island. One call at a time.

    Attributes:
        failure: text of an asynchronous error of the library; `error` then blames this member.
    """

    eager = True

    def __init__(
        self, config: Config, me: int, members: int, name: str, store: Store, deadline: Deadline,
        library: Library, runtime: Runtime, device: Device, gpu: str,
    ) -> None:  # fmt: skip
        """Join; blocks until all members have called this.

        Args:
            gpu: identifies this member's GPU on its host, independently of its index: its PCI bus id.

        Raises:
            BackendUnavailable: the members have different libraries, two members use the same GPU, or the library failed.
            CollectiveStalled, DeadlineExceeded: not all members came in time.
        """
        self._me, self._members = me, members
        self._library, self._runtime, self._device = library, runtime, device
        self._index = device.capabilities().index
        self._lock = threading.RLock()  # reentrant, because a signal handler may close at any point
        self._stalled, self.failure = False, ""
        self._state = State()
        self._freeing: Daemon | None = None
        self._premuls: dict[tuple[float, int], int] = {}
        self._share_bytes = max(_ALIGN, _STAGE_BYTES // members // _ALIGN * _ALIGN)
        self._scratch: Allocation | None = None
        self._used: object = None

        def start() -> int:
            runtime.use(self._index)
            return library.join(verdict.unique_id, members, me)

        try:
            verdict = meet(Member.of(config, me, library, gpu), me, members, name, store, deadline, library)
            self._prepare(verdict.dtypes)
            self._comm = join(start, library.abort, f"{name}/joined/{me}", store, deadline)
        except VendorError as error:
            raise BackendUnavailable(f"{error}; {library.debug_hint}") from error

    def _prepare(self, reducible: Collection[str]) -> None:
        """Look up once what reductions need: the library's dtype and op, elements per element, whether a division remains."""
        numbers, ops = self._library.dtypes(), self._library.ops()
        self._numbers, self._calls = numbers, Calls(self._me, self._members, numbers["uint8"])
        self._routes: dict[int, Route] = {}
        self._native: dict[int, Native] = {}
        for dtype in DTYPES:
            for op in ReduceOp:
                how = self._routes[dtype.code << 4 | op] = route(dtype, op, reducible)
                if how.native is not None and how.op is not ReduceOp.PREMUL_SUM:
                    found = Native(numbers[how.native.name], ops[how.op], how.width, how.scale is Scale.AFTER)
                    self._native[dtype.code << 4 | op] = found

    def run(self, form: CollectiveForm, src: int, dst: int, stream: Stream) -> None:
        op, counts, _, dtype, reduction, root = form
        native = None
        if op in _REDUCTIONS:
            native = self._native.get(dtype.code << 4 | reduction.op) or self._premultiplied(dtype, reduction)
            if native is None:
                self._reduce_apart(form, src, dst, stream)
                return
        self._run(self._calls_of(form, native), src, dst, stream)
        if native is not None and native.divide:
            count = counts[self._me if op is OpCode.REDUCE_SCATTER else 0]
            if count and (op is not OpCode.REDUCE or root == self._me):
                self._device.scale(dst, dst, count, dtype, 1.0, self._members, stream)

    def enqueued(self, form: CollectiveForm) -> EnqueuedCall | None:
        native = self._native.get(form.dtype.code << 4 | form.reduction.op)
        if form.op in _REDUCTIONS and (native is None or native.divide):
            return None
        calls = self._calls_of(form, native)
        if not calls or not self._comm:
            return None
        ask = self._runtime.addresses().capturing
        argument, keep = prepared(ctypes.addressof(self._state), ask, calls, self._library.address, self._comm)
        return EnqueuedCall(ENQUEUE, argument, keep, self._fail)

    def _calls_of(self, form: CollectiveForm, native: Native | None) -> list[LibraryCall]:
        """The library's calls for an operation; `native` is None exactly if it reduces nothing."""
        op, counts, recv_counts, dtype, _, root = form
        size = dtype.itemsize
        match op:
            case OpCode.ALL_GATHER:
                return self._calls.all_gather(counts, size)
            case OpCode.BROADCAST:
                return self._calls.broadcast(counts[0] * size, root)
            case OpCode.GATHER:
                return self._calls.gather(counts, size, root)
            case OpCode.SCATTER:
                return self._calls.scatter(counts, size, root)
            case OpCode.ALL_TO_ALL:
                return self._calls.all_to_all(counts, recv_counts, size)
        assert native is not None
        match op:
            case OpCode.REDUCE:
                return self._calls.reduce(counts[0], native, root)
            case OpCode.REDUCE_SCATTER:
                return self._calls.reduce_scatter(counts, size, native)
            case _:
                return self._calls.all_reduce(counts[0], native)

    def abort(self, word: int, delay: float = 0.0) -> None:
        """See `Collective.abort`; if a member merely left, operations in progress continue, but no new ones start."""
        with self._lock:
            if not self._state.abort or (Reason.bad(word) and not Reason.bad(self._state.abort)):
                self._state.abort = word
        if Reason.bad(word):
            self._free(self._library.abort, delay)

    def error(self) -> int:
        """See `Collective.error`; also breaks off a call that is inside the library past its deadline."""
        inside = self._state.inside
        if inside and time.monotonic() >= inside and not Reason.bad(self._state.abort):
            self._stalled = True
            self.abort(Reason.DEADLINE.word(self._me))
        with self._lock:
            state = self._library.state(self._comm) if self._comm else SUCCESS
            if state not in (SUCCESS, IN_PROGRESS) and not Reason.bad(self._state.abort):
                self.failure = self._explain(state)
                self._state.abort = Reason.ABORTED.word(self._me)
        word: int = self._state.abort
        return word

    def close(self) -> None:
        """See `Collective.close`; members that close at different times wait for each other in the background."""
        with self._lock:
            self._state.abort = self._state.abort or Reason.LEFT.word(self._me)
        self._free(self._library.destroy)
        if self._freeing is not None:
            self._freeing.join(_CLOSE_SECONDS)
        self._scratch = None

    def _free(self, how: Callable[[int], None], delay: float = 0.0) -> None:
        """Free the communicator in a thread, once: it may take long, and the watchdog must not block."""

        def work() -> None:
            time.sleep(delay)
            late = Deadline.after(_GRACE_SECONDS)
            while self._state.inside and not late.expired():
                time.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(VendorError):  # an error here has no remedy
                self._runtime.use(self._index)
                how(comm)

        with self._lock:
            comm, self._comm = self._comm, 0
            if comm:
                self._freeing = Daemon("xvcomm-free", work)
                self._freeing.start()

    def _run(self, calls: Sequence[LibraryCall], src: int, dst: int, stream: Stream) -> None:
        """Enqueue calls of the library, several as one group."""
        if not calls:
            return
        library = self._library
        made = [(getattr(library, call.name), call.arguments((src, dst))) for call in calls]
        self._state.inside = stream.deadline.at
        try:
            if self._state.abort:
                raise CollectiveStopped(self._state.abort)
            comm, handle, together = self._comm, stream.handle, len(made) > 1
            code = library.group_start() if together else 0
            try:
                for function, arguments in made:
                    code = code or function(*arguments, comm, handle)
            finally:
                code = (library.group_end() if together else 0) or code
        finally:
            self._state.inside = 0.0
        if code:
            self._fail(code)

    def _fail(self, code: int) -> NoReturn:
        """Raise the reason why a call failed."""
        if code == _REMOTE_ERROR:  # a peer has failed, and the watchdog is about to name it
            told = Deadline.after(_TOLD_SECONDS)
            while not self._state.abort and not told.expired():
                time.sleep(_PAUSE_SECONDS)
        if self._stalled:
            raise CollectiveStalled(())
        if self._state.abort:
            raise CollectiveStopped(self._state.abort)
        with self._lock:
            raise Aborted(f"{self._explain(code)}; {self._library.debug_hint}")

    def _explain(self, code: int) -> str:
        return f"{self._library.name} failed: {self._library.explain(code, self._comm)}"

    def _premultiplied(self, dtype: DType, op: Reduction) -> Native | None:
        """The library's op for a sum with a factor; None if the library does not support it."""
        how = self._routes[dtype.code << 4 | op.op]
        if how.native is None:
            return None
        number = self._numbers[how.native.name]
        with self._lock:
            if self._state.abort:
                raise CollectiveStopped(self._state.abort)
            code = self._premuls.get((op.factor, number))
            if code is None:
                if len(self._premuls) >= _PREMULS_KEPT:
                    self._library.free_op(self._premuls.pop(next(iter(self._premuls))), self._comm)
                code = self._premuls[op.factor, number] = self._library.premul_sum(op.factor, number, self._comm)
        return Native(number, code, how.width, divide=False)

    @contextlib.contextmanager
    def _room(self, stream: Stream) -> Iterator[int]:
        """Scratch memory, ordered after its last use: one share per member, and as much again for scaled input."""
        if self._scratch is None:
            self._scratch = self._device.empty(2 * self._members * self._share_bytes)
        captured = stream.capturing()
        if self._used is not None and not captured:
            stream.wait(self._used)
        yield self._scratch.address
        if not captured:  # events of a captured graph cannot be waited for outside of it
            self._used = stream.record_event()

    def _reduce_apart(self, form: CollectiveForm, src: int, dst: int, stream: Stream) -> None:
        """A reduction that the library does not support, by pieces that fit the scratch memory."""
        op, counts, _, dtype, reduction, _ = form
        if op is OpCode.REDUCE_SCATTER:
            self._reduce_blocks(parts(src, counts, dtype.itemsize), dst, dtype, reduction, stream)
        elif counts[0]:
            collect = OpCode.GATHER if op is OpCode.REDUCE else OpCode.ALL_GATHER
            most = self._share_bytes // dtype.itemsize * self._members
            with self._room(stream) as room:
                share = room + self._me * self._share_bytes
                for start in range(0, counts[0], most):
                    piece = cut(min(most, counts[0] - start), self._members, dtype.itemsize)
                    offset = start * dtype.itemsize
                    mine = parts(src + offset, piece, dtype.itemsize)
                    self._reduce_parts(mine, share, room, dtype, reduction, stream)
                    self.run(form._replace(op=collect, counts=tuple(piece)), share, dst + offset, stream)

    def _reduce_blocks(self, blocks: list[Part], dst: int, dtype: DType, op: Reduction, stream: Stream) -> None:
        """Reduce-scatter for reductions that the library does not support."""
        most = self._share_bytes
        with self._room(stream) as room:
            for start in range(0, max(nbytes for _, nbytes in blocks), most):
                piece = [(address + start, max(0, min(most, nbytes - start))) for address, nbytes in blocks]
                self._reduce_parts(piece, dst + start, room, dtype, op, stream)

    def _reduce_parts(
        self, mine: list[Part], into: int, room: int, dtype: DType, op: Reduction, stream: Stream
    ) -> None:
        """Send each member its parts of all arrays, which it reduces in the order of members with one rounding."""
        how, share = self._routes[dtype.code << 4 | op.op], self._share_bytes
        if how.scale is Scale.BEFORE:
            scaled = [(room + (self._members + i) * share, nbytes) for i, (_, nbytes) in enumerate(mine)]
            for (src, nbytes), (dst, _) in zip(mine, scaled, strict=True):
                if nbytes:
                    self._device.scale(dst, src, nbytes // dtype.itemsize, dtype, op.factor, 0, stream)
            mine = scaled
        nbytes = mine[self._me][1]
        theirs = [(room + member * share, nbytes) for member in range(self._members)]
        theirs[self._me] = mine[self._me]
        self._run(self._calls.exchange(mine, theirs), 0, 0, stream)
        if nbytes:
            count = nbytes // dtype.itemsize
            divisor = self._members if how.scale is Scale.AFTER else 0
            self._device.reduce(into, [address for address, _ in theirs], count, dtype, how.op, stream, divisor=divisor)
