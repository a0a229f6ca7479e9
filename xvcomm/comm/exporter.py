"""Serves a rank's metrics by HTTP, for Prometheus, if `XVCOMM_METRICS` is set. The thread sleeps until a request comes."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from xvcomm.errors import BackendUnavailable, ConfigError, ResourceError
from xvcomm.system import forking
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.comm.metrics import Metrics
    from xvcomm.engine.context import Context
    from xvcomm.engine.session.session import Session

_REQUEST_SECONDS = 2.0
"""How long a client may take for its request, and to read the answer."""
_PORTS = 1 << 16
_exporters: dict[Session, Exporter] = {}


def attend(context: Context) -> None:
    """Serve the metrics of a process from a job's first communicator to the job's end, and tell of each one that is made.

    Raises:
        ConfigError: there is no such port.
        BackendUnavailable: prometheus_client is missing.
        ResourceError: the port is in use.
    """
    session = context.session
    exporter = _exporters.get(session)
    if exporter is None:
        exporter = _exporters[session] = Exporter(context, *_address(session))
        session.at_close(_leave, session)
    exporter.metrics.follow(context)


def _leave(session: Session) -> None:
    _exporters.pop(session).close()


def port(session: Session) -> int | None:
    """On which a process serves its metrics; None if it does not."""
    exporter = _exporters.get(session)
    return None if exporter is None else exporter.port


def _address(session: Session) -> tuple[str, int]:
    """Where this rank listens: the ranks of a host on ports that follow each other, or each on any port."""
    host, _, first = str(session.config.metrics).rpartition(":")
    local = session.config.local_rank
    place = session.neighbours.index(session.rank) if local is None else local
    number = int(first) + place if int(first) else 0
    if number >= _PORTS:
        raise ConfigError(f"XVCOMM_METRICS={session.config.metrics}: local rank {place} would have port {number}")
    return host.strip("[]"), number


class _Server(socketserver.TCPServer):
    """Answers each client in a thread of its own: one that is slow holds no other one up.

    Attributes:
        answering: these threads.
    """

    allow_reuse_address = True

    def __init__(self, *arguments: Any) -> None:
        self.answering: list[Daemon] = []
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called by socketserver for each connection."""
        thread = Daemon("xvcomm-scrape", partial(self._answer, request, client_address))
        self.answering = [*(each for each in self.answering if each.is_alive()), thread]
        thread.start()

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report no errors of clients that go away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Exporter:
    """A listening socket, and the thread that answers.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, context: Context, host: str, port: int) -> None:
        self._closed = False
        self.metrics, self._server = _listen(context, host, port)
        self.port: int = self._server.server_address[1]
        forking.register(self)
        self._thread = Daemon("xvcomm-metrics", self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            self._server.handle_request()

    def close(self) -> None:
        """Stop to listen. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        waiting = Deadline.after(2 * _REQUEST_SECONDS)
        for thread in (self._thread, *self._server.answering):
            thread.join(waiting.left())
        self._server.server_close()
        self.metrics.close()

    def after_fork(self) -> None:
        """Leave the socket to the parent."""
        self._closed = True
        forking.leave_to_parent(self._server.fileno())


def _listen(context: Context, host: str, port: int) -> tuple[Metrics, _Server]:
    try:
        from prometheus_client import CollectorRegistry, MetricsHandler

        from xvcomm.comm.metrics import Metrics
    except ImportError as error:
        raise BackendUnavailable("XVCOMM_METRICS needs prometheus_client: pip install 'xvcomm[metrics]'") from error

    class Handler(MetricsHandler):  # type: ignore[misc]
        timeout = _REQUEST_SECONDS
        registry = CollectorRegistry(auto_describe=False)

    metrics = Metrics(context)
    Handler.registry.register(metrics)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        made = type("Server", (_Server,), {"address_family": family})
        server: _Server = made(address, Handler)
    except OSError as error:
        raise ResourceError(
            f"XVCOMM_METRICS: cannot listen on {host or '*'}:{port}: {error}; choose another port, of which each rank of a host "
            "takes one, or 0 for any"
        ) from error
    return metrics, server
