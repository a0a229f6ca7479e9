"""Serving a store on rank 0, and telling the other ranks its address."""

from __future__ import annotations

import secrets
import socket

import msgspec
import psutil

from xvcomm.abc.store import Store
from xvcomm.errors import AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.store.server import CLOSE_GRACE, TcpServer
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.system import limits
from xvcomm.types.deadline import Deadline

_RIVAL_SECONDS = 2.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Invitation(msgspec.Struct, frozen=True):
    """Address of the store, and its secret (empty if every rank has XVCOMM_SECRET). Encoded as ASCII JSON.

    An empty host means that rank 0 serves no store: the ranks use the store in which they found the invitation.
    """

    host: str
    port: int
    secret: str

    def pack(self) -> bytes:
        """Encode as bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Invitation:
        """Decode what `pack` returned.

        Raises:
            StoreError: it comes from another version of xvcomm.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:  # ValueError: the bytes are not UTF-8
            raise StoreError(
                f"rank 0 runs another version of xvcomm ({error}); install one version on all hosts"
            ) from None

    def accept(self, deadline: Deadline, secret: str | None = None) -> TcpStore:
        """Connect to the store; see `TcpStore`.

        Args:
            deadline: for the connection.
            secret: XVCOMM_SECRET of this rank.

        Raises:
            ConfigError: XVCOMM_SECRET is set on only one of this rank and rank 0.
        """
        self.agree(bool(secret), bool(self.host and not self.secret))
        return TcpStore(self.host, self.port, secret or self.secret, deadline)

    @staticmethod
    def agree(here: bool, there: bool) -> None:
        """Raise ConfigError if XVCOMM_SECRET is set on only one of this rank and rank 0."""
        if here != there:
            one, other = ("set on this rank", "not on rank 0") if here else ("set on rank 0", "not on this rank")
            raise ConfigError(f"XVCOMM_SECRET is {one} but {other}: set it to the same text on all ranks, or on none")


def invite(
    host: str, deadline: Deadline, bootstrap: Store | None = None, secret: str | None = None
) -> tuple[TcpStore, Invitation]:
    """Serve a store on a free port until it is closed on all ranks; returns it with the invitation for the other ranks.

    Args:
        host: name or address by which the other ranks reach this host.
        deadline: for this process's own connection.
        bootstrap: another store to close together with this one.
        secret: XVCOMM_SECRET, which the invitation does not contain; without it the invitation contains a new secret.
    """
    fresh = "" if secret else secrets.token_hex(16)
    server = TcpServer(host, 0, secret or fresh)
    return _served(server, secret or fresh, deadline, bootstrap), Invitation(host, server.port, fresh)


def meet(bootstrap: Store, rank: int, host: str, deadline: Deadline, secret: str | None = None) -> TcpStore:
    """Open the TCP store of rank 0, whose address is published in another store that every rank reaches.

    Args:
        bootstrap: that other store, which rank 0 closes. It must be new: a rank that finds an old address in it tries that
            until the deadline.
        host: see `invite`; read on rank 0 only.
        deadline: for all of it.
        secret: XVCOMM_SECRET. Without it, everyone who can read the bootstrap store learns the store's secret.

    Raises:
        DeadlineExceeded: rank 0 did not publish the address in time.
        StoreError: rank 0 cannot be reached.
        ConfigError: XVCOMM_SECRET is set on only one of this rank and rank 0.
    """
    if rank != 0:
        return _invitation(bootstrap, rank, deadline).accept(deadline, secret)
    store, invitation = invite(host, deadline, bootstrap, secret)
    try:
        bootstrap.set("invitation", invitation.pack(), deadline)
    except BaseException:
        store.close()
        raise
    return store


def protect(bootstrap: Store, rank: int, host: str, deadline: Deadline, secret: str | None) -> Store:
    """The store for a job whose rendezvous store has no authentication.

    With XVCOMM_SECRET it is one that rank 0 serves, see `meet`; without, `bootstrap` itself. Arguments and errors as in `meet`.
    """
    if secret and rank == 0:
        return meet(bootstrap, rank, host, deadline, secret)
    if rank == 0:
        bootstrap.set("invitation", Invitation("", 0, "").pack(), deadline)
        return bootstrap
    invitation = _invitation(bootstrap, rank, deadline)
    if invitation.host:
        return invitation.accept(deadline, secret)
    invitation.agree(bool(secret), False)
    return bootstrap


def _invitation(bootstrap: Store, rank: int, deadline: Deadline) -> Invitation:
    try:
        found = bootstrap.get("invitation", deadline)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            "rank 0 has not joined: it did not publish the address of its store in time", rank=rank
        ) from None
    return Invitation.unpack(found)


def serve_or_join(host: str, port: int, secret: str, rank: int, deadline: Deadline, epoch: int) -> TcpStore:
    """Open the TCP store at an address known in advance, which rank 0 serves.

    A second process with rank 0 joins the store of the first one, where `join_barrier` detects the duplicate.

    Raises:
        DeadlineExceeded: rank 0 did not come in time.
        StoreError: another program uses the port.
        AuthenticationError: the ranks have different secrets.
    """
    if rank != 0:
        try:
            return TcpStore(host, port, secret, deadline, epoch=epoch)
        except StoreError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"rank 0 has not joined: {error}", rank=rank) from None
            raise
    try:
        server = TcpServer(host, port, secret, epoch=epoch)
    except StoreError as taken:
        try:
            return TcpStore(host, port, secret, Deadline.after(deadline.sooner(_RIVAL_SECONDS)), epoch=epoch)
        except (StoreError, AuthenticationError):
            raise taken from None
    return _served(server, secret, deadline, None, epoch)


def loopback() -> str:
    """The loopback address of this host: `127.0.0.1`, or `::1` if only IPv6 is configured.

    Raises:
        StoreError: neither is configured.
    """
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as probe:
                probe.bind((address, 0))
                return address
        except OSError as error:
            _pass_over(error)
    raise StoreError(
        "this host has neither 127.0.0.1 nor ::1, so its processes cannot reach each other: run `ip link set lo up`, or "
        "let the ranks use a folder, XVCOMM_STORE=file:///folder"
    )


def own_address() -> str:
    """An address of this host that other hosts can reach, as far as this host can tell.

    Raises:
        StoreError: it has loopback addresses only.
    """
    try:
        found = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    for family, documentation in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket sends nothing; it only selects the route, here to an address reserved for
                # documentation.
                probe.connect((documentation, 9))
                found.append(probe.getsockname()[0])
        except OSError as error:
            _pass_over(error)
    # A host without a route to others than its neighbours, whose name resolves to loopback, still has addresses.
    found += [of.address for each in psutil.net_if_addrs().values() for of in each if of.family in _FAMILIES]
    for address in map(str, found):
        if not address.startswith(("127.", "::1", "fe80:")):
            return address
    raise StoreError(
        "this host has only loopback addresses, so other hosts cannot reach its store; set "
        "XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET on all ranks"
    )


def _served(server: TcpServer, secret: str, deadline: Deadline, bootstrap: Store | None, epoch: int = 0) -> TcpStore:
    def close_both() -> None:
        server.close(CLOSE_GRACE)
        if bootstrap is not None:
            bootstrap.close()

    try:
        return TcpStore(server.host, server.port, secret, deadline, epoch=epoch, on_close=close_both)
    except BaseException:
        server.close()
        raise


def _pass_over(error: OSError) -> None:
    """Ignore an error that concerns only this address; raise if the process is out of file descriptors."""
    refusal = limits.reached(error, "find this host's address")
    if refusal is not None:
        raise refusal from error
