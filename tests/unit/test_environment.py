"""Variables of launchers in the environment, valid and invalid."""

from __future__ import annotations

import pytest

from xvcomm.config import Config
from xvcomm.errors import ConfigError
from xvcomm.rendezvous.environment import LauncherEnvironment, discover
from xvcomm.rendezvous.kubernetes import this_pod
from xvcomm.rendezvous.slurm import SLURM_PORTS, expand_nodes, slurm_address

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
JOBSET = {
    "JOBSET_JOB_GLOBAL_INDEX": "2", "JOBSET_GLOBAL_REPLICAS": "4", "JOBSET_COORDINATOR": "t-cuda-0-0.t",
    "JOB_COMPLETION_INDEX": "0",
}  # fmt: skip
VOLCANO = {"VC_ROCM_HOSTS": "t-rocm-0.t", "VC_CUDA_HOSTS": "t-cuda-0.t,t-cuda-1.t", "HOSTNAME": "t-rocm-0"}
JAX = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}


def found(env: dict[str, str]) -> LauncherEnvironment:
    return discover(env, Config.from_env(env))


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, LauncherEnvironment(0, 1, 0, 1, "single")),
        ({"RANK": "", "WORLD_SIZE": ""}, LauncherEnvironment(0, 1, 0, 1, "single")),
        ({"XVCOMM_RANK": "1", "XVCOMM_SIZE": "2"}, LauncherEnvironment(1, 2, None, None, "explicit")),
        (TORCHRUN, LauncherEnvironment(3, 4, 1, 2, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, LauncherEnvironment(0, 2, None, None, "torchrun")),
        (OPENMPI, LauncherEnvironment(2, 8, 0, 2, "mpi")),
        (MPICH, LauncherEnvironment(1, 2, 1, 2, "mpi")),
        (SLURM, LauncherEnvironment(5, 8, 1, None, "slurm")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, LauncherEnvironment(5, 6, 1, None, "slurm")),
        ({**SLURM, "SLURM_GTIDS": "4,5,6"}, LauncherEnvironment(5, 8, 1, 3, "slurm")),
        ({**SLURM, "SLURM_STEP_ID": ""}, LauncherEnvironment(0, 1, 0, 1, "single")),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, LauncherEnvironment(0, 1, 0, 1, "single")),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "77.0"}, LauncherEnvironment(5, 8, 1, None, "slurm")),
        ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, LauncherEnvironment(1, 2, None, None, "mpi")),
        (JAX, LauncherEnvironment(1, 2, None, None, "jax")),
        (JOBSET, LauncherEnvironment(2, 4, None, None, "kubernetes")),
        (VOLCANO, LauncherEnvironment(2, 3, None, None, "kubernetes")),
        ({**VOLCANO, "HOSTNAME": "node7", "POD_NAME": "t-cuda-1"}, LauncherEnvironment(1, 3, None, None, "kubernetes")),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, LauncherEnvironment(0, 1, 0, 1, "single")),
        ({"PMIX_RANK": "1", "XVCOMM_SIZE": "2"}, LauncherEnvironment(1, 2, None, None, "mpi")),
    ],
)
def test_each_launcher(env: dict[str, str], launch: LauncherEnvironment) -> None:
    assert found(env) == launch


def test_order_of_launchers() -> None:
    everything = {**VOLCANO, **JAX, **SLURM, **MPICH, **OPENMPI, **TORCHRUN, "XVCOMM_RANK": "0", "XVCOMM_SIZE": "9"}
    launchers = []
    for known in ({"XVCOMM_RANK": "", "XVCOMM_SIZE": ""}, TORCHRUN, OPENMPI, MPICH, SLURM, JAX, VOLCANO):
        launchers.append(found(everything).name)
        everything = {name: value for name, value in everything.items() if name not in known}
    assert launchers == ["explicit", "torchrun", "mpi", "mpi", "slurm", "jax", "kubernetes"]


def test_single_numbers_replace_the_launchers() -> None:
    assert found({**TORCHRUN, "XVCOMM_RANK": "0", "XVCOMM_LOCAL_RANK": "0"}) == LauncherEnvironment(
        0, 4, 0, 2, "torchrun"
    )
    assert found({**TORCHRUN, "XVCOMM_LOCAL_SIZE": "4"}) == LauncherEnvironment(3, 4, 1, 4, "torchrun")


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE", "XVCOMM_RANK"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "XVCOMM_SIZE"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'", "integer"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "WORLD_SIZE=4"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE=2", "PMI_RANK"]),
        ({"PMIX_RANK": "1"}, ["PMIX_RANK=1", "XVCOMM_SIZE"]),
        ({"PMIX_RANK": "x", "XVCOMM_SIZE": "2"}, ["PMIX_RANK='x'"]),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, ["SLURM_PROCID=0", "SLURM_NTASKS"]),
        ({"JAX_PROCESS_ID": "0"}, ["JAX_PROCESS_ID=0", "JAX_NUM_PROCESSES"]),
        ({"JAX_NUM_PROCESSES": "2"}, ["JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID"]),
        ({**JOBSET, "JOBSET_GLOBAL_REPLICAS": ""}, ["JOBSET_GLOBAL_REPLICAS=''"]),
        ({**JOBSET, "JOBSET_GLOBAL_REPLICAS": "2"}, ["JOBSET_JOB_GLOBAL_INDEX=2", "JOBSET_GLOBAL_REPLICAS=2"]),
        ({**JOBSET, "JOBSET_COORDINATOR": ""}, ["JOBSET_COORDINATOR", "coordinator"]),
        ({**JOBSET, "JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX=1", "parallelism"]),
        ({**VOLCANO, "HOSTNAME": "node7"}, ["'node7'", "t-cuda-1.t", "POD_NAME"]),
        ({"XVCOMM_RANK": "1"}, ["XVCOMM_RANK=1", "XVCOMM_SIZE"]),
        ({"XVCOMM_SIZE": "2"}, ["XVCOMM_SIZE=2", "XVCOMM_RANK"]),
        ({"XVCOMM_RANK": "2", "XVCOMM_SIZE": "2"}, ["XVCOMM_RANK=2", "XVCOMM_SIZE=2"]),
        ({"XVCOMM_RANK": "0", "XVCOMM_SIZE": "2", "XVCOMM_LOCAL_SIZE": "3"}, ["XVCOMM_LOCAL_SIZE=3", "XVCOMM_SIZE=2"]),
        ({**TORCHRUN, "XVCOMM_RANK": "7"}, ["rank=7", "size=4"]),
    ],
)
def test_wrong_numbers_are_named(env: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        found(env)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("a,b-2", ["a", "b-2"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[8-10].x,m", ["n8.x", "n9.x", "n10.x", "m"]),
        ("r[0-1]n[1,3]", ["r0n1", "r0n3", "r1n1", "r1n3"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n]1", "n[a-b]", "n[3-1]", "n[]", "a,,b", "", "n[1,]"])
def test_wrong_node_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        expand_nodes(text)


def test_where_rank_0_of_a_slurm_step_serves() -> None:
    host, port = slurm_address({**SLURM, "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_JOB_NODELIST": "node[01-04]"})
    assert host == "node03" and port in SLURM_PORTS
    assert slurm_address({**SLURM, "SLURM_JOB_NODELIST": "node7"}) == ("127.0.0.1", port)
    assert slurm_address({**SLURM, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}) == ("10.0.0.1", port)
    assert slurm_address({"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node7"}) == ("127.0.0.1", port)
    assert slurm_address({**SLURM, "SLURM_STEP_ID": "1", "SLURM_JOB_NODELIST": "a"})[1] != port
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST.*srun"):
        slurm_address(SLURM)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID=''"):
        slurm_address({"SLURM_JOB_NODELIST": "a"})


def test_where_rank_0_of_a_heterogeneous_job_serves() -> None:
    job = {
        **SLURM, "SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": "a[1-2],b[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "b[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "a[1-2]",
    }  # fmt: skip
    assert slurm_address(job)[0] == "b1"
    assert slurm_address({**job, "SLURM_STEP_NODELIST": "a[1-2],b2"})[0] == "b2"
    assert slurm_address({**job, "SLURM_STEP_NODELIST": "a[1-2]"})[0] == "a1"


def test_rank_0_on_another_node_than_the_others_look_for_it() -> None:
    step = {**SLURM, "SLURM_STEP_NODELIST": "a,b", "SLURMD_NODENAME": "b"}
    assert slurm_address(step)[0] == "a"
    with pytest.raises(ConfigError, match=r"on node b.*on a.*arbitrary.*XVCOMM_STORE=tcp://host:port"):
        slurm_address({**step, "SLURM_PROCID": "0"})


def test_where_rank_0_of_pods_serves() -> None:
    jobset, volcano = this_pod({**JOBSET, "MASTER_PORT": "29777"}), this_pod(VOLCANO)
    assert jobset is not None and (jobset.host, jobset.port) == ("t-cuda-0-0.t", 29777)
    assert volcano is not None and (volcano.host, volcano.port) == ("t-cuda-0.t", 29500)
