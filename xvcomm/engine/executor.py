"""Carries out a schedule on a device: turns spans into addresses and steps into calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xvcomm.abc.collective import CollectiveForm, PreparedCollective
from xvcomm.abc.device import Allocation, Event, Queue, Stream
from xvcomm.abc.launch import EnqueuedCall, MessageForm, SupportsEnqueuedLocal, SupportsEnqueuedMessages
from xvcomm.abc.partial_sums import SupportsConversion, SupportsPartialSums
from xvcomm.abc.recording import INPUT, OUTPUT, SupportsRecording
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.log import Ends
from xvcomm.engine.launch import EnqueuedStep, Place
from xvcomm.engine.planner import Plan
from xvcomm.engine.request import CollectiveRequest
from xvcomm.engine.session.rings import SHORT_LAYOUT, Use
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.schedule.steps import (
    Buf,
    Collective,
    Copy,
    Exchange,
    Factor,
    Get,
    GetReduce,
    Lane,
    Native,
    Put,
    Reduce,
    Scale,
    Span,
    Step,
)
from xvcomm.trace.operation import Operation
from xvcomm.types.dtype import FLOAT32, DType, Reduction
from xvcomm.types.opcode import OpCode

_LANES = tuple(Lane)
_ALIGN = 64
_WORD = 16
"""Bytes that the movers of GPUs access at once: scratch memory and the output lie alike in them, as both may be reduced."""

_MOST_RECORDED = 64
"""Messages of a plan that compiled code may repeat: each takes 0.8 KB for as long as the communicator is open."""
SERIAL_BYTES = 16 << 20
"""Up to here a schedule may run on one stream: events between lanes would take longer than what they let overlap. On four H100
one stream took half the time of lanes at 8 MiB, the same at 24 MiB."""


class Executor:
    """Runs the schedules of one communicator, one at a time; keeps streams and scratch memory between runs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._device = context.device
        self._streams = dict(zip(_LANES, self._device.streams(len(_LANES)), strict=True))
        self._scratch: Allocation | None = None
        self._last: Event | None = None
        self._user: Stream | None = None
        self._captured: set[Allocation | None] = set()
        self._serial: dict[Queue, list[Allocation]] = {}

    def run(self, plan: Plan, call: CollectiveRequest, operation: Operation) -> None:
        """Run all steps and wait for them.

        Raises:
            RingStopped, RingStalled, CollectiveStopped, CollectiveStalled: for `Context.fail`.
        """
        narrow = -(-plan.schedule.scratch * call.dtype.itemsize // _ALIGN) * _ALIGN
        scratch = self._scratch_address(narrow + plan.schedule.wide * FLOAT32.itemsize)
        self._enqueue(plan, _Run(self._context, plan, self._streams, call, operation, scratch, scratch + narrow))
        for stream in self._streams.values():
            stream.synchronize()

    def launch(
        self, plan: Plan, call: CollectiveRequest, operation: Operation, user: Stream
    ) -> tuple[Event | None, Ends]:
        """Enqueue all steps behind what `user` holds, which goes on behind them.

        Returns:
            An event there, if one was needed, and the ring ends.

        Raises:
            CollectiveStopped, CollectiveStalled: the native library cannot be joined, or was stopped.
        """
        enqueue = self._enqueue_serially if self._fits(plan) else self._enqueue_on_lanes
        event, ends = enqueue(plan, call, operation, user)
        return event, [(end, sequence, operation) for end, sequence in ends.items()]

    def _enqueue_serially(
        self, plan: Plan, call: CollectiveRequest, operation: Operation, user: Stream
    ) -> tuple[None, dict[RingEnd, int]]:
        nbytes = plan.schedule.scratch * call.dtype.itemsize
        scratch = self.serial_scratch(nbytes, user.queue, call.addresses[1])
        run = _Run(self._context, plan, dict.fromkeys(_LANES, user), call, operation, scratch)
        user.deadline = call.deadline
        for steps in plan.runs:
            run.steps(steps, user)
        return None, run.ends

    def _enqueue_on_lanes(
        self, plan: Plan, call: CollectiveRequest, operation: Operation, user: Stream
    ) -> tuple[Event | None, dict[RingEnd, int]]:
        nbytes, captured = plan.schedule.scratch * call.dtype.itemsize, user.capturing()
        scratch = self._scratch_address(nbytes + _WORD) + call.addresses[1] % _WORD if nbytes else 0
        # A graph's events mean nothing outside it; replays are ordered by the stream that they are launched on.
        last = None if captured or self._user is user else self._last
        lanes = [stream for lane, stream in self._streams.items() if lane in plan.lanes]
        begin = user.record_event() if lanes else None
        for stream in lanes:
            stream.wait(begin)
            if last is not None:
                stream.wait(last)
        run = _Run(self._context, plan, self._streams, call, operation, scratch)
        self._enqueue(plan, run)
        for stream in lanes:
            user.wait(stream.record_event())
        if nbytes and captured:
            self._captured.add(self._scratch)  # the graph uses it as often as it runs
        elif nbytes:
            self._last, self._user = cast(Event, user.record_event()), user
            return self._last, run.ends
        return None, run.ends

    def serial_scratch(self, nbytes: int, queue: Queue, output: int) -> int:
        """Address of scratch memory that only collectives on one stream use, where one step runs after the other.

        What compiled code or a graph was given before stays theirs; memory at least doubles where it does not suffice.
        A graph captured from a stream that has none uses another stream's: whoever launches it orders it with all calls.
        """
        return self._serial_memory(nbytes + _WORD, queue).address + output % _WORD if nbytes else 0

    def _serial_memory(self, nbytes: int, queue: Queue) -> Allocation:
        kept = self._serial.get(queue, [])
        if kept and kept[-1].nbytes >= nbytes:
            return kept[-1]
        if self._device.adopt(queue[0]).capturing():  # when nothing can be allocated
            for newest in (memories[-1] for memories in self._serial.values()):
                if newest.nbytes >= nbytes:
                    return newest
        self._serial.setdefault(queue, kept).append(self._device.empty(max([nbytes, *(2 * m.nbytes for m in kept)])))
        return self._serial[queue][-1]

    def enqueued(self, plan: Plan, call: CollectiveRequest) -> list[EnqueuedStep] | None:
        """The steps of a plan that `launch` has run before, for compiled code; None if not all of them are for that.

        They use what `serial_scratch` gives.
        """
        if not self._fits(plan):
            return None
        runs = [steps for steps in plan.runs if not (call.src is call.dst and _moves_nothing(steps[0]))]
        run = _Run(self._context, plan, {}, call, call.described(0))
        found = [run.enqueued(steps) for steps in runs]
        complete = [step for step in found if step is not None]
        # Messages look at the stream before anything is enqueued, and so does a native call, but only for itself.
        looked = any(step.rings for step in complete) or [type(steps[0]) for steps in runs] == [Native]
        return complete if looked and len(complete) == len(found) else None

    def prepare(self, plan: Plan, call: CollectiveRequest) -> PreparedCollective | None:
        """A plan for compiled code that blocks; None if it consists of more than some messages, or the device cannot."""
        steps = [s for s in plan.schedule.steps if not (call.src is call.dst and _moves_nothing(s))]
        messages = all(isinstance(step, Put | Get | GetReduce) for step in steps)
        memory = plan.schedule.scratch or plan.schedule.wide
        if not isinstance(self._device, SupportsRecording) or not messages or memory or len(steps) > _MOST_RECORDED:
            return None
        recording = self._device.recording(len(_LANES))
        streams = dict(zip(_LANES, recording.streams, strict=True))
        arrays = INPUT, INPUT if call.src is call.dst else OUTPUT
        self._enqueue(plan, _Run(self._context, plan, streams, call, call.described(0), arrays=arrays))
        return recording.prepared()

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan may run one step after the other: no message may have to wait for the other end."""
        if plan.segment or plan.nbytes > SERIAL_BYTES:
            return False
        layout = SHORT_LAYOUT if plan.exchange is Exchange.RANKS else self._context.rings.gpu_collective_layout
        return plan.together or plan.nbytes <= layout.at_once(plan.messages)

    def _enqueue(self, plan: Plan, run: _Run) -> None:
        """Put all steps on their lanes."""
        steps = plan.schedule.steps
        for stream in run.streams.values():
            stream.deadline = run.deadline
        awaited = {earlier for step in steps for earlier in step.after}
        events: dict[int, object] = {}
        for index, step in enumerate(steps):
            stream = run.streams[step.lane]
            for earlier in step.after:
                stream.wait(events[earlier])
            run.step(step)
            if index in awaited:
                events[index] = stream.record_event()

    def _scratch_address(self, nbytes: int) -> int:
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = self._device.empty(nbytes)
        return self._scratch.address


def _moves_nothing(step: Step) -> bool:
    """Whether a step copies to where it copies from, if input and output are the same array."""
    return isinstance(step, Copy) and Buf.TMP not in (step.src.buf, step.dst.buf) and step.src.start == step.dst.start


class _Run:
    """One run of one plan.

    Args (of the constructor):
        scratch, wide: addresses of memory for `Buf.TMP` and `Buf.WIDE`.
        arrays: addresses of input and output; those of `call` if left out.

    Attributes:
        streams: of each lane.
        deadline: of the call.
        ends: the ring ends that its messages use, and their sequence numbers behind them.
    """

    def __init__(
        self, context: Context, plan: Plan, streams: dict[Lane, Stream], call: CollectiveRequest, operation: Operation,
        scratch: int = 0, wide: int = 0, arrays: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._use = Use.SHORT if plan.exchange is Exchange.RANKS else Use.COLLECTIVE
        self._context, self._device, self.streams = context, context.device, streams
        src, dst = arrays or call.addresses
        self._bases = {Buf.IN: src, Buf.OUT: dst, Buf.TMP: scratch, Buf.WIDE: wide}
        self._dtype, self._op, self.deadline, self._operation = call.dtype, call.how(), call.deadline, operation
        self.ends: dict[RingEnd, int] = {}

    def step(self, step: Step) -> None:
        """Enqueue one step on its lane."""
        stream = self.streams[step.lane]
        match step:
            case Put(peer=peer, src=src):
                self._device.put(self._end(peer, producer=True), self._at(src), self._message(src), stream)
            case Get(peer=peer, dst=dst):
                self._device.get(self._end(peer, producer=False), self._at(dst), self._message(dst), stream)
            case GetReduce(peer=peer, own=own, dst=dst, remote_first=first):
                end, op = self._end(peer, producer=False), self._op.base
                self._device.get(
                    end, self._at(dst), self._message(dst), stream, op, own=self._at(own), remote_first=first
                )
            case Copy(src=src, dst=dst):
                if (src.buf is Buf.WIDE) is not (dst.buf is Buf.WIDE):
                    self._convert(src, dst, 1.0, 0, stream)
                elif self._at(src) != self._at(dst):
                    self._device.copy(self._at(dst), self._at(src), self._nbytes(src), stream)
            case Reduce(srcs=srcs, dst=dst, average=average):
                addresses, dtype, divisor = [self._at(s) for s in srcs], self._of(dst), self._divisor(average=average)
                self._device.reduce(self._at(dst), addresses, dst.count, dtype, self._op.base, stream, divisor=divisor)
            case Scale(src=src, dst=dst, factor=factor):
                divisor = self._divisor(average=factor is Factor.AVERAGE)
                if (src.buf is Buf.WIDE) is not (dst.buf is Buf.WIDE):
                    self._convert(src, dst, self._op.factor, divisor, stream)
                else:
                    places = self._at(dst), self._at(src)
                    self._device.scale(*places, src.count, self._of(src), self._op.factor, divisor, stream)
            case Native():
                self._native(step, stream)

    def steps(self, steps: Sequence[Step], stream: Stream) -> None:
        """Enqueue a run of steps, see `Plan.runs`, on one stream."""
        if len(steps) > 1:
            stream.together()
        for step in steps:
            self.step(step)
        if len(steps) > 1:
            stream.record_event()

    def enqueued(self, steps: Sequence[Step]) -> EnqueuedStep | None:
        """The same for compiled code, which has the addresses; None if it is not for that."""
        match steps[0]:
            case Put() | Get() | GetReduce():
                return self._enqueued_messages(steps)
            case Native(src=src, dst=dst) as native:
                found = self._context.native(self.deadline).enqueued(self._native_form(native))
                return self._enqueued_call(found, src, dst)
            case step:
                return (
                    self._enqueued_local(step, self._device)
                    if isinstance(self._device, SupportsEnqueuedLocal)
                    else None
                )

    def _enqueued_local(self, step: Step, device: SupportsEnqueuedLocal) -> EnqueuedStep | None:
        match step:
            case Copy(src=src, dst=dst):
                return self._enqueued_call(device.enqueued_copy(src.count * self._dtype.itemsize), src, dst)
            case Scale(src=src, dst=dst, factor=factor):
                divisor = self._divisor(average=factor is Factor.AVERAGE)
                return self._enqueued_call(
                    device.enqueued_scale(src.count, self._dtype, self._op.factor, divisor), src, dst
                )
            case Reduce(srcs=srcs, dst=dst, average=average):
                divisor, base = self._divisor(average=average), self._op.base
                return self._enqueued_call(
                    device.enqueued_reduce(len(srcs), dst.count, self._dtype, base, divisor), *srcs, dst
                )
        return None

    def _convert(self, src: Span, dst: Span, factor: float, divisor: int, stream: Stream) -> None:
        places, widens, device = (self._at(dst), self._at(src)), dst.buf is Buf.WIDE, self._device
        assert isinstance(device, SupportsConversion), "only plans for host memory keep partial sums in float32"
        device.convert(*places, src.count, self._dtype, factor, divisor, stream, widens=widens)

    def _divisor(self, *, average: bool) -> int:
        return self._context.topology.size if average else 0

    def _enqueued_call(self, call: EnqueuedCall | None, *spans: Span) -> EnqueuedStep | None:
        return EnqueuedStep(call, [self._place(span) for span in spans]) if call is not None else None

    def _enqueued_messages(self, steps: Sequence[Step]) -> EnqueuedStep | None:
        device, forms, places = self._device, [], []
        if not isinstance(device, SupportsEnqueuedMessages):
            return None
        for step in steps:
            match step:
                case Put(peer=peer, src=span):
                    forms.append(self._form(peer, span, producer=True))
                    own = span
                case Get(peer=peer, dst=span):
                    forms.append(self._form(peer, span, producer=False))
                    own = span
                case GetReduce(peer=peer, own=own, dst=span, remote_first=first):
                    forms.append(self._form(peer, span, producer=False)._replace(op=self._op.base, remote_first=first))
                case _:
                    return None
            places += [self._place(span), self._place(own)]
        found = device.enqueued_messages(forms)
        return EnqueuedStep(found, places, [form.end for form in forms]) if found is not None else None

    def _form(self, peer: int, span: Span, *, producer: bool) -> MessageForm:
        return MessageForm(self._end(peer, producer=producer), self._message(span)._replace(tag=0))

    def _place(self, span: Span) -> Place:
        return Place(span.buf, span.start * self._dtype.itemsize)

    def _end(self, peer: int, *, producer: bool) -> RingEnd:
        """The ring end for the next message to or from a peer."""
        end = self._context.rings.end(peer, self._use, self.deadline, producer=producer)
        self.ends[end] = end.sequence + 1
        return end

    def _at(self, span: Span) -> int:
        return self._bases[span.buf] + span.start * self._of(span).itemsize

    def _of(self, span: Span) -> DType:
        return FLOAT32 if span.buf is Buf.WIDE else self._dtype

    def _nbytes(self, span: Span) -> int:
        return span.count * self._of(span).itemsize

    def _message(self, span: Span) -> Message:
        m, dtype = self._operation.message, FLOAT32.code if span.buf is Buf.WIDE else self._operation.message.dtype
        return Message(m.op, dtype, self._nbytes(span), self._operation.sequence, m.detail)

    def _native(self, step: Native, stream: Stream) -> None:
        native, form = self._context.native(self.deadline, self._operation.sequence), self._native_form(step)
        src, dst = self._at(step.src), self._at(step.dst)
        if step.op is Collective.REDUCE_SCATTER and self._of(step.dst) is not form.dtype:
            assert isinstance(native, SupportsPartialSums), "only plans for host memory keep partial sums in float32"
            native.partial_sums(src, dst, step.counts, form.dtype, form.reduction, stream)
        else:
            native.run(form, src, dst, stream)

    def _native_form(self, step: Native) -> CollectiveForm:
        """A step for the native library. Scaling is steps of its own: to the library an average is a sum."""
        counts = step.counts or (max(step.src.count, step.dst.count),)
        op, dtype = OpCode[step.op.name], self._of(step.src)
        return CollectiveForm(op, counts, step.recv_counts, dtype, Reduction(self._op.base), step.root)
