"""The connections from a rank to another one, as commands measure them: what each has carried, and which may carry."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from xvcomm.abc.transport import Path
from xvcomm.types.route import Ends

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator


class Connections:
    """Those to one rank of another host. A connection that replaces a lost one with the same ends counts on from its bytes."""

    def __init__(self, comm: Communicator, other: int) -> None:
        """Args:
        other: the rank, in this communicator.
        """
        from xvcomm.testing.inside import context  # loads numba, which a command's help need not

        inside = context(comm)
        self._member, self._transports = inside.ranks[other], inside.session.transports

    def paths(self) -> list[Path]:
        """Where there are connections, or have been; never fewer."""
        every = (path for transport in self._transports for path in transport.paths())
        return [path for path in every if path.rank == self._member]

    def up(self) -> list[Path]:
        """Where there are connections at the moment."""
        return [path for path in self.paths() if path.up]

    def sent(self) -> dict[Ends, int]:
        """Bytes that each has sent."""
        return {ends_of(path): path.sent for path in self.paths()}

    def by_scheme(self) -> dict[str, int]:
        """Bytes that all of a scheme have sent."""
        found: dict[str, int] = {}
        for path in self.paths():
            found[path.scheme] = found.get(path.scheme, 0) + path.sent
        return found

    def losses(self) -> dict[Ends, int]:
        """How often each was lost."""
        return {ends_of(path): path.losses for path in self.paths()}

    def restrict(self, only: Collection[Ends]) -> None:
        """See `Transport.restrict`."""
        for transport in self._transports:
            transport.restrict(self._member, only)


def ends_of(path: Path) -> Ends:
    """What tells it from the others."""
    return path.local, path.remote, path.number


def name_of(ends: Ends) -> str:
    """For users: `10.0.0.7 to 10.0.0.8, number 1000`."""
    local, remote, number = ends
    return f"{local} to {remote}, number {number}"
