"""The launchers of a job over several hosts: they agree on the ranks before these start, and end together."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.cli.ending import Outcome, Stop
from xvcomm.cli.launcher import FAILURE_GRACE
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, StoreError, XvcommError
from xvcomm.rendezvous.store import TcpServer, TcpStore, need_secret
from xvcomm.rendezvous.store.join import Noun, join_barrier, refuse
from xvcomm.rendezvous.store.server import CLOSE_GRACE
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline

_PORT = 29500
_POST_SECONDS, _SELF_SECONDS, _SILENT_SECONDS = 2.0, 5.0, 5.0
_SLACK_SECONDS = 5.0
"""For how much longer than its ranks may take to end a node is waited for."""
_NODE = Noun("node", "--node-rank", "--nnodes")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of this launcher among those of the job, as the user gave it.

    Attributes:
        node: number of this node, 0 to count - 1.
        count: number of nodes.
        host, port: where node 0 serves the job's store.
    """

    node: int
    count: int
    host: str
    port: int

    @classmethod
    def parse(cls, count: int, node: int | None, master: str | None) -> Place | None:
        """None for a job on one host.

        Raises:
            ArgumentError: an option is missing or wrong.
        """
        if count == 1 and not node and master is None:
            return None
        if node is None or master is None:
            missing = "--node-rank" if node is None else "--master"
            raise ArgumentError(
                f"--nnodes {count} needs {missing}: start the same command on each host with its own --node-rank, and with "
                "--master HOST:PORT, where HOST is that of node 0"
            )
        if node >= count:
            raise ArgumentError(f"--node-rank {node} does not fit --nnodes {count}; nodes are numbered from 0")
        try:
            url = urlsplit(f"//{master}")
            host, port = url.hostname, url.port or _PORT
        except ValueError:
            host, port = None, _PORT
        if not host or url.netloc != master:
            raise ArgumentError(f"--master {master}: expected HOST or HOST:PORT of node 0")
        return cls(node, count, host, port)


class Node(msgspec.Struct, frozen=True, array_like=True):
    """What a launcher tells the others when it joins.

    Attributes:
        hostname: of its host.
        ranks: number of its ranks.
        labels: of the islands of its ranks, or of all ranks of the job; or empty.
        port: of this host for torch.distributed; node 0's is used.
    """

    hostname: str
    ranks: int
    labels: tuple[str, ...]
    port: int


class _Stopping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    node: int
    stop: Stop


class _Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    node: int
    outcome: Outcome


class _Lost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    node: int


_Notice = _Stopping | _Ended | _Lost


class Nodes:
    """The job's launchers, once all have joined. See `launcher.Others` for what a `Job` asks of it.

    Attributes:
        first: rank of this node's first rank.
        size: number of ranks of the job.
        labels: an island label for each rank of this node, or an empty text.
        variables: what the job's ranks need to meet in turn.
        hostname: of this node.
        news: see `launcher.Others`.
    """

    def __init__(self, store: Store, place: Place, members: Sequence[Node], secret: str, grace: float) -> None:
        """Listen to the others; raises ArgumentError if their islands and numbers of ranks do not agree."""
        self._node, self._members, self._grace = place.node, members, grace
        counts = [member.ranks for member in members]
        self.first, self.size = sum(counts[: place.node]), sum(counts)
        self.labels = self._labels(members[place.node])
        self.variables = {
            "XVCOMM_STORE": f"tcp://{f'[{place.host}]' if ':' in place.host else place.host}:{place.port}?hosted=launcher",
            "XVCOMM_SECRET": secret,
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(members[0].port),
            "GROUP_RANK": str(place.node),
            "GROUP_WORLD_SIZE": str(place.count),
        }
        self.hostname = members[place.node].hostname
        self._inbox: queue.SimpleQueue[_Notice] = queue.SimpleQueue()
        self._stopping: list[int] = []
        self._outcomes: dict[int, Outcome] = {}
        self._until = math.inf
        self._over = False
        notices = store.notices("nodes", msgspec.msgpack.encode(_Lost(place.node)))
        assert notices is not None
        self._notices = notices
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = Daemon("xvcomm-nodes", self._listen)
        self._thread.start()

    def _labels(self, mine: Node) -> tuple[str, ...]:
        if not mine.labels:
            return ("",) * mine.ranks
        if len(mine.labels) == mine.ranks:
            return mine.labels
        if len(mine.labels) == self.size:
            return mine.labels[self.first : self.first + mine.ranks]
        raise ArgumentError(
            f"--islands has {len(mine.labels)} labels: expected one for each of the {mine.ranks} ranks of this node, or of the "
            f"{self.size} ranks of the job"
        )

    def _listen(self) -> None:
        while True:
            try:
                notice = msgspec.msgpack.decode(self._notices.next(), type=_Notice)
            except XvcommError:
                if self._over:
                    return
                notice = _Lost(0)
            self._inbox.put(notice)
            os.eventfd_write(self.news, 1)
            if notice == _Lost(0):
                return

    def hear(self) -> Iterator[Stop]:
        """See `launcher.Others`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)
        while not self._inbox.empty():
            notice = self._inbox.get()
            stop: Stop | None = None
            match notice:
                case _Stopping(node):
                    stop = notice.stop
                    self._stopping.append(node)
                case _Ended(node, outcome):
                    self._outcomes[node] = outcome
                case _Lost(node) if node not in self._outcomes:
                    stop = Stop(f"the launcher of node {node} on {self._members[node].hostname} was lost")
                    self._outcomes[node] = Outcome(1, reason=stop.reason)
                    self._stopping.append(node)
            if stop is not None:
                self._wait_no_longer()
                if notice.node != self._node:
                    yield stop

    def stop(self, stop: Stop) -> None:
        """See `launcher.Others`."""
        self._wait_no_longer()
        self._post(_Stopping(self._node, stop))

    def end(self, outcome: Outcome) -> None:
        """See `launcher.Others`."""
        self._outcomes[self._node] = outcome
        self._post(_Ended(self._node, outcome))

    def over(self) -> float:
        """See `launcher.Others`."""
        return -math.inf if len(self._outcomes) == len(self._members) else self._until

    def outcome(self) -> Outcome:
        """See `launcher.Others`."""
        known = self._outcomes
        interrupted = next((o for o in known.values() if o.signal is not None), None)
        if interrupted is not None:
            return interrupted
        order = [*dict.fromkeys(self._stopping), *sorted(known)]
        failed = [known[node] for node in order if node in known and known[node].code]
        late = [m.hostname for node, m in enumerate(self._members) if node not in known]
        failed += [Outcome(1, reason=f"the node {name} did not end in time") for name in late]
        return next((o for o in failed if not o.consequence), failed[0] if failed else Outcome(0))

    def _wait_no_longer(self) -> None:
        """From now on, wait for the other nodes only as long as they may take to end."""
        self._until = min(self._until, time.monotonic() + FAILURE_GRACE + self._grace + _SLACK_SECONDS)

    def _post(self, notice: _Notice) -> None:
        with contextlib.suppress(XvcommError):  # the others learn it from the loss of this launcher
            self._notices.post(msgspec.msgpack.encode(notice), Deadline.after(_POST_SECONDS))

    def close(self) -> None:
        """Leave the other launchers in good order."""
        self._over = True
        self._notices.leave()
        self._thread.join()
        os.close(self.news)


@contextmanager
def join(place: Place, ranks: int, labels: Sequence[str], grace: float) -> Iterator[Nodes]:
    """Meet the launchers of the other nodes.

    Raises:
        ArgumentError: `labels` do not fit the numbers of ranks, or --master is not on node 0.
        ConfigError: XVCOMM_SECRET is not set, or the nodes' numbers contradict each other.
        AuthenticationError: the nodes have different secrets.
        DeadlineExceeded: a node did not come within XVCOMM_TIMEOUT; names it.
        StoreError: the port is in use.
    """
    config = Config.from_env()
    secret, deadline = need_secret(config.secret), Deadline.after(config.timeout)
    with contextlib.ExitStack() as leaving:
        if place.node == 0:
            leaving.callback(TcpServer(place.host, place.port, secret).close, CLOSE_GRACE)
        with _said_if_slow(place, config.timeout):
            store = _connect(place, secret, deadline)
            leaving.callback(store.close)
            mine = Node(socket.gethostname(), ranks, tuple(labels), _free_port())
            members = _meet(PrefixStore("launchers", store), place, mine, deadline)
        nodes = Nodes(store, place, members, secret, grace)
        leaving.callback(nodes.close)
        yield nodes


def _connect(place: Place, secret: str, deadline: Deadline) -> TcpStore:
    soon = Deadline.after(deadline.sooner(_SELF_SECONDS)) if place.node == 0 else deadline
    try:
        return TcpStore(place.host, place.port, secret, soon)
    except StoreError as error:
        if place.node == 0:
            raise ArgumentError(f"--master {place.host} is not this host, which is node 0: {error}") from None
        raise StoreError(
            f"node {place.node} cannot reach node 0, --master {place.host}:{place.port}: {error}"
        ) from None


def _meet(store: Store, place: Place, mine: Node, deadline: Deadline) -> list[Node]:
    try:
        everybody = join_barrier(store, place.node, place.count, msgspec.msgpack.encode(mine), deadline, noun=_NODE)
    except KeyboardInterrupt as error:
        refuse(store, place.node, error, noun=_NODE)
        raise
    return [msgspec.msgpack.decode(data, type=Node) for data in everybody]


@contextmanager
def _said_if_slow(place: Place, seconds: float) -> Iterator[None]:
    """Say for what this launcher waits, if it waits for long."""
    whom = f"node 0 at {place.host}:{place.port}" if place.node else f"{place.count - 1} other nodes"
    text = f"xvcomm run: node {place.node} of {place.count} waits for {whom} (at most {seconds:g} s, XVCOMM_TIMEOUT)"
    saying = threading.Timer(_SILENT_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    saying.daemon = True
    saying.start()
    try:
        yield
    finally:
        saying.cancel()


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
