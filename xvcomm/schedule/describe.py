"""Schedules as text, for `xvcomm plan` and error messages."""

from __future__ import annotations

from xvcomm.errors import ScheduleError
from xvcomm.schedule.steps import Copy, Get, GetReduce, Native, Put, Reduce, Scale, Schedule, Span, Step

_LONGEST = 8  # longer lists of counts are cut here


def span_text(span: Span) -> str:
    """For instance `in[0:16]`."""
    return f"{span.buf.value}[{span.start}:{span.stop}]"


def step_text(step: Step) -> str:
    """What a step does, without its lane and dependencies."""
    match step:
        case Native(op=op, src=src, dst=dst, counts=counts, recv_counts=recv_counts, root=root):
            text = f"{op.value} {span_text(src)} -> {span_text(dst)}"
            text += f" counts {_counts_text(counts)}" if counts else ""
            text += f" from {_counts_text(recv_counts)}" if recv_counts else ""
            return text + (f" root {root}" if root >= 0 else "")
        case Put(peer=peer, src=src):
            return f"put {span_text(src)} -> rank {peer}"
        case Get(peer=peer, dst=dst):
            return f"get rank {peer} -> {span_text(dst)}"
        case GetReduce(peer=peer, own=own, dst=dst, remote_first=remote_first):
            operand = "" if own == dst else f" and {span_text(own)}"
            return f"get_reduce rank {peer}{operand} -> {span_text(dst)}" + (" remote first" if remote_first else "")
        case Copy(src=src, dst=dst):
            return f"copy {span_text(src)} -> {span_text(dst)}"
        case Reduce(srcs=srcs, dst=dst, average=average):
            return f"{'average' if average else 'reduce'} {', '.join(map(span_text, srcs))} -> {span_text(dst)}"
        case Scale(src=src, dst=dst, factor=factor):
            return f"scale {span_text(src)} -> {span_text(dst)} by {factor.value}"
    raise ScheduleError(f"{step!r} is not a step; a schedule consists of the steps of steps.py")


def lines(schedule: Schedule) -> list[str]:
    """One line per step: index, lane, what it does, and the steps it waits for."""
    return [
        f"{i:4d}  {step.lane.value:<6}  {step_text(step)}"
        + (f"  after {', '.join(map(str, step.after))}" if step.after else "")
        for i, step in enumerate(schedule.steps)
    ]


def _counts_text(counts: tuple[int, ...]) -> str:
    if len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    shown = ", ".join(map(str, counts[:_LONGEST]))
    return f"({shown}, ...)" if len(counts) > _LONGEST else f"({shown})"
