"""The test suites in torch's wheel that use process groups: `distributed_test`, and those that combine groups with RPC.

* `distributed_test.DistributedTest`: collectives, messages, groups, objects, DDP. For any backend.
* `ddp_under_dist_autograd_test`: DDP together with RPC. It requests gloo by name.
* `rpc.rpc_test`, `rpc.dist_autograd_test`: only their tests that start a process group, also gloo by name.

The wheel's other files contain fixtures (DTensor, FSDP, checkpoints, threads as ranks), or tests of RPC
only. Torch's tests of FSDP, DTensor, pipelining and checkpoints are only in its repository: `cases_*.py` here replace
them.
"""

from __future__ import annotations

import os
from unittest import TestLoader

from exclusions import layers
from ranks import RanksOfOneTest
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp_with_rpc
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.rpc import dist_autograd_test, rpc_test
from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as tensorpipe

RANKS = int(os.environ["WORLD_SIZE"])
STARTS_A_GROUP = {"init_process_group", "initialize_pg"}


class DistributedTest(RanksOfOneTest, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's suite for any backend; it reads backend and number of ranks from BACKEND and WORLD_SIZE."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class _WithRpc(RanksOfOneTest, tensorpipe.TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    world_size = RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class DdpComparisonTest(_WithRpc, ddp_with_rpc.DdpComparisonTest):
    """Gradients of DDP against those of distributed autograd: every rank is a trainer."""


class DdpUnderDistAutogradTest(_WithRpc, ddp_with_rpc.DdpUnderDistAutogradTest):
    """DDP trainers, one rank that holds remote modules, and one that directs them."""


class RpcTest(_WithRpc, rpc_test.RpcTest):
    """RPC and a process group in one job."""


class TensorPipeAgentRpcTest(_WithRpc, rpc_test.TensorPipeAgentRpcTest):
    """The same, with the tests that require TensorPipe's agent."""


class DistAutogradTest(_WithRpc, dist_autograd_test.DistAutogradTest):
    """Distributed autograd whose ranks synchronise by a process group's barrier."""


def share_out_ranks() -> None:
    """Reduce the six ranks of torch's `DdpUnderDistAutogradTest` to the requested number: trainers, remote, master."""
    ddp_with_rpc.WORLD_SIZE, ddp_with_rpc.NUM_TRAINERS = RANKS, RANKS - 2
    ddp_with_rpc.TRAINER_RANKS = list(range(RANKS - 2))
    ddp_with_rpc.REMOTE_WORKER_RANK, ddp_with_rpc.MASTER_RANK = RANKS - 2, RANKS - 1


def keep_tests_with_a_group(case: type[MultiProcessTestCase]) -> None:
    """Hide the tests of a class that start no process group themselves."""
    for name in TestLoader().getTestCaseNames(case):
        *_, innermost = layers(getattr(case, name))
        if STARTS_A_GROUP.isdisjoint(innermost.__code__.co_names):
            setattr(case, name, None)


def send_over_sockets() -> None:
    """Let RPC use no shared memory: its thread for that polls without a pause, on the cores that the ranks need."""
    for module in (tensorpipe, rpc_test):
        module.tp_transports = lambda: ["uv"]


share_out_ranks()
send_over_sockets()
for _case in (RpcTest, TensorPipeAgentRpcTest, DistAutogradTest):
    keep_tests_with_a_group(_case)
CLASSES: tuple[type[MultiProcessTestCase], ...] = (
    DistributedTest, DdpComparisonTest, DdpUnderDistAutogradTest, RpcTest, TensorPipeAgentRpcTest, DistAutogradTest,
)  # fmt: skip
