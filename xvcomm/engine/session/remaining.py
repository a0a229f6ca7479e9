"""Whether any rank of a job is left, as a process can tell that waits to join it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from xvcomm.abc.store import NotSet, PrefixStore, Store
from xvcomm.config import Config
from xvcomm.engine.session import elsewhere
from xvcomm.engine.session.joining import host_identity
from xvcomm.engine.session.presence import Presence
from xvcomm.types.deadline import Deadline

_LOOK_SECONDS = 0.5


class JobRanks(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of a job that runs.

    Attributes:
        name: of the job; see `Session`.
        part: of the store that the job uses; empty if it uses all of it.
        bytes: of each rank, see `Presence`, by host, see `host_identity`.
    """

    name: str
    part: str
    bytes: dict[str, dict[int, int]]


_decode = msgspec.msgpack.Decoder(JobRanks).decode


class Remaining:
    """Follows the ranks of the job that runs at the time, until all of them have died or left.

    Ranks of this host are seen by their locks. Of other hosts the store tells; one that does not, such as a folder, leaves their
    ranks alive.

    Args:
        store: in which the job has begun.
        key: of `JobRanks` in it.
        left: whether a rank of a job of this name has left in good order.
    """

    def __init__(self, store: Store, key: str, config: Config, left: Callable[[str, int], bool]) -> None:
        self._store, self._key, self._has_left = store, key, left
        self._presence, self._host = Presence.take(config.shm_dir), host_identity(config.shm_dir, config.host)
        self._job = JobRanks("", "", {})
        self._left: list[int] = []
        self._died, self._read = set[int](), 0
        self._looked = -_LOOK_SECONDS

    def over(self) -> bool:
        """Whether no rank is left; looks from time to time only."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        with contextlib.suppress(NotSet):
            job = _decode(self._store.get(self._key, Deadline.after(0)))
            if job.name != self._job.name:
                self._job, self._died, self._read = job, set(), 0
                self._left = sorted(rank for ranks in job.bytes.values() for rank in ranks)
        if not self._job.name:
            return False
        place = PrefixStore(self._job.part, self._store) if self._job.part else self._store
        died, self._read = elsewhere.died(place, self._read)
        self._died |= died
        while self._left and self._gone(self._left[0]):
            del self._left[0]
        return not self._left

    def _gone(self, rank: int) -> bool:
        byte = self._job.bytes.get(self._host, {}).get(rank)
        died = rank in self._died if byte is None else not self._presence.held(byte)
        return died or self._has_left(self._job.name, rank)
