"""Pipeline schedules as data: built once, checked before the first step, run with stages of any framework.

The usual loop, on every rank:

    schedule = pipeline.build("1f1b", stages=4, micro_batches=16)
    pipe = pipeline.Pipeline(stage, comm, schedule)  # compares the ranks' arguments, checks the schedule
    for batch in batches:
        losses = pipe.run()
"""

from xvcomm.pipeline.actions import (
    Action,
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
from xvcomm.pipeline.check import Report, check
from xvcomm.pipeline.clock import bubble
from xvcomm.pipeline.run import Pipeline, run
from xvcomm.pipeline.schedules import (
    SCHEDULES,
    add_messages,
    build,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from xvcomm.pipeline.stage import Spec, SplitBackward, Stage, StageSpec

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Forward",
    "Group",
    "Layout",
    "Message",
    "Pipeline",
    "Program",
    "RecvActivation",
    "RecvGradient",
    "Report",
    "Schedule",
    "SendActivation",
    "SendGradient",
    "Spec",
    "SplitBackward",
    "Stage",
    "StageSpec",
    "add_messages",
    "bubble",
    "build",
    "check",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "run",
    "zero_bubble",
]
