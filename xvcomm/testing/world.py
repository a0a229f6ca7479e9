"""Real ranks, each with a communicator, that tests call functions on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from xvcomm.rendezvous.store.server import TcpServer
from xvcomm.testing.hosts import enter
from xvcomm.testing.processes import RUN_SECONDS, START_SECONDS, RankFailure, Ranks, obey, prepare
from xvcomm.testing.servers import forked_with
from xvcomm.types.topology import parse_islands

PRELOAD = [
    "xvcomm.comm.communicator",
    "xvcomm.comm.init",
    "xvcomm.backends.host.collective",
    "xvcomm.backends.host.device",
    "xvcomm.backends.shm",
    "xvcomm.backends.tcp",
    "xvcomm.backends.rdma.cards",
    "xvcomm.backends.rocm",
    "xvcomm.backends.cuda",
    "xvcomm.wire.network",
    "xvcomm.testing.cases",
    "xvcomm.testing.common_reducers",
    "xvcomm.testing.inside",
    "xvcomm.testing.signals",
    "concurrent.futures.thread",
    "encodings.idna",
    "psutil",
    "pytest",
    "unittest.mock",
]
"""What ranks and test files import; also pytest, which costs a rank more than the rest of its start."""

_SECRET = "world"
_STARTS = 3
"""How often ranks are started before calls on them are given up."""


class World(Ranks):
    """Ranks of one job on this machine, each in its own process with a communicator.

    Functions run on the ranks as `function(comm, *args)`; they must lie at the top level of a module or test file,
    and arguments and results must be picklable.

        with World(islands="cuda:2,rocm:2") as world:
            world.run(check_all_reduce, "float32")

    If `run` has raised, the next call starts all ranks again, so that one failure is one test's; the third time it raises the
    first failure instead.

    Args:
        size: number of ranks; from `islands`, `devices` or `hosts` if left out.
        islands: labels, `"cuda:2,rocm:2"`: a rehearsal.
        devices: kinds of device, `"cuda:2,host:2"`; the ranks of each kind take its devices one after the other.
        hosts: labels of hosts, `"a:2,b:2"`: the ranks of each behave as if on a host of their own.
        namespaces: of some of these labels: their ranks have this network.
        env: further variables of the ranks; one for all, or one a rank.
        timeout: of the communicators, in seconds.
        preload: modules, such as a framework, that are imported once for the ranks of all worlds with the same ones, and left
            out where they are missing. They must start no thread; they see the variables of this process, not `env`.
    """

    def __init__(
        self, size: int | None = None, islands: str | None = None, *, devices: str | None = None, hosts: str | None = None,
        namespaces: Mapping[str, str] = MappingProxyType({}),
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}), timeout: float = 100.0,
        preload: Sequence[str] = (),
    ) -> None:  # fmt: skip
        kinds = parse_islands(devices) if devices else ()
        places = parse_islands(hosts) if hosts else ()
        labels: Sequence[str | None] = (
            parse_islands(islands) if islands else [None] * (size or len(kinds or places) or 1)
        )
        further = [env] * len(labels) if isinstance(env, Mapping) else env
        super().__init__(forked_with((*PRELOAD, *preload)))
        self._each: list[tuple[dict[str, str], list[str], str | None]] = []
        for rank, label in enumerate(labels):
            variables = {
                "XVCOMM_RANK": str(rank), "XVCOMM_SIZE": str(len(labels)),
                "XVCOMM_LOCAL_RANK": str(rank), "XVCOMM_LOCAL_SIZE": str(len(labels)),
                "XVCOMM_SECRET": _SECRET, "XVCOMM_TIMEOUT": str(timeout), "XVCOMM_ISLAND": label or "",
                "XVCOMM_HOST": places[rank] if places else "",
                **(_device_variables(kinds, rank) if kinds else {}), **further[rank],
            }  # fmt: skip
            path = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
            self._each.append((variables, path, namespaces.get(variables["XVCOMM_HOST"])))
        self._failures: list[BaseException] = []
        self._stale = False
        self._begin()

    def _begin(self) -> None:
        self._meeting = {"XVCOMM_STORE": self._serve(_serve_store)}
        self._start(_rank_main, [({**self._meeting, **variables}, *others) for variables, *others in self._each])

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_SECONDS) -> list[Any]:
        try:
            return super().run(function, *args, timeout=timeout)
        except BaseException as failure:  # also the end of the time for a test
            self._failures.append(failure)
            self._stale = True
            raise

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        if self._stale:
            self._begin_again()
        super().submit(rank, function, *args)

    def retire(self) -> None:
        """Let the next call start other ranks, since a test has killed one or used them up."""
        self._stale = True

    def _begin_again(self) -> None:
        if len(self._failures) >= _STARTS:
            raise RankFailure(
                f"{len(self._failures)} calls failed before, and the ranks are not started any more. The first failure:\n"
                f"{self._failures[0]}", getattr(self._failures[0], "outcomes", []),
            )  # fmt: skip
        self.close()
        self._begin()
        self._stale = False

    def restart(self, rank: int, **more: str) -> None:
        """Start a process in the place of a rank that has ended.

        Functions get no communicator there: `xvcomm.init()` in them joins the others when they grow.

        Args:
            more: further variables.
        """
        variables, *others = self._each[rank]
        self._replace(rank, _rank_main, {**self._meeting, **variables, "XVCOMM_REJOIN": "1", **more}, *others)
        self._collect([rank], START_SECONDS)


def _device_variables(kinds: Sequence[str], rank: int) -> dict[str, str]:
    kind = kinds[rank]
    index = {} if kind == "host" else {"XVCOMM_DEVICE_INDEX": str(kinds[:rank].count(kind))}
    return {"XVCOMM_DEVICE": kind, **index}


def _serve_store(pipe: Connection) -> None:
    """Where the ranks meet, until the pipe closes. A process of its own: ranks come and go, and connections with them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the ranks
    server = TcpServer("127.0.0.1", 0, _SECRET)
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.close()


def _rank_main(pipe: Connection, variables: dict[str, str], path: list[str], namespace: str | None) -> None:
    """A rank's process."""
    import xvcomm

    if namespace is not None:
        enter(namespace)
    prepare(variables, path)
    given = obey(pipe, lambda: [] if variables.get("XVCOMM_REJOIN") else [xvcomm.init()])
    if given:
        given[0].close()
