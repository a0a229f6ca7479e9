"""The suites in torch's wheel that hold tests of process groups: `distributed_test`, and what joins groups with RPC.

* `distributed_test.DistributedTest`: collectives, messages, groups, objects, DDP. For any backend.
* `ddp_under_dist_autograd_test`: DDP together with RPC. It asks for gloo by name.
* `rpc.rpc_test`, `rpc.dist_autograd_test`: of their tests those that start a process group, also gloo by name.

The wheel's other files beside them hold fixtures (DTensor, FSDP, checkpoints, threads for ranks), or tests of RPC
alone. Torch's tests of FSDP, DTensor, pipelining and checkpoints lie in its repository only: `cases_*.py` here stand in
for them.
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
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

RANKS = int(os.environ["WORLD_SIZE"])
STARTS_A_GROUP = {"init_process_group", "initialize_pg"}


class DistributedTest(RanksOfOneTest, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's suite for any backend; which one, and how many ranks, it reads from BACKEND and WORLD_SIZE."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class _WithRpc(RanksOfOneTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    world_size = RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class DdpComparisonTest(_WithRpc, ddp_with_rpc.DdpComparisonTest):
    """Gradients of DDP beside those of distributed autograd: every rank a trainer."""


class DdpUnderDistAutogradTest(_WithRpc, ddp_with_rpc.DdpUnderDistAutogradTest):
    """DDP trainers, one rank that holds remote modules, and one that directs them."""


class RpcTest(_WithRpc, rpc_test.RpcTest):
    """RPC and a process group in one job."""


class TensorPipeAgentRpcTest(_WithRpc, rpc_test.TensorPipeAgentRpcTest):
    """The same, with what only the one agent of RPC can do."""


class DistAutogradTest(_WithRpc, dist_autograd_test.DistAutogradTest):
    """Distributed autograd whose ranks wait for each other in a process group's barrier."""


def share_out_ranks() -> None:
    """Make torch's six ranks of `DdpUnderDistAutogradTest` as many as asked for: trainers, remote, master."""
    ddp_with_rpc.WORLD_SIZE, ddp_with_rpc.NUM_TRAINERS = RANKS, RANKS - 2
    ddp_with_rpc.TRAINER_RANKS = list(range(RANKS - 2))
    ddp_with_rpc.REMOTE_WORKER_RANK, ddp_with_rpc.MASTER_RANK = RANKS - 2, RANKS - 1


def keep_tests_with_a_group(case: type[MultiProcessTestCase]) -> None:
    """Hide the tests of a class that start no process group themselves."""
    for name in TestLoader().getTestCaseNames(case):
        *_, innermost = layers(getattr(case, name))
        if STARTS_A_GROUP.isdisjoint(innermost.__code__.co_names):
            setattr(case, name, None)


share_out_ranks()
for _case in (RpcTest, TensorPipeAgentRpcTest, DistAutogradTest):
    keep_tests_with_a_group(_case)
CLASSES: tuple[type[MultiProcessTestCase], ...] = (
    DistributedTest, DdpComparisonTest, DdpUnderDistAutogradTest, RpcTest, TensorPipeAgentRpcTest, DistAutogradTest,
)  # fmt: skip
