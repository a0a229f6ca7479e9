"""Limits the blocks of movers on a device's streams: if many wait for peers, all of them must be able to run."""

from __future__ import annotations

import ctypes
import threading

from xvcomm.backends.gpu.kernels import MOST_BLOCKS
from xvcomm.backends.gpu.ring_ports import Port

AT_ONCE = 128
"""Blocks of movers that all streams together may have before launches are limited; beyond, each gets half of the rest."""


class Room:
    """The blocks that launches of movers occupy on a device. Thread-safe.

    Attributes:
        version: changes with the result of `left`.
    """

    def __init__(self) -> None:
        self.version = ctypes.c_int64()
        self._blocks: dict[int, tuple[set[Port], int]] = {}
        self._taken = 0
        self._counting = threading.RLock()  # reentrant, because a signal handler may close at any point

    def left(self, stream: int) -> int:
        """Blocks that a launch on a stream may use; one of few numbers, for which launches are prepared."""
        others = self._others(stream)
        if others > AT_ONCE - MOST_BLOCKS:
            with self._counting:
                self._blocks = {
                    at: it for at, it in self._blocks.items() if at == stream or any(map(_under_way, list(it[0])))
                }
                self._taken = sum(blocks for _, blocks in self._blocks.values())
                self.version.value += 1
            others = self._others(stream)
        half = max(1, min(MOST_BLOCKS, (AT_ONCE - others) // 2))
        return 1 << half.bit_length() - 1

    def take(self, stream: int, port: Port, blocks: int) -> None:
        """Record the largest launch of a stream, and one of its ports: compiled code may launch as many blocks again."""
        with self._counting:
            ports, most = self._blocks.get(stream) or (set(), 0)
            if most < blocks:
                self._taken += blocks - most
                self._blocks[stream] = ports, blocks
                self.version.value += 1
            ports.add(port)

    def forget(self, port: Port) -> None:
        """No transfer of a port is in progress any more."""
        with self._counting:
            for ports, _ in self._blocks.values():
                ports.discard(port)

    def _others(self, stream: int) -> int:
        mine = self._blocks.get(stream)
        return self._taken - mine[1] if mine is not None else self._taken


def _under_way(port: Port) -> bool:
    """Whether a port's messages may still wait."""
    finished, goes_on = port.finished()
    return goes_on and finished < port.end.sequence
