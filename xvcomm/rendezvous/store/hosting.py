"""How rank 0 serves a store and tells the others where."""

from __future__ import annotations

import secrets
import socket

import msgspec

from xvcomm.abc.store import Store
from xvcomm.errors import AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.store.server import TcpServer
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.system import limits
from xvcomm.types.deadline import Deadline

CLOSE_GRACE = 10.0
"""Seconds for which a closing rank 0 goes on serving ranks that have not closed."""
_RIVAL_SECONDS = 2.0


class Invitation(msgspec.Struct, frozen=True):
    """Where a store is served, and its secret, empty where every rank has XVCOMM_SECRET; JSON, ASCII only.

    Without a host: rank 0 serves none, and the ranks use the store in which they found this.
    """

    host: str
    port: int
    secret: str

    def pack(self) -> bytes:
        """The bytes to send."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Invitation:
        """The invitation that was packed.

        Raises:
            StoreError: it was not packed by this version.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:  # bytes that are no UTF-8: ValueError
            raise StoreError(
                f"rank 0 runs another version of xvcomm ({error}); install one version on all hosts"
            ) from None

    def accept(self, deadline: Deadline, secret: str | None = None) -> TcpStore:
        """Connect; see `TcpStore`.

        Args:
            deadline: for the connection.
            secret: XVCOMM_SECRET of this rank.

        Raises:
            ConfigError: one of this rank and rank 0 has XVCOMM_SECRET and the other has not.
        """
        self.agree(bool(secret), bool(self.host and not self.secret))
        return TcpStore(self.host, self.port, secret or self.secret, deadline)

    @staticmethod
    def agree(here: bool, there: bool) -> None:
        """Raise ConfigError where one of this rank and rank 0 has XVCOMM_SECRET and the other has not."""
        if here != there:
            one, other = ("set on this rank", "not on rank 0") if here else ("set on rank 0", "not on this rank")
            raise ConfigError(f"XVCOMM_SECRET is {one} but {other}: set it to the same text on all ranks, or on none")


def invite(
    host: str, deadline: Deadline, board: Store | None = None, secret: str | None = None
) -> tuple[TcpStore, Invitation]:
    """Serve a store on a free port, until it is closed here and by all others.

    Args:
        host: name or address under which the others reach this host.
        deadline: for the own connection.
        board: closed with the store, and kept until then.
        secret: XVCOMM_SECRET, which the invitation does not tell; without one it tells a fresh one.
    """
    fresh = "" if secret else secrets.token_hex(16)
    server = TcpServer(host, 0, secret or fresh)
    return _served(server, secret or fresh, deadline, board), Invitation(host, server.port, fresh)


def meet(board: Store, rank: int, host: str, deadline: Deadline, secret: str | None = None) -> TcpStore:
    """The TCP store of rank 0, made known through another store that every rank reaches.

    Args:
        board: must be fresh: whoever finds an old address there tries it until the deadline. Closed by rank 0.
        rank: of this process.
        host: see `invite`; read on rank 0 only.
        deadline: for all of it.
        secret: XVCOMM_SECRET. Without one, who reads the board knows the store's secret.

    Raises:
        DeadlineExceeded: rank 0 did not come in time.
        StoreError: rank 0 cannot be reached.
        ConfigError: one of this rank and rank 0 has XVCOMM_SECRET and the other has not.
    """
    if rank != 0:
        return _invitation(board, rank, deadline).accept(deadline, secret)
    store, invitation = invite(host, deadline, board, secret)
    try:
        board.set("invitation", invitation.pack(), deadline)
    except BaseException:
        store.close()
        raise
    return store


def protect(board: Store, rank: int, host: str, deadline: Deadline, secret: str | None) -> Store:
    """The store for a job whose ranks meet in one that asks nobody for a password.

    With XVCOMM_SECRET it is one that rank 0 serves, see `meet`; without, `board` itself. Arguments and errors as there.
    """
    if secret and rank == 0:
        return meet(board, rank, host, deadline, secret)
    if rank == 0:
        board.set("invitation", Invitation("", 0, "").pack(), deadline)
        return board
    invitation = _invitation(board, rank, deadline)
    if invitation.host:
        return invitation.accept(deadline, secret)
    invitation.agree(bool(secret), False)
    return board


def _invitation(board: Store, rank: int, deadline: Deadline) -> Invitation:
    try:
        found = board.get("invitation", deadline)
    except DeadlineExceeded:
        raise DeadlineExceeded("rank 0 has not joined: it did not say in time where its store is", rank=rank) from None
    return Invitation.unpack(found)


def serve_or_join(host: str, port: int, secret: str, rank: int, deadline: Deadline, epoch: int) -> TcpStore:
    """The TCP store at an address that is known beforehand, which rank 0 serves.

    A second rank 0 joins the first one's store, where its number betrays it: see `join_barrier`.

    Raises:
        DeadlineExceeded: rank 0 did not come in time.
        StoreError: another program has the port, or listens there.
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
    """The address under which this host's processes reach each other: `127.0.0.1`, or `::1` where only IPv6 is there.

    Raises:
        StoreError: neither is there.
    """
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as probe:
                probe.bind((address, 0))
                return address
        except OSError as error:
            _pass_over(error)
    raise StoreError(
        "this host has neither 127.0.0.1 nor ::1, so that its processes cannot reach each other: run `ip link set lo up`, or "
        "give the ranks a folder to meet in, XVCOMM_STORE=file:///folder"
    )


def own_address() -> str:
    """An address of this host that other hosts can reach, as far as this host can tell.

    Raises:
        StoreError: there is only loopback.
    """
    try:
        found = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    for family, documentation in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket sends nothing; it only asks for the route to a documentation address.
                probe.connect((documentation, 9))
                found.append(probe.getsockname()[0])
        except OSError as error:
            _pass_over(error)
    for address in map(str, found):
        if not address.startswith(("127.", "::1", "fe80:")):
            return address
    raise StoreError(
        "this host has no address but loopback, so that other hosts cannot reach its store; set "
        "XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET on all ranks"
    )


def _served(server: TcpServer, secret: str, deadline: Deadline, board: Store | None, epoch: int = 0) -> TcpStore:
    def farewell() -> None:
        server.close(CLOSE_GRACE)
        if board is not None:
            board.close()

    try:
        return TcpStore(server.host, server.port, secret, deadline, epoch=epoch, on_close=farewell)
    except BaseException:
        server.close()
        raise


def _pass_over(error: OSError) -> None:
    """Go on without this address, unless the reason is one for all of them."""
    refusal = limits.reached(error, "find this host's address")
    if refusal is not None:
        raise refusal from error
