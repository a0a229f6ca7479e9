"""Messages of registered arrays over the fake provider: what their tests have in common."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from fake_hosts import Hosts, carry, get, put, until

from xvcomm.memory.ring import DIRECT, RingLayout

LAYOUT = RingLayout(2, 4, 64 << 10, wired=True)
SHORT, LONG = 200_001, 1_300_003
"""A message that fits the ring, and one that does not."""
FREE = 0xEE
"""What owners of arrays write into them once they have them back."""


def make(stack, library, shared, **how):
    """Hosts whose rails are up, with both ends of a ring that has had one message."""
    hosts = Hosts(stack, library, shared, **how)
    ends = hosts.rings(layout=LAYOUT)
    hosts.meet()
    carry(hosts, ends, sizes=(10,))
    return hosts, *ends


def array(nbytes, seed=None):
    """Random bytes, or zeros."""
    return (
        np.zeros(nbytes, np.uint8) if seed is None else np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
    )


def slots(end):
    """The slots of an end's half."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * end.layout.capacity).from_address(end.address + end.layout.data))


def advertised(producer):
    """Number of the newest message, from 1 on, for which the consumer has advertised its array."""
    return ctypes.c_int64.from_address(producer.direct + DIRECT.fields["message"][1]).value


class Moving:
    """A call that another thread makes; `result` waits for it, and gives what it raised."""

    def __init__(self, call, *arguments):
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(call, *arguments))
        self._thread.start()

    def _run(self, call, *arguments):
        try:
            call(*arguments)
        except BaseException as error:
            self.error = error

    def ended(self, seconds):
        """Whether it ends within this time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self):
        """What it raised, or None, once it has ended."""
        assert self.ended(240)
        return self.error


def awaited(hosts, producer, consumer, received, number=1):
    """Let the receiver wait for a message with its array advertised."""
    moving = Moving(get, hosts.devices[1], consumer, received, number)
    until(lambda: advertised(producer) == number + 1)
    return moving


def transfer(hosts, producer, consumer, sent, received, number=1):
    """Send a message that its receiver awaits."""
    receiving = Moving(get, hosts.devices[1], consumer, received, number)
    until(lambda: consumer.described().keys() >= {number + 1})
    put(hosts.devices[0], producer, sent, number)
    assert receiving.result() is None
    np.testing.assert_array_equal(sent, received)


def pairs(hosts, index):
    """A host's queue pairs that are in use."""
    return [pair for pair in hosts.cards[index].pairs if not pair.closed]


def stall(hosts, index):
    """Let the devices of a host do nothing from now on; what lets them go on."""
    stalled = pairs(hosts, index)
    for pair in stalled:
        pair.hang()
    return lambda: [pair.answer() for pair in stalled]


def posted(hosts, index=0):
    """How many requests a host's queue pairs have had."""
    return sum(int(pair.fake.record.posted) for pair in pairs(hosts, index))


def failures(hosts):
    """What queue pairs have failed of."""
    return [why for cards in hosts.cards for pair in cards.pairs if (why := pair.failure())]
