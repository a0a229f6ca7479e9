"""What SLURM tells each task of a step: where rank 0 is, and how many tasks are on this node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from xvcomm.errors import ConfigError
from xvcomm.rendezvous.variables import integer

SLURM_PORTS = range(15000, 25000)
"""Ports for rank 0 of a SLURM step, below Linux's range of ephemeral ports."""


def started_by_srun(env: Mapping[str, str]) -> bool:
    """Whether srun has set the variables of MPI's process managers (`srun --mpi=pmi2`), and not mpirun inside a step."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    return env.get("PMI_JOBID") == step and bool(env.get("SLURM_PROCID"))


def tasks_of_node(env: Mapping[str, str]) -> int | None:
    """Number of tasks of this process's step, or part of a heterogeneous step, on its node; None if SLURM does not tell."""
    return len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else None


def slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of rank 0 of a SLURM step; the same on all ranks.

    The host is the first node of the step, or loopback if the step has one node; in a heterogeneous job the first of its first
    group that takes part; without a node list, the host on which srun was called. The port is one of `SLURM_PORTS`, derived
    from the job and step ids.

    Raises:
        ConfigError: SLURM's variables are missing or malformed, or this is rank 0 and on another node than they tell.
    """
    job, step = integer(env, "SLURM_JOB_ID"), integer(env, "SLURM_STEP_ID") if env.get("SLURM_STEP_ID") else 0
    port = SLURM_PORTS[(job * 31 + step) % len(SLURM_PORTS)]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        names = expand_nodes(nodes)
        return _first(env, names) if len(names) > 1 else "127.0.0.1", port
    if env.get("SLURM_LAUNCH_NODE_IPADDR"):
        return env["SLURM_LAUNCH_NODE_IPADDR"], port
    raise ConfigError(
        "SLURM_STEP_NODELIST is not set, so the host of rank 0 is unknown; start the ranks with srun, or set "
        "XVCOMM_STORE=tcp://host:port"
    )


def _first(env: Mapping[str, str], names: list[str]) -> str:
    """Of the nodes of a step that of rank 0. SLURM sorts the names, also those of a heterogeneous job's groups."""
    groups = range(integer(env, "SLURM_HET_SIZE")) if env.get("SLURM_HET_SIZE") else ()
    in_order = [env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}") or "" for group in groups]
    candidates = [name for text in in_order if text for name in expand_nodes(text) if name in names]
    found = next(iter(candidates or names))
    here = env.get("SLURMD_NODENAME")
    if env.get("SLURM_PROCID") == "0" and here and here != found:
        raise ConfigError(
            f"rank 0 is on node {here}, but the other ranks look for it on {found}, the first of SLURM's list: SLURM does not "
            "tell them the order of --distribution=arbitrary and of --het-group; leave it out, or set "
            "XVCOMM_STORE=tcp://host:port on all ranks, with the host of rank 0"
        )
    return found


def expand_nodes(text: str) -> list[str]:
    """Host names of a SLURM node list: `"node[01-03,7],login"` gives node01, node02, node03, node7 and login.

    Raises:
        ConfigError: the text is not a node list.
    """
    names: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or ",".join(parts) != text:
        raise ConfigError(f"node list {text!r}: expected names with numbers in brackets, for instance node[01-03,7]")
    for part in parts:
        names += _expand(part, text)
    return names


def _expand(part: str, text: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    numbers, _, tail = rest.partition("]")
    names = []
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        if not first.isdigit() or (dash and (not last.isdigit() or int(last) < int(first))):
            raise ConfigError(f"node list {text!r}: {span!r} is not a number or range, for instance 01-03")
        for number in range(int(first), int(last or first) + 1):
            names += [f"{head}{number:0{len(first)}d}{end}" for end in _expand(tail, text)]
    return names
