"""GPipe, 1F1B, interleaved 1F1B and zero-bubble H1 as pure functions of stages and micro-batches.

Each of these functions defines the order of computations per rank; `add_messages` then places the messages of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

from xvcomm.errors import ArgumentError
from xvcomm.pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Group,
    Layout,
    Message,
    Program,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
)
from xvcomm.pipeline.clock import Orders, Pace, timeline

_PACE = Pace(forward=4, backward=8, weight=4, message=1)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, 2019). Keeps the activations of every micro-batch.

    Raises:
        ArgumentError: a size is not positive.
    """

    def order(rank: int) -> Iterator[Compute]:
        yield from (Forward(m, 0) for m in range(micro_batches))
        yield from (Backward(m, 0) for m in range(micro_batches))

    return _schedule("gpipe", Layout(stages, micro_batches, 1), order)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B (Narayanan et al., PipeDream-Flush, 2021): GPipe's bubble, with activations of at most `stages - rank`
    micro-batches.

    Raises:
        ArgumentError: a size is not positive.
    """

    def order(rank: int) -> Iterator[Compute]:
        warmup = min(stages - rank - 1, micro_batches)
        yield from (Forward(m, 0) for m in range(warmup))
        for m in range(micro_batches):
            if warmup + m < micro_batches:
                yield Forward(warmup + m, 0)
            yield Backward(m, 0)

    return _schedule("1f1b", Layout(stages, micro_batches, 1), order)


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): divides the bubble by `chunks`, with more messages.

    Micro-batches pass through a chunk in rounds of `stages`. With one chunk it is 1F1B.

    Raises:
        ArgumentError: a size is not positive, or the number of micro-batches is not a multiple of the stages.
    """
    layout = Layout(stages, micro_batches, chunks)
    _check_sizes(layout)
    if micro_batches % stages:
        raise ArgumentError(
            f"interleaved 1F1B needs a multiple of the number of stages: {micro_batches} "
            f"micro-batches are not a multiple of {stages} stages; change one of them, or use 1f1b"
        )
    total = micro_batches * chunks

    def place(k: int) -> tuple[int, int]:
        rounds, within = divmod(k, layout.depth)
        chunk, m = divmod(within, stages)
        return rounds * stages + m, chunk

    def order(rank: int) -> Iterator[Compute]:
        ahead = stages - rank - 1
        warmup = min(ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages, total)
        yield from (Forward(*place(k)) for k in range(warmup))
        for k in range(total):
            if warmup + k < total:
                yield Forward(*place(warmup + k))
            micro_batch, chunk = place(k)
            yield Backward(micro_batch, chunks - 1 - chunk)

    return _schedule("interleaved", layout, order)


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): weight gradients fill the bubble.

    1F1B's order with the backward pass split in two. Rank r computes weight gradients r micro-batches late, so that every rank
    keeps the activations of at most `stages` micro-batches, like the first rank in 1F1B.

    Raises:
        ArgumentError: a size is not positive.
    """

    def order(rank: int) -> Iterator[Compute]:
        warmup = min(stages - rank - 1, micro_batches)
        yield from (Forward(m, 0) for m in range(warmup))
        for m in range(micro_batches):
            if warmup + m < micro_batches:
                yield Forward(warmup + m, 0)
            yield BackwardInput(m, 0)
            if m >= rank:
                yield BackwardWeight(m - rank, 0)
        yield from (BackwardWeight(m, 0) for m in range(max(micro_batches - rank, 0), micro_batches))

    return _schedule("zero-bubble", Layout(stages, micro_batches, 1), order)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def build(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Build the schedule called `name`, one of `SCHEDULES`.

    Args:
        name: `"gpipe"`, `"1f1b"`, `"interleaved"` or `"zero-bubble"`.
        chunks: virtual stages per rank; more than one requires `"interleaved"`.

    Raises:
        ArgumentError: no schedule has this name, or it does not support these sizes.
    """
    if name not in SCHEDULES:
        raise ArgumentError(f"unknown pipeline schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(stages, micro_batches, chunks)
    if chunks != 1:
        raise ArgumentError(f"schedule {name} has one chunk per rank, not {chunks}; use interleaved for more")
    return SCHEDULES[name](stages, micro_batches)


def _check_sizes(layout: Layout) -> None:
    for what in ("stages", "micro_batches", "chunks"):
        if getattr(layout, what) < 1:
            raise ArgumentError(f"a pipeline needs {what} >= 1, not {getattr(layout, what)}")


def _schedule(name: str, layout: Layout, order: Callable[[int], Iterator[Compute]]) -> Schedule:
    _check_sizes(layout)
    orders = [list(order(rank)) for rank in range(layout.stages)]
    programs = add_messages(layout, orders)
    return Schedule(layout.stages, layout.micro_batches, layout.chunks, name, programs)


def add_messages(layout: Layout, orders: Orders) -> tuple[Program, ...]:
    """Add the messages that pass on the results of the computations in `orders`, free of deadlock.

    The computations are timed on a model clock. A message is placed at the time at which its sender finishes computing: the
    send is posted then, the receive before the computation that the receiver runs at that time, so that they overlap. Messages
    of one rank at the same time form a group. So every rank posts its messages in the order of a common clock, which excludes
    deadlock even if each rank handles one message or group at a time.

    Raises:
        ScheduleError: the orders themselves deadlock.
    """
    events: list[list[tuple[float, Compute | Message]]] = [[] for _ in orders]
    for rank, (order, spans) in enumerate(zip(orders, timeline(layout, orders, _PACE), strict=True)):
        for compute, (_, end) in zip(order, spans, strict=True):
            events[rank].append((end, compute))
            value = layout.provides(rank, compute)
            target = None if value is None else layout.consumer(value)
            if value is None or target is None:
                continue
            peer, chunk = layout.owner(target)
            if peer == rank:
                continue
            send, recv = (SendGradient, RecvGradient) if value.gradient else (SendActivation, RecvActivation)
            events[rank].append((end, send(value.micro_batch, compute.chunk, peer)))
            events[peer].append((end, recv(value.micro_batch, chunk, rank)))
    return tuple(_program(timed) for timed in events)


def _program(events: list[tuple[float, Compute | Message]]) -> Program:
    items: list[Compute | Message | Group] = []
    for _, simultaneous in groupby(sorted(events, key=itemgetter(0)), key=itemgetter(0)):
        actions = [action for _, action in simultaneous]
        items += [action for action in actions if isinstance(action, Compute)]
        messages = tuple(action for action in actions if isinstance(action, Message))
        if messages:
            items.append(messages[0] if len(messages) == 1 else Group(messages))
    return tuple(items)
