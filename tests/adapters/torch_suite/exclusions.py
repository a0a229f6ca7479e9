"""Which tests do not apply, and why: torch's own gates, read without starting ranks; opened gates; exclusions by name.

A test that also fails with gloo on the same machine is not listed for that reason.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from results import EXCLUDED, NOT_APPLICABLE, NOT_RUN, Outcome
from torch.testing._internal.distributed import distributed_test

# Decorators of torch that end a rank at once where there is no GPU: the function that each wraps around a test.
NEEDS_GPU = (
    "skip_if_no_gpu.<locals>.wrapper",
    "skip_if_lt_x_gpu.<locals>.decorator.<locals>.wrapper",
    "nccl_skip_if_lt_x_gpu.<locals>.decorator.<locals>.wrapper",
)
NEEDS_EIGHT_RANKS = "skip_if_small_worldsize.<locals>.wrapper"
RANKS_OF_SUBGROUPS = 3

# Gates of DistributedTest older than what backends can do: gloo has all_to_all_single today. Opened for every backend.
OPENED = frozenset({"Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all"})

# Tests that do not apply to xvcomm in gloo's place; the reason of each. Under its own name none is excluded.
NOT_FOR_GLOOS_PLACE: MappingProxyType[str, str] = MappingProxyType(
    {
        "DistributedTest.test_ddp_logging_data_cpu": "DDP's logger in C++ takes a group that says `gloo` for one of "
        "Gloo's own, to read its number of threads",
    }
)

# Tests that do not apply to gloo: what another backend can do in addition is tested all the same.
EQUAL_SHAPES = "gloo's all_to_all takes lists of tensors of one shape"
NOT_FOR_GLOO: MappingProxyType[str, str] = MappingProxyType(
    {
        "DistributedTest.test_all_to_all": EQUAL_SHAPES,
        "DistributedTest.test_all_to_all_complex": EQUAL_SHAPES,
        "DistributedTest.test_all_to_all_full_group": EQUAL_SHAPES,
        "DistributedTest.test_all_to_all_group": EQUAL_SHAPES,
    }
)

# Tests that name the third rank, or divide the ranks among trainers and two more, and do not say so.
THREE_RANKS = ("DistAutogradTest.test_backward_node_failure_python_udf", "DdpUnderDistAutogradTest.")


def before_running(case: type[unittest.TestCase], name: str, backend: str, ranks: int) -> Outcome:
    """Reason why a test will not run: it is excluded or does not apply. `backend` as on the command line."""
    why = gate(case, name, backend, ranks)
    if why:
        return Outcome(NOT_APPLICABLE, reason=why)
    listed = {"gloo": NOT_FOR_GLOO, "xvcomm-as-gloo": NOT_FOR_GLOOS_PLACE}.get(backend, {})
    why = listed.get(f"{case.__name__}.{name}", "")
    return Outcome(EXCLUDED, reason=why) if why else Outcome(NOT_RUN, reason="out of time")


def gate(case: type[unittest.TestCase], name: str, backend: str, ranks: int) -> str:
    """torch's own reason to skip a test on this many ranks without a GPU; empty if there is none."""
    if backend == "xvcomm" and case.__module__ == "shipped" and case.__name__ != "DistributedTest":
        return "asks for gloo by name"
    if ranks < RANKS_OF_SUBGROUPS and f"{case.__name__}.{name}".startswith(THREE_RANKS):
        return "needs three ranks"
    test = getattr(case, name)
    if getattr(test, "__unittest_skip__", False):
        return str(test.__unittest_skip_why__)
    decorators = {function.__code__.co_qualname for function in layers(test)}
    if not decorators.isdisjoint(NEEDS_GPU):
        return "needs GPUs"
    if NEEDS_EIGHT_RANKS in decorators and ranks < RANKS_OF_SUBGROUPS:
        return "needs three ranks"
    return ""


def layers(function: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """A decorated function and the functions that it wraps, down to the innermost."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def open_gates() -> None:
    """Let tests run whose gate is in `OPENED`."""
    for test in vars(distributed_test.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", None) in OPENED:
            test.__unittest_skip__ = False


def expect_no_profiler_events() -> None:
    """Compare results only, no events, because gloo's C++ code records them under its own names."""
    for kind in ("", "CUDA_", "SEND_RECV_"):
        setattr(distributed_test, f"{kind}PROFILING_SUPPORTED_BACKENDS", [])
