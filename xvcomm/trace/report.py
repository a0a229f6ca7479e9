"""The report on a job that hangs, as text: the verdict, the ranks that wait, those outside xvcomm, and those that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xvcomm.trace import stack
from xvcomm.trace.format import Record, Stage
from xvcomm.trace.groups import brief
from xvcomm.trace.operation import NO_PEER
from xvcomm.trace.snapshot import Group, Snapshot
from xvcomm.trace.verdict import Explainer, Verdict
from xvcomm.trace.waits import Condition, Waits
from xvcomm.types.topology import RankInfo

_SHOWN = (Condition.WAITS, Condition.LISTENS, Condition.BUSY, Condition.ELSEWHERE)
"""Ranks that other parts of the report tell of."""
_LINES = 64
"""Maximum number of lines in a part of the report."""
_FRAMES = 8
"""Maximum number of calls of a stack in the report."""


def report(
    snapshot: Snapshot, verdict: Verdict, waits: Waits, calls_native: Callable[[Record], bool] = lambda record: True
) -> str:
    """The whole text.

    Args:
        calls_native: whether an operation calls the native library where it can, as far as is known.
    """
    explainer = Explainer(waits)
    parts = [
        f"xvcomm: job {snapshot.job}, {len(snapshot.infos)} ranks\n{verdict.text}",
        _part("Waiting ranks", _waiting(waits, explainer, calls_native)),
        _part("Operations that GPUs have done, which is not reported yet", _over(waits)),
        _part("First difference", _difference(waits)),
        _part("Outside xvcomm", _busy(waits, explainer)),
        _part("Stopped, silent or gone", _absent(waits, explainer)),
    ]
    return "\n\n".join(part for part in parts if part)


def _part(title: str, lines: Iterator[str]) -> str:
    listed = list(lines)
    if not listed:
        return ""
    more = [f"... and {len(listed) - _LINES} more"] if len(listed) > _LINES else []
    return "\n".join([f"{title}:", *(f"  {line}" for line in [*listed[:_LINES], *more])])


def _waiting(waits: Waits, explainer: Explainer, calls_native: Callable[[Record], bool]) -> Iterator[str]:
    infos = waits.snapshot.infos
    for rank, of_rank in waits.all.items():
        for wait in of_rank:
            whom = f"waits for {brief(sorted(wait.peers))}, which {wait.why.value}" if wait.peers else wait.why.value
            how = hop(wait.record, wait.group, rank, infos, native=calls_native(wait.record))
            stage = f", {wait.record.stage.words}" if wait.record.stage else ""
            yield (
                f"{_who(infos[rank])}: {explainer.describe(wait)} at {wait.record.call_site}, since "
                f"{explainer.since(wait)}, by {how}{stage}; {whom}"
            )


def _over(waits: Waits) -> Iterator[str]:
    for rank, state in waits.snapshot.ranks.items():
        for record in state.records:
            if record.stage is Stage.OVER:
                yield f"{_who(waits.snapshot.infos[rank])}: {record.describe()}"


def _difference(waits: Waits) -> Iterator[str]:
    for rank, record in waits.first_difference() or ():
        yield f"{_who(waits.snapshot.infos[rank])}: {record.describe()}"


def _busy(waits: Waits, explainer: Explainer) -> Iterator[str]:
    for rank, condition in waits.conditions.items():
        if condition in (Condition.BUSY, Condition.ELSEWHERE):
            yield explainer.tell(rank)
            found = stack.parse(waits.snapshot.ranks[rank].stack)
            yield from (f"    {frame}" for frame in (found.frames[:_FRAMES] if found is not None else ()))


def _absent(waits: Waits, explainer: Explainer) -> Iterator[str]:
    for rank, condition in waits.conditions.items():
        if condition not in _SHOWN:
            yield explainer.tell(rank)


def _who(info: RankInfo) -> str:
    return f"rank {info.rank} ({info.device} on {info.hostname})"


def hop(record: Record, group: Group | None, rank: int, infos: tuple[RankInfo, ...], *, native: bool = True) -> str:
    """What carries an operation: as far as the record tells, else by where the ranks are and whether a library is called."""
    if record.way:
        return record.way
    ranks = group.ranks if group is not None else ()
    if record.peer != NO_PEER:
        far = 0 <= record.peer < len(ranks) and infos[ranks[record.peer]].host != infos[rank].host
        return "a ring between hosts" if far else "a ring in shared memory"
    island = [r for r in ranks if r != rank and infos[r].island == infos[rank].island]
    native = native and infos[rank].device != "host" and bool(island)
    others = {r for r in ranks if not native or infos[r].island != infos[rank].island} - {rank}
    hosts = {infos[r].host for r in others}
    ways = ["the native library"] if native else []
    if hosts - {infos[rank].host}:
        ways.append("rings between hosts")
    if infos[rank].host in hosts:
        ways.append("rings in shared memory")
    return " + ".join(ways)
