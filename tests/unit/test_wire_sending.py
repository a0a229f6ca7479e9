"""What a carrier sends of a ring: the slots in their order, several by one system call."""

import mmap
import socket
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest

from xvcomm.memory.ring import CONSUMED, LEDGER, LEDGER_ENTRY, PAGE, Reason, RingEnd, RingLayout
from xvcomm.types.opcode import OpCode
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.frames import FRAME, HEADER, MAX_DEVICES, Kind
from xvcomm.wire.wires import WireEnd

LAYOUT = RingLayout(lanes=1, slots=8, slot_bytes=PAGE, wired=True)
NAME, THEIRS = 77, 5
SLOTS = (5, 6)
"""Slots of two messages: the ring ends within the second one. The last slot of each is not full."""
SHORT = 96


class Sender:
    """A carrier with one ring to send from, and the other end of its connection, at which the test is the other process."""

    def __init__(self, kind, room=None):
        self._theirs, self._ours = socket.socketpair(socket.AF_UNIX, kind)
        self._ours.setblocking(False)
        self._theirs.settimeout(60)
        if room is not None:
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        memory = np.frombuffer(mmap.mmap(-1, LAYOUT.size), np.uint8)
        self._ring = memory
        self.carrier = Carrier(0, 1)
        self.end = RingEnd.create(
            SimpleNamespace(address=memory.ctypes.data, size=LAYOUT.size), LAYOUT, peer=1, producer=True
        )
        link = self.carrier.add_link()
        self._wire = WireEnd(link, NAME, 8, self.end, None, None)
        self.carrier.add_wire(self._wire)
        self.carrier.add_rail(link, 1, 1, self._ours)
        self._slots = 0
        shape = LAYOUT.lanes, LAYOUT.slots, LAYOUT.slot_bytes, 0, 8, *[0] * (3 + MAX_DEVICES)
        self.tell(Kind.OPEN, THEIRS, NAME, shape)

    def tell(self, kind, slot, number, words):
        """Send a frame to the carrier."""
        header = np.zeros((), FRAME)
        header["kind"], header["wire"] = kind, self._wire.record.number
        header["slot"], header["number"], header["length"] = slot, number, 8 * len(words)
        self._theirs.send(header.tobytes() + np.array(words, np.int64).tobytes())

    def post(self, message, data, straight):
        """Let a message be sent, all of whose slots are filled, from the ring or from where it is."""
        count = -(-len(data) // PAGE)
        for number in range(0 if straight else count):
            place = LAYOUT.data + (self._slots + number) % LAYOUT.slots * PAGE
            part = data[number * PAGE : (number + 1) * PAGE]
            self._ring[place : place + len(part)] = part
        self._slots += count
        if not straight:
            self._ring[LAYOUT.head(0) :][:8].view(np.int64)[0] = self._slots
        entry = self._ring[LAYOUT.ledger :][: LEDGER * LEDGER_ENTRY.itemsize].view(LEDGER_ENTRY)[message]
        entry["message"] = int(OpCode.SEND), 0, len(data), 0, 0
        entry["offer"] = data.ctypes.data if straight else 0
        entry["number"] = message + 1
        self.carrier.wake()

    def consumed(self):
        """How many messages the receiver has, as the sender knows."""
        return int(self._ring[CONSUMED:][:8].view(np.int64)[0])

    def take(self, count):
        """Receive so many slots: (message, number, payload) of each, and how many have come by each call."""
        rest, found, calls = b"", [], []
        while len(found) < count:
            got = self._theirs.recv(1 << 20)
            assert got
            rest += got
            calls.append(0)
            while len(rest) >= HEADER:
                header = np.frombuffer(rest[:HEADER], FRAME)[0]
                size = HEADER + int(header["length"])
                if len(rest) < size:
                    break
                if header["kind"] == Kind.SLOT:
                    assert header["wire"] == THEIRS
                    found.append((int(header["entry"]["number"]), int(header["slot"]), rest[HEADER:size]))
                    calls[-1] += 1
                rest = rest[size:]
        assert not rest
        return found, [slots for slots in calls if slots]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.carrier.detach(self._wire)
        self.carrier.close()
        self._theirs.close()
        self._ours.close()


def send(sender, straight):
    """Send the two messages, one after the other; whether each slot has come as it should, and the calls of each message."""
    calls, first = [], 0
    for message, slots in enumerate(SLOTS):
        data = np.random.default_rng(message).integers(0, 256, slots * PAGE - SHORT, np.uint8)
        sender.post(message, data, straight)
        found, taken = sender.take(slots)
        parts = [data[at : at + PAGE].tobytes() for at in range(0, len(data), PAGE)]
        assert found == [(message + 1, first + n, part) for n, part in enumerate(parts)]
        calls.append(taken)
        first += slots
        sender.tell(Kind.CREDIT, 0, message + 1, [first])
    return calls


@pytest.mark.parametrize("straight", [False, True])
def test_slots_that_lie_one_behind_the_other_go_by_one_call(straight):
    """Each packet of this socket is what one call has sent."""
    with Sender(socket.SOCK_SEQPACKET) as sender:
        assert send(sender, straight) == [[5], [3, 3]]


@pytest.mark.parametrize("straight", [False, True])
def test_a_socket_that_takes_a_part_gets_the_rest(straight):
    with Sender(socket.SOCK_STREAM, 2 * PAGE) as sender:
        send(sender, straight)


@pytest.mark.parametrize("heard", [False, True])
def test_a_receiver_that_leaves_once_it_has_a_message(heard):
    """The sender learns that its array was read before it learns that the receiver has left."""
    with Sender(socket.SOCK_STREAM) as sender:
        data = np.ones(5 * PAGE, np.uint8)
        sender.post(0, data, straight=True)
        sender.take(5)
        if heard:
            sender.tell(Kind.CREDIT, 0, 1, [5])
        sender.tell(Kind.STOP, 1, Reason.LEFT.word(1), [5])
        deadline = monotonic() + 60
        while not sender.end.abort_word():
            assert monotonic() < deadline
        assert sender.consumed() == 1
