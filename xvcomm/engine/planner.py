"""From a request to the plan that one rank carries out, made once and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from xvcomm.config import Config
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.engine.session.rings import at_once
from xvcomm.schedule import build
from xvcomm.schedule.describe import lines
from xvcomm.schedule.runs import runs
from xvcomm.schedule.steps import Collective, Exchange, Get, GetReduce, Lane, Put, Request, Schedule, Step
from xvcomm.schedule.tuning import Tuning, tune
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology

_KEPT = 256  # plans; a training step uses a few dozen


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does for one request.

    Attributes:
        nbytes: size of the whole array.
        segment, exchange: how it is carried out; see `schedule.build`.
        runs: of one segment the same, messages that may start together as one.
        together: whether all its messages may start together.
        messages: the most that one rank is sent.
    """

    request: Request
    rank: int
    nbytes: int
    segment: int
    exchange: Exchange
    schedule: Schedule
    runs: tuple[tuple[Step, ...], ...]
    together: bool
    lanes: frozenset[Lane]
    messages: int

    def explain(self) -> list[str]:
        """The plan as lines of text: what is asked for, then one line a step."""
        request = self.request
        wide = f", {self.schedule.wide} in float32" if self.schedule.wide else ""
        cut = f"segments of {self.segment}" if self.segment else "one segment"
        return [
            f"{request.op.value} of {_elements(request)} elements of {request.itemsize} bytes on rank {self.rank}: "
            f"{len(self.schedule.steps)} steps, {cut}, scratch {self.schedule.scratch}{wide}",
            *lines(self.schedule),
        ]


class Planner:
    """Makes the plans of one rank. Thread-safe; equal requests get the same Plan.

    Args:
        config: settings; all ranks must have equal ones, but for the sizes of rings.
        gpus: whether any of the ranks has one.
        rings: the sizes of each rank's; those of `config` if left out.
    """

    def __init__(
        self, topology: Topology, rank: int, config: Config, gpus: bool = False, rings: Iterable[RingSizes] = ()
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._gpus = gpus
        self._at_once = min(at_once(sizes, gpus=gpus) for sizes in rings or [RingSizes.of(config)])
        self._link_bytes = config.gpu_segment_bytes if gpus else config.segment_bytes
        self._kept = lru_cache(maxsize=_KEPT)(self._make)

    def plan(self, request: Request) -> Plan:
        """The plan for a request.

        Raises:
            ArgumentError: the request does not fit the topology.
        """
        return self._kept(request)

    def calls_native(self, op: int, nbytes: int) -> bool:
        """Whether an operation of so many bytes calls the native library, where an island has more than one rank."""
        return op != OpCode.ALL_REDUCE or self._tuning(Collective.ALL_REDUCE, nbytes).exchange is not Exchange.RANKS

    def _make(self, request: Request) -> Plan:
        nbytes = _elements(request) * request.itemsize
        tuning = self._tuning(request.op, nbytes)
        segment = tuning.segment_bytes // request.itemsize
        wide = not self._gpus  # whose libraries round what an island adds
        schedule = build(request, self._topology, self._rank, segment, tuning.exchange, wide)
        lanes = frozenset(step.lane for step in schedule.steps)
        messages = Counter(step.peer for step in schedule.steps if isinstance(step, Put))
        most = max(messages.values(), default=0)
        order = runs(schedule.steps) if not segment else ()
        together = sum(isinstance(run[0], Put | Get | GetReduce) for run in order) <= 1
        return Plan(request, self._rank, nbytes, segment, tuning.exchange, schedule, order, together, lanes, most)

    def _tuning(self, op: Collective, nbytes: int) -> Tuning:
        return tune(op, nbytes, self._topology, self._link_bytes, self._at_once, gpus=self._gpus)


def _elements(request: Request) -> int:
    return request.count or sum(request.counts)
