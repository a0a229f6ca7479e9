"""Maps shared memory that another rank of the host makes, and whose name it publishes in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xvcomm.abc.store import NotSet
from xvcomm.errors import DeadlineExceeded, PeerLost, ResourceError
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.session.session import Session
    from xvcomm.rendezvous.store.guarded import GuardedStore

_LOOK_SECONDS = 0.1


def attach(session: Session, place: GuardedStore, key: str, maker: int, deadline: Deadline) -> Segment:
    """Map a segment whose name another rank publishes in the store.

    Raises:
        PeerLost, Aborted: that rank is gone, and the segment's name with it.
        DeadlineExceeded: it did not create the segment in time.
        ResourceError: the segment cannot be mapped for another reason.
    """
    where = f"rank {maker} on {session.infos[maker].hostname}"
    while True:
        left = session.journal.left(maker)  # first, because the rank may publish the name just before it leaves
        try:
            name = place.get(key, Deadline.after(deadline.sooner(_LOOK_SECONDS))).decode()
            break
        except DeadlineExceeded as error:
            if not isinstance(error, NotSet):  # the store itself did not answer, for the moment
                if deadline.expired():
                    raise
                continue
            words = session.last_words(maker)
            if left:
                text = f"{where} left before it created its shared memory; {words}"
                raise PeerLost(text, rank=session.rank, peer=maker) from error
            if deadline.expired():
                text = f"{where} did not create its shared memory in time; it is stopped or very slow; {words}"
                raise DeadlineExceeded(text, rank=session.rank, peer=maker) from error
    try:
        return Segment.attach(session.config.shm_dir, name)
    except ResourceError:
        place.settle()
        raise
