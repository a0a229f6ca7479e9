"""Accepts the connections of other hosts, and refuses those that do not prove the job's key."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from xvcomm.errors import AuthenticationError, ResourceError
from xvcomm.system.notice import notice
from xvcomm.system.strangers import Strangers
from xvcomm.wire import handshake, pair_trials
from xvcomm.wire.connections import ends, hang_up
from xvcomm.wire.links import Link, Process

_PAUSE_SECONDS = 0.2
"""Pause after the system has refused a connection, and limit of the wait for the listeners to stop."""
_SAY_SECONDS = 60.0
"""Least time between two warnings of refused connections."""


class Acceptor:
    """Accepts the connections to this process, in the network's event loop.

    Attributes:
        listeners: bound sockets.
        refused: connections that were closed because they did not prove the key, or broke the protocol.
    """

    def __init__(
        self, process: Process, size: int, listeners: Sequence[socket.socket], link: Callable[[int], Link],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:  # fmt: skip
        """Prepare to accept.

        Args:
            process: to which they connect.
            size: of the whole job.
            listeners: are closed by `close`.
            link: the link to a rank, made if there is none.
            spawn: starts a task of the network.
        """
        self.listeners, self.refused = listeners, 0
        self._process, self._size, self._link, self._spawn = process, size, link, spawn
        self._strangers: Strangers[socket.socket] = Strangers(self._crowd_out)
        self._accepting: list[asyncio.Task[None]] = []
        self._stopping, self._silent_until = False, 0.0

    def start(self) -> None:
        """Begin to accept."""
        for listener in self.listeners:
            listener.setblocking(False)
        self._accepting = [self._spawn(self._accept(listener)) for listener in self.listeners]

    async def stop(self) -> None:
        """Accept no more. Connections whose handshake has begun go on."""
        self._stopping = True
        # asyncio loses a connection that it accepts while it cancels, and the other end would wait for it.
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
        await asyncio.wait(self._accepting, timeout=_PAUSE_SECONDS)

    def close(self) -> None:
        """Close the listeners, after all tasks have ended."""
        for listener in self.listeners:
            listener.close()

    def refuse(self, why: str) -> None:
        """Count a connection that was closed because it broke the protocol, and warn."""
        self.refused += 1
        self._say(why)

    async def _accept(self, listener: socket.socket) -> None:
        while not self._stopping:
            await self._strangers.room()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # shut down, or out of descriptors for the moment
                await asyncio.sleep(0 if self._stopping else _PAUSE_SECONDS)
                continue
            self._strangers.enter(connection)
            self._spawn(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Verify that the other end knows the job's key, and make the connection a rail."""
        proven, used = None, False
        try:
            connection.setblocking(False)
            async with asyncio.timeout(handshake.SECONDS):
                proven = await handshake.accept(connection, self._process.key, self._process.rank, self._size)
                used = await self._admit(connection, proven)
        except (AuthenticationError, handshake.Malformed) as error:
            self.refuse(str(error) or "a connection was refused that does not speak this protocol")
        except TimeoutError:
            if proven is None:
                self.refuse("a connection was closed that did not prove the job's key in time")
        except OSError:
            self.refused += proven is None
        finally:
            self._strangers.leave(connection)
            if not used:
                connection.close()

    async def _admit(self, connection: socket.socket, proven: handshake.Proven) -> bool:
        """Answer a rank of the job; whether its connection has become a rail."""
        if proven.number == handshake.PROBE:
            await handshake.admit(connection, proven.proof, "it was a probe")
            return False
        if proven.number == handshake.PROBE_RDMA:
            await handshake.admit(connection, proven.proof)
            await pair_trials.answer(self._process.cards, connection, proven.gids)
            return False
        link, both = self._link(proven.rank), ends(connection, proven.number, proven.gids)
        refusal = link.objection(both)
        await handshake.admit(connection, proven.proof, refusal)
        if refusal:
            return False
        try:
            await link.use(connection, both, proven.key, accepting=True)
        except ResourceError as error:
            link.pairs.say(both, str(error))
            return False
        return True

    def _crowd_out(self, connection: socket.socket) -> None:
        self._say("connections were closed that had not proved the job's key, because there were too many of them")
        hang_up(connection)

    def _say(self, why: str) -> None:
        """Warn, unless there was a warning within `_SAY_SECONDS`."""
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _SAY_SECONDS
            notice(f"{why} (said once a minute; Communicator.refused() counts them)")
