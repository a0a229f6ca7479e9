"""Point-to-point messages with tags, as in c10d.

Messages of one tag between two ranks match in order, those of different tags in any order (as with Gloo): each tag has its own
channel, up to the number of channels of a communicator. Beyond that, tags share channels, and must then match in order.
Messages of a rank to itself use no channel: see `ownmessages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from xvcomm.adapters.torch.errors import mapped
from xvcomm.adapters.torch.planes import Plane, StreamPlane
from xvcomm.adapters.torch.tensors import dense, room, settle
from xvcomm.adapters.torch.versions import waits
from xvcomm.adapters.torch.works import NOTHING_LEFT, Work
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.errors import ArgumentError


def send(plane: Plane, tensors: Sequence[Tensor], dst: int, tag: int) -> Work:
    """Send one tensor, which must not be modified until the Work is complete."""
    if dst == plane.comm.rank:
        return _own(plane, _single("send", tensors), tag, sends=True)
    x, channel = plane.view(dense(_single("send", tensors), plane.device)), tag % CHANNELS
    with mapped():
        if waits():
            plane.comm.send(x, dst, tag, channel=channel)
            return NOTHING_LEFT
        work = plane.comm.isend(x, dst, tag, channel=channel)
    return plane.message(work, tensors, f"send to rank {dst}", plane.comm.rank, None)


def receive(plane: Plane, tensors: Sequence[Tensor], src: int, tag: int) -> Work:
    """Receive one tensor from a rank."""
    x, channel = _single("recv", tensors), tag % CHANNELS
    if src == plane.comm.rank:
        return _own(plane, x, tag, sends=False)
    buffer = room(x, plane.device)
    with mapped():
        if waits():
            plane.comm.recv(plane.view(buffer), src, tag, channel=channel)
            settle(buffer, x)
            return NOTHING_LEFT
        work = plane.comm.irecv(plane.view(buffer), src, tag, channel=channel)
    then = None if buffer is x else partial(_bring_back, plane, buffer, x)
    return plane.message(work, tensors, f"recv from rank {src}", src, then)


def _own(plane: Plane, x: Tensor, tag: int, *, sends: bool) -> Work:
    """A message of this rank to itself."""
    blocks = waits(1)
    with mapped():
        return plane.own.post(plane, x, tag, sends=sends, waits=blocks)


def _bring_back(plane: Plane, buffer: Tensor, x: Tensor) -> None:
    """Run `settle` on the waiting stream, which may differ from the one that the buffer was allocated on."""
    settle(buffer, x)
    if isinstance(plane, StreamPlane):
        buffer.record_stream(plane.current())


def receive_from_any(plane: Plane, tensors: Sequence[Tensor], tag: int) -> Work:
    """Receive one tensor from the first rank that sends with this tag; the Work contains the source."""
    x = _single("recv", tensors)
    return plane.from_any(partial(_take, plane, x, tag), tensors, tag % CHANNELS)


def _take(plane: Plane, x: Tensor, tag: int) -> int:
    channel = tag % CHANNELS
    source = int(plane.comm.probe(channel=channel).src)
    buffer = room(x, plane.device)
    plane.comm.recv(plane.view(buffer), source, tag, channel=channel)
    settle(buffer, x)
    return source


def _single(what: str, tensors: Any) -> Tensor:
    if len(tensors) != 1:
        raise ArgumentError(f"{what} takes one tensor at a time, not {len(tensors)}")
    tensor: Tensor = tensors[0]
    return tensor
