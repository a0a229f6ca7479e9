"""A communicator with the interface of mpi4py's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from xvcomm.adapters.mpi.cartesian import Grid
from xvcomm.adapters.mpi.collectives import Collectives
from xvcomm.adapters.mpi.groups import Group
from xvcomm.adapters.mpi.objects import Objects
from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.pointtopoint import PROC_NULL
from xvcomm.adapters.mpi.status import UNDEFINED
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ConfigError

IDENT, CONGRUENT, SIMILAR, UNEQUAL = 0, 1, 2, 3
"""Results of `Compare`: the same communicator; the same ranks in the same order; in another order; other ranks."""

COMM_TYPE_SHARED = 1
"""For `Split_type`: ranks that can share memory, that is, those of one host."""


class Comm(Collectives, Objects):
    """A view of a Communicator with the methods of mpi4py's; arrays are in host memory.

    Its messages carry sequence numbers, so both ends must use it: a `send` of the Communicator does not match a `Recv` of a
    Comm.

    Args:
        communicator: the Communicator, a function that creates it on first use, or None for COMM_NULL.
        name: for `Get_name`.

    Raises:
        ArgumentError: this rank's device is not host memory; raised on first use.
    """

    def __init__(self, communicator: Communicator | Callable[[], Communicator] | None, name: str = "") -> None:
        self._given, self._name = communicator, name
        self._found: Part | None = None
        self._joining, self._under_way = threading.RLock(), False

    @property
    def _part(self) -> Part:  # type: ignore[override]
        return self._found if self._found is not None else self._join()

    def _join(self) -> Part:
        if self._given is None:
            raise ArgumentError("this is COMM_NULL: this rank is not in a group; check first: if comm != MPI.COMM_NULL")
        with self._joining:
            if self._under_way:
                raise ConfigError(
                    f"{self._name} is used while joining the job: the rendezvous uses mpi4py.MPI, which is replaced by this "
                    "adapter here; set XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET on all ranks"
                )
            if self._found is None:
                given, self._under_way = self._given, True
                try:
                    self._found = Part.of(given if isinstance(given, Communicator) else given())
                finally:
                    self._under_way = False
            return self._found

    @property
    def communicator(self) -> Communicator:
        """The underlying Communicator."""
        return self._part.comm

    def __bool__(self) -> bool:
        return self._given is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comm):
            return NotImplemented
        if not (self and other):
            return not (self or other)
        return self is other or self._part is other._part

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"<{self._name or 'Comm'}>" if self._found is None else f"<{self._name or 'Comm'}: {self.communicator!r}>"
        )

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.Free()

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Rank of this process."""
        return self._part.comm.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of ranks."""
        return self._part.comm.size

    def Get_rank(self) -> int:
        """Rank of this process."""
        return self.rank

    def Get_size(self) -> int:
        """Number of ranks."""
        return self.size

    @property
    def name(self) -> str:
        """Name of the communicator."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def Get_name(self) -> str:
        """Name of the communicator."""
        return self._name

    def Set_name(self, name: str) -> None:
        """Set the name of the communicator."""
        self._name = name

    def Is_inter(self) -> bool:
        """False: there are no intercommunicators."""
        return False

    def Is_intra(self) -> bool:
        """True: there are no intercommunicators."""
        return True

    is_inter, is_intra = property(Is_inter), property(Is_intra)

    def Get_group(self) -> Group:
        """The group of its ranks."""
        return Group(self._world_ranks(), self._world_ranks()[self.rank])

    @property
    def group(self) -> Group:
        """The group of its ranks."""
        return self.Get_group()

    def _world_ranks(self) -> tuple[int, ...]:
        return self._part.comm.job_ranks

    def Compare(self, comm: Comm) -> int:
        """IDENT, CONGRUENT, SIMILAR or UNEQUAL."""
        if self == comm:
            return IDENT
        mine, theirs = self._world_ranks(), comm._world_ranks()
        return CONGRUENT if mine == theirs else SIMILAR if set(mine) == set(theirs) else UNEQUAL

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Create a communicator of the ranks with the same colour, in order of their keys; COMM_NULL for UNDEFINED."""
        return self._made(lambda comm: comm.split(None if color == UNDEFINED else color, key))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Comm:
        """Create a communicator of the ranks of one host (COMM_TYPE_SHARED); COMM_NULL for UNDEFINED."""
        if split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise ArgumentError(f"Split_type {split_type}: only MPI.COMM_TYPE_SHARED is supported")
        host = self._part.comm.topology.hosts[self.rank]
        return self._made(lambda comm: comm.split(host if split_type == COMM_TYPE_SHARED else None, key))

    def Dup(self, info: Any = None) -> Comm:
        """Create a communicator of the same ranks, with separate messages and collectives."""
        return self._made(lambda comm: comm.split(0, comm.rank))

    Clone = Dup

    def Create(self, group: Group) -> Comm:
        """Create a communicator of a group; all ranks call this, and those outside of the group get COMM_NULL."""
        place = group.ranks.index(group.mine) if group.mine in group.ranks else None
        return self._made(lambda comm: comm.split(None if place is None else 0, place or 0))

    def Create_group(self, group: Group, tag: int = 0) -> Comm:
        """Like `Create`, but only the ranks of the group call this."""
        world = self._world_ranks()
        return self._made(lambda comm: comm.subgroup([world.index(rank) for rank in group.ranks], f"mpi {tag}"))

    def _made(self, make: Callable[[Communicator], Communicator | None]) -> Comm:
        return Intracomm(self._part.run(lambda: make(self._part.comm)))

    def Free(self) -> None:
        """Wait for detached sends, and close the communicator, which then is COMM_NULL."""
        if self._given is None:
            return
        given, found, self._given, self._found = self._given, self._found, None, None
        if found is None and isinstance(given, Communicator):  # it has never been used
            found = Part.of(given)
        if found is not None:
            found.close()

    Disconnect, free = Free, Free

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Make every rank raise Aborted; this process exits with `errorcode`."""
        self._part.comm.abort(f"MPI Abort({errorcode}) by rank {self.rank}")
        sys.exit(errorcode)


class Intracomm(Comm):
    """A communicator of one group, the only kind here."""

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None, reorder: bool = False
    ) -> Comm:
        """Create a communicator of the first ranks in a grid, in row-major order; COMM_NULL on ranks outside of the grid."""
        grid = Grid.of(dims, periods, self.size)
        color = 0 if self.rank < grid.size else None
        made = self._part.run(lambda: self._part.comm.split(color, self.rank))
        return Comm(None) if made is None else Cartcomm(made, grid)


class Cartcomm(Intracomm):
    """A communicator whose ranks form a grid."""

    def __init__(self, communicator: Communicator, grid: Grid) -> None:
        super().__init__(communicator)
        self._grid = grid

    @property
    def dims(self) -> list[int]:
        """Ranks along each axis."""
        return list(self._grid.dims)

    @property
    def periods(self) -> list[int]:
        """Whether each axis is periodic."""
        return [int(ring) for ring in self._grid.periods]

    @property
    def coords(self) -> list[int]:
        """Coordinates of this rank."""
        return self._grid.coordinates(self.rank)

    @property
    def topo(self) -> tuple[list[int], list[int], list[int]]:
        """dims, periods and coords."""
        return self.dims, self.periods, self.coords

    @property
    def dim(self) -> int:
        """Number of axes."""
        return len(self._grid.dims)

    ndim = dim

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """dims, periods and coords."""
        return self.topo

    def Get_dim(self) -> int:
        """Number of axes."""
        return self.dim

    def Get_coords(self, rank: int) -> list[int]:
        """Coordinates of a rank."""
        return self._grid.coordinates(rank)

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at given coordinates.

        Raises:
            ArgumentError: the coordinates are outside of the grid.
        """
        rank = self._grid.rank(coords)
        if rank is None:
            raise ArgumentError(f"{list(coords)} is outside of the grid {self.dims}")
        return rank

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Source and destination rank for a shift of data along an axis; PROC_NULL outside of the grid."""
        before, after = (self._grid.shifted(self.rank, direction, by) for by in (-disp, disp))
        return PROC_NULL if before is None else before, PROC_NULL if after is None else after

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """Create communicators of the ranks that differ only in the remaining axes."""
        fixed = [place for place, stays in zip(self.coords, remain_dims, strict=True) if not stays]
        color, key = ",".join(map(str, fixed)), self.rank
        return Cartcomm(self._part.run(lambda: self._part.comm.split(color, key)), self._grid.kept(remain_dims))
