"""What a pod of a JobSet, or of a Volcano job, knows of its place among the pods: one rank a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xvcomm.errors import ConfigError
from xvcomm.rendezvous.variables import integer

PORT = 29500
"""Port of rank 0, unless `MASTER_PORT` says another."""
_INDEX, _REPLICAS, _COORDINATOR = "JOBSET_JOB_GLOBAL_INDEX", "JOBSET_GLOBAL_REPLICAS", "JOBSET_COORDINATOR"


@dataclass(frozen=True, slots=True)
class Pod:
    """Place of this pod.

    Attributes:
        host: DNS name of rank 0's pod.
        port: on which rank 0 serves.
    """

    rank: int
    size: int
    host: str
    port: int


def this_pod(env: Mapping[str, str]) -> Pod | None:
    """This process's place, from JobSet's labels or Volcano's variables; None outside of both.

    JobSet's labels become variables by the downward API: `JOBSET_JOB_GLOBAL_INDEX`, `JOBSET_GLOBAL_REPLICAS`,
    `JOBSET_COORDINATOR`. Volcano's plug-in svc sets `VC_<TASK>_HOSTS`; a task's pods have consecutive ranks, and tasks are in
    alphabetical order. The pod's name is `POD_NAME`, else `HOSTNAME`, which is the node's with hostNetwork.

    Raises:
        ConfigError: a variable is missing or malformed, or contradicts the others.
    """
    port = integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else PORT
    if env.get(_INDEX):
        return _of_jobset(env, port)
    tasks = sorted(name for name in env if name.startswith("VC_") and name.endswith("_HOSTS") and env[name])
    return _of_volcano(env, [host for task in tasks for host in env[task].split(",")], port) if tasks else None


def _of_jobset(env: Mapping[str, str], port: int) -> Pod:
    rank, size = integer(env, _INDEX), integer(env, _REPLICAS)
    if not 0 <= rank < size:
        raise ConfigError(f"{_INDEX}={rank} does not fit {_REPLICAS}={size}; take both from JobSet's labels")
    if env.get("JOB_COMPLETION_INDEX", "0") != "0":
        raise ConfigError(
            f"JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}: a job of the JobSet has several pods, so its index is no rank; "
            "set `replicas` of the replicated job, and 1 for `parallelism` and `completions`, or start the ranks with torchrun"
        )
    if not env.get(_COORDINATOR):
        raise ConfigError(
            f"{_COORDINATOR} is not set, so the pod of rank 0 is unknown; set `coordinator` of the JobSet to the first pod, and "
            "take the variable from the annotation jobset.sigs.k8s.io/coordinator, or set XVCOMM_STORE=tcp://host:port"
        )
    return Pod(rank, size, env[_COORDINATOR], port)


def _of_volcano(env: Mapping[str, str], hosts: list[str], port: int) -> Pod:
    name = env.get("POD_NAME") or env.get("HOSTNAME") or ""
    places = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == name]
    if len(places) != 1:
        raise ConfigError(
            f"the pod {name!r} is not among those of VC_*_HOSTS, {', '.join(hosts)}; with hostNetwork set POD_NAME from "
            "metadata.name, or set XVCOMM_RANK, XVCOMM_SIZE and XVCOMM_STORE"
        )
    return Pod(places[0], len(hosts), hosts[0], port)
