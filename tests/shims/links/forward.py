"""Joins two network namespaces by a TUN device in each, and passes packets on: late, at a limited rate, or not at all.

    forward.py NAMESPACE DEVICE NAMESPACE DEVICE CONTROL SEED

It writes a line when the devices are there, and ends with its standard input; the devices end with it. CONTROL is the path of a
socket for datagrams of JSON, each with properties of a direction to change: `{"side": 0, "delay": 0.05}`. Needs root.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_NEW_NETWORK = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 1 << 16
_TURN = 64
"""Packets of a direction that are taken before the other one has its turn."""
_QUEUE_SECONDS = 0.05
"""How long packets wait for a limited rate; what would wait longer is dropped, as by a router."""


def device(namespace: str, name: str) -> int:
    """Make a TUN device in a network namespace, which this thread enters; its file descriptor."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {file.name}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


@dataclass
class Direction:
    """From one device to the other.

    Attributes:
        source, target: file descriptors.
        choice: draws the packets that are lost.
        loss: share of the packets that are lost; 1: the direction is dead.
        delay: seconds that a packet takes.
        rate: bytes that pass a second; None for as many as come.
    """

    source: int
    target: int
    choice: random.Random
    loss: float = 0.0
    delay: float = 0.0
    rate: float | None = None
    _free: float = 0.0  # when all packets taken so far have gone out at the rate
    _under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def change(self, loss: float | None = None, delay: float | None = None, rate: float | None = None) -> None:
        """Give some properties other values, for packets that come from now on; a rate of 0 means no limit."""
        self.loss = self.loss if loss is None else loss
        self.delay = self.delay if delay is None else delay
        self.rate = self.rate if rate is None else rate or None

    def take(self) -> None:
        """Take packets from the source."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_TURN):
                self._take(os.read(self.source, _PACKET_BYTES), time.monotonic())

    def _take(self, packet: bytes, now: float) -> None:
        if self.choice.random() < self.loss:
            return
        self._free = max(self._free, now)
        if self.rate is not None:
            if self._free - now > _QUEUE_SECONDS:
                return
            self._free += len(packet) / self.rate
        arrival = self._free + self.delay
        if self._under_way:
            arrival = max(arrival, self._under_way[-1][0])  # no packet overtakes another
        self._under_way.append((arrival, packet))

    def pass_on(self) -> float:
        """Give the target what has arrived by now; how many seconds until the next packet does."""
        now = time.monotonic()
        while self._under_way:
            if self._under_way[0][0] > now:
                return self._under_way[0][0] - now
            with contextlib.suppress(OSError):  # the device is down
                os.write(self.target, self._under_way.popleft()[1])
        return math.inf


def main(near: str, near_name: str, far: str, far_name: str, control: str, seed: str) -> None:
    """Pass packets on until standard input ends."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(control)
    ends = device(near, near_name), device(far, far_name)
    directions = [Direction(ends[n], ends[1 - n], random.Random(f"{seed} {n}")) for n in range(2)]
    print("ready", flush=True)
    while True:
        pause = min(direction.pass_on() for direction in directions)
        ready, _, _ = select.select([0, orders, *ends], [], [], None if math.isinf(pause) else pause)
        if 0 in ready:
            return
        if orders in ready:
            order = json.loads(orders.recv(1 << 12))
            directions[order.pop("side")].change(**order)
        for direction in directions:
            if direction.source in ready:
                direction.take()


if __name__ == "__main__":
    main(*sys.argv[1:])
