"""Operations as ranges in the profilers of GPUs' vendors: `xvcomm:all_reduce 4096 x float32` while the host enqueues one.

The kernels that a call enqueues belong to its range there. Without `XVCOMM_RANGES` none of this is made, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xvcomm.abc.ranges import Ranges, SupportsRanges
from xvcomm.engine.collectives import Collectives, HostCollectives
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.messages import HostMessages, Messages
from xvcomm.engine.request import CollectiveRequest, Key, MessageRequest
from xvcomm.engine.stream_collectives import StreamCollectives
from xvcomm.engine.stream_messages import StreamMessages
from xvcomm.memory.array_view import ArrayView
from xvcomm.types.opcode import OpCode


def runners(context: Context) -> tuple[Collectives, Messages]:
    """What runs a communicator's collectives, and moves its messages; with ranges, if they are wanted and the device has any.

    Raises:
        BackendUnavailable: the vendor's library for ranges is missing.
    """
    device = context.device
    if not context.asynchronous:
        return HostCollectives(context), HostMessages(context)
    ranges = device.ranges() if context.session.config.ranges and isinstance(device, SupportsRanges) else None
    if ranges is None:
        return StreamCollectives(context), StreamMessages(context)
    return RangedCollectives(context, ranges), RangedMessages(context, ranges)


class _Range:
    """A range with a text."""

    def __init__(self, ranges: Ranges, text: str) -> None:
        self._ranges, self._text = ranges, text

    def __enter__(self) -> None:
        self._ranges.push(self._text)

    def __exit__(self, *exc: object) -> None:
        self._ranges.pop()


def _collective(op: OpCode, view: ArrayView | None) -> str:
    what = f" {view.count} x {view.dtype}" if view is not None and op is not OpCode.BARRIER else ""
    return f"xvcomm:{op}{what}"


def _messages(transfers: Sequence[MessageRequest]) -> str:
    if len(transfers) > 1:
        return f"xvcomm:{len(transfers)} messages, {sum(t.view.nbytes for t in transfers)} bytes"
    (t,) = transfers
    way = "to" if t.name is OpCode.SEND else "from"
    return f"xvcomm:{t.name} {t.view.count} x {t.view.dtype} {way} rank {t.peer}"


class RangedCollectives(StreamCollectives):
    """Each call is a range."""

    def __init__(self, context: Context, ranges: Ranges) -> None:
        super().__init__(context)
        self._ranges = ranges

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        if self._find(key) is None:
            return False
        with _Range(self._ranges, _collective(key[0], src)):
            return super().again(key, src, dst, timeout, stream)

    def run(self, call: CollectiveRequest) -> Any:
        with _Range(self._ranges, _collective(call.op, call.view)):
            return super().run(call)

    def start(self, call: CollectiveRequest) -> Work:
        with _Range(self._ranges, _collective(call.op, call.view)):
            return super().start(call)


class RangedMessages(StreamMessages):
    """Each call is a range, with one message or several; those that wait for their turn are enqueued outside of it."""

    def __init__(self, context: Context, ranges: Ranges) -> None:
        super().__init__(context)
        self._ranges = ranges

    def run_alone(self, t: MessageRequest) -> None:
        with _Range(self._ranges, _messages([t])):
            super().run_alone(t)

    def run(self, transfers: Sequence[MessageRequest]) -> None:
        if len(transfers) == 1:
            self.run_alone(transfers[0])
            return
        with _Range(self._ranges, _messages(transfers)):
            super().run(transfers)

    def start(self, transfers: Sequence[MessageRequest]) -> None:
        with _Range(self._ranges, _messages(transfers)):
            super().start(transfers)
