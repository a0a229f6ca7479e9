"""Traces of the flight recorders of real jobs: what belongs together is found, and who is late."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World
from xvcomm.testing.inside import context
from xvcomm.trace.format import Record
from xvcomm.trace.snapshot import RankState, Snapshot, load
from xvcomm.trace.spans import groups, instances, messages, spans
from xvcomm.trace.summary import summarize
from xvcomm.trace.timeline import timeline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import RankInfo

SLOW, SECONDS, ROUNDS = 2, 0.01, 12


def work(comm: Communicator) -> tuple[tuple[RankInfo, ...], list[Record]]:
    """Messages around, blocking and not, and collectives to which one rank comes late."""
    x, y = np.ones(1 << 15, np.float32), np.ones(100)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for i in range(ROUNDS):
        comm.sendrecv(y, following, np.empty_like(y), before, i, i)
        for waiting in [comm.isend(y, following, 7), comm.irecv(np.empty_like(y), before, 7)]:
            waiting.wait()
        if comm.rank == SLOW:
            time.sleep(SECONDS)
        comm.all_reduce(x)
    return context(comm).session.infos, comm.history()


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A dump, as it is read from a file."""
    shape = {"size": 4} if request.param == "one host" else {"hosts": "a:2,b:2", "env": {"XVCOMM_NICS": "lo"}}
    with World(**shape) as world:  # type: ignore[arg-type]
        found = world.run(work)
    states = {rank: RankState(records=tuple(records)) for rank, (_, records) in enumerate(found)}
    path: Path = tmp_path_factory.mktemp("dumps") / "all.xvdump"
    Snapshot("job", time.time_ns(), found[0][0], states).save(path)
    return load(path)


def test_each_message_has_its_receive(taken: Snapshot) -> None:
    every = spans(taken, groups(taken))
    pairs = messages(taken, every)
    assert len(pairs) == sum(span.record.op == OpCode.SEND for span in every) == 4 * 2 * ROUNDS
    for send, receive in pairs:
        assert (send.peer, receive.peer) == (receive.rank, send.rank) and send.record.tag == receive.record.tag
        assert send.begin <= receive.end
    assert Counter(map(len, instances(every))) == {4: ROUNDS}


def test_the_slow_rank_is_found(taken: Snapshot) -> None:
    by_rank = {row.rank: row for row in summarize(taken).lateness}
    assert max(by_rank, key=lambda rank: by_rank[rank].late.median) == SLOW
    assert by_rank[SLOW].last >= ROUNDS / 2 and by_rank[SLOW].late.median > SECONDS / 2
    assert by_rank[SLOW].collectives == ROUNDS


def test_the_timeline_has_all_operations(taken: Snapshot) -> None:
    events = timeline(taken)["traceEvents"]
    done = Counter(event["name"] for event in events if event["ph"] == "X" and event["cat"][0] in "cm")
    assert done == {"send": 8 * ROUNDS, "recv": 8 * ROUNDS, "all_reduce": 4 * ROUNDS}
    rails = [event for event in events if event["ph"] == "X" and event["cat"].endswith("(tcp)")]
    assert bool(rails) == (len({info.host for info in taken.infos}) > 1)
    assert sum(event["ph"] == "s" for event in events) == 4 * 2 * ROUNDS + ROUNDS
