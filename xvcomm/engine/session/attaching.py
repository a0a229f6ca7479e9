"""Shared memory that one rank of a host makes, and the others map by the name that it publishes in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xvcomm.abc.store import NotSet
from xvcomm.errors import DeadlineExceeded, PeerLost, ResourceError
from xvcomm.memory.segment import Segment
from xvcomm.system.stacks import StackFile
from xvcomm.trace import journal
from xvcomm.trace.journal import Roster
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
            words = session.liveness.last_words(maker)
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


@contextlib.contextmanager
def share_journal(
    session: Session, place: GuardedStore, processes: Sequence[str], deadline: Deadline
) -> Iterator[Segment]:
    """Open the host's flight recorders, in one segment of shared memory that its lowest rank creates.

    Args:
        processes: the PID namespace of each rank of the host.

    Yields:
        The segment, which has a name as long as other ranks may have to map it.
    """
    first, config = session.neighbours[0], session.config
    if session.rank != first:
        segment = attach(session, place, "name", first, deadline)
    else:
        roster = Roster(session.name, session.infos, session.neighbours, tuple(processes), config.trace_records)
        segment = Segment.create(config.shm_dir, session.job, journal.size(roster))
        journal.write(segment.view, roster)
        with segment.named():
            place.publish("name", segment.name.encode(), deadline)
    try:
        stacks = None
        with contextlib.suppress(OSError):  # errors can do without stacks
            stacks = StackFile.take()
        session.journal.open(segment, session.rank, stacks)
        session.journal.recorder.note_grades([grade for t in session.transports for grade in t.grades()])
        try:
            yield segment
        finally:
            session.journal.close()
    finally:
        segment.close()
