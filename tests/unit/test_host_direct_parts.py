"""Protection of a member's arrays in direct reductions, with two members of one island in this process."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xvcomm.abc.collective import CollectiveForm, CollectiveStalled
from xvcomm.abc.device import Stream
from xvcomm.backends.host import direct
from xvcomm.backends.host.collective import HostCollective, Plan
from xvcomm.backends.host.device import HostDevice
from xvcomm.config import Config
from xvcomm.jit.atomics import PENDING, STOPPED
from xvcomm.memory.ring import Reason
from xvcomm.memory.segment import PAGE
from xvcomm.rendezvous.store.file import FileStore
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

FLOAT, SUM = BY_NAME["float32"], Reduction(ReduceOp.SUM)
COUNT = direct.LEAST // 4
ALL_REDUCE = CollectiveForm(OpCode.ALL_REDUCE, (COUNT,), (), FLOAT, SUM, 0)
SECONDS = 100.0
_NO_RIGHTS = 0


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[HostCollective]]:
    """Two members that can access each other's memory."""
    store = FileStore(str(tmp_path))
    made = [HostCollective(Config(), "parts", me, 2, "arena", store, Deadline.after(SECONDS)) for me in range(2)]
    together(made, [np.zeros(COUNT, np.float32) for _ in made])
    if any(m.access.reach != 1 for m in made):
        pytest.skip("the system does not let processes into each other's memory (seccomp)")
    yield made
    for member in made:
        member.close()


def stream(seconds: float = SECONDS) -> Stream:
    """A stream with a deadline."""
    made = HostDevice(Config()).streams(1)[0]
    made.deadline = Deadline.after(seconds)
    return made


def together(members: list[HostCollective], arrays: list[np.ndarray]) -> None:
    """An in-place all-reduce of both members."""

    def call(me: int) -> None:
        address = arrays[me].ctypes.data
        members[me].run(ALL_REDUCE, address, address, stream())

    threads = [threading.Thread(target=call, args=(me,)) for me in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)


def line(members: list[HostCollective], me: int) -> Any:
    """A member's words in the arena."""
    return members[0].member(me)


def plan(member: HostCollective) -> Plan:
    """The reduction that all tests use."""
    return member._plan_of(ALL_REDUCE, in_place=True)


def test_giving_up_waits_until_the_arrays_are_not_accessed(members: list[HostCollective]) -> None:
    mine, other = line(members, 0), line(members, 1)
    mine.src = 64
    other.touch.entered = 1
    leaving = threading.Thread(target=direct.withdraw, args=(plan(members[0]).address,))
    leaving.start()
    while mine.src != 0:
        assert leaving.is_alive()
    assert leaving.is_alive(), "left while the other member was still in its arrays"
    other.touch.entered = 0
    leaving.join(SECONDS)
    assert not leaving.is_alive()


def test_an_expired_deadline_takes_the_offer_back(members: list[HostCollective]) -> None:
    x = np.ones(COUNT, np.float32)
    with pytest.raises(CollectiveStalled) as stalled:
        members[0].run(ALL_REDUCE, x.ctypes.data, x.ctypes.data, stream(0.05))
    assert stalled.value.missing == (1,)
    assert line(members, 0).src == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_no_copy_starts_after_the_member_has_left(members: list[HostCollective], stopped: bool) -> None:
    """Member 0 leaves, or everything is stopped, between the barrier and the copies: then member 1 waits to be told why."""
    x, y = np.ones(COUNT, np.float32), np.ones(COUNT, np.float32)
    prepared = plan(members[1])
    for me, array in enumerate((x, y)):
        line(members, me).src = line(members, me).dst = array.ctypes.data
    prepared.record.step = direct.Step.DIRECT
    if stopped:
        members[0].abort(Reason.ABORTED.word(0))
    else:
        line(members, 0).src = 0
        assert prepared.kernel(prepared.address, y.ctypes.data, y.ctypes.data) == PENDING
        members[0].abort(Reason.PEER_LOST.word(0))
    assert prepared.kernel(prepared.address, y.ctypes.data, y.ctypes.data) == STOPPED
    assert (x == 1).all() and (y == 1).all()
    assert line(members, 1).touch.entered == 0


def test_memory_that_others_may_not_read_is_not_offered(members: list[HostCollective]) -> None:
    """As drivers map it; here pages without any right at an array's end."""
    pages = mmap.mmap(-1, direct.LEAST)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    prepared = plan(members[0])
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + direct.LEAST - PAGE), PAGE, _NO_RIGHTS) == 0
    assert prepared.kernel(prepared.address, address, address) == PENDING
    assert line(members, 0).src == 0


def test_ordinary_memory_is_offered(members: list[HostCollective]) -> None:
    x = np.ones(COUNT, np.float32)
    prepared = plan(members[0])
    assert prepared.kernel(prepared.address, x.ctypes.data, x.ctypes.data) == PENDING
    assert line(members, 0).src == x.ctypes.data


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000])
def test_room_for_a_piece_of_each_other_member(ranks: int) -> None:
    """Whole pages, and as much further as arrays may be out of step with them."""
    room = direct.room(ranks)
    assert room.ctypes.data % PAGE == 0 and direct.piece_bytes(ranks) % PAGE == 0
    assert room.size >= (ranks - 1) * (direct.piece_bytes(ranks) + PAGE - 1)
