"""What Kubernetes, JobSet and Volcano make of the files of deploy/kubernetes: the pods, and the command and variables of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
_SECRET = "a secret of the cluster"


@dataclass(frozen=True)
class Pod:
    """One pod: its name and DNS name, its container's command and arguments, and variables."""

    name: str
    address: str
    command: list[str]
    env: dict[str, str]


def documents(file: str) -> list[dict[str, Any]]:
    """The resources that a file describes."""
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def pods(file: str, **values: str) -> list[Pod]:
    """The pods of a file; values take the place of those that the file gives to variables."""
    first, *_ = documents(file)
    if first["kind"] == "Job":
        return list(_of_volcano(first, values))
    name = first["metadata"]["name"] if first["kind"] == "JobSet" else documents(file)[1]["metadata"]["name"]
    spec = first["spec"] if first["kind"] == "JobSet" else first["spec"]["template"]["spec"]
    return list(_of_jobset(name, spec, values))


def _of_jobset(name: str, spec: dict[str, Any], values: dict[str, str]) -> Iterator[Pod]:
    """The labels are those of https://github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2."""
    jobs = [(job, index) for job in spec["replicatedJobs"] for index in range(job["replicas"])]
    prefix = "jobset.sigs.k8s.io/"
    for number, (job, index) in enumerate(jobs):
        template = job["template"]["spec"]
        assert template["parallelism"] == template["completions"] == 1
        pod = f"{name}-{job['name']}-{index}-0"
        labels = {
            f"{prefix}jobset-name": name, f"{prefix}replicatedjob-name": job["name"], f"{prefix}job-index": str(index),
            f"{prefix}job-global-index": str(number), f"{prefix}global-replicas": str(len(jobs)),
        }  # fmt: skip
        annotations = dict(labels)
        if at := spec.get("coordinator"):
            annotations[f"{prefix}coordinator"] = (
                f"{name}-{at['replicatedJob']}-{at['jobIndex']}-{at['podIndex']}.{name}"
            )
        known = {"metadata.name": f"{pod}-x7k2p"}
        known |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
        known |= {f"metadata.annotations['{key}']": value for key, value in annotations.items()}
        (container,) = template["template"]["spec"]["containers"]
        yield _pod(pod, f"{pod}.{name}", container, known, values, {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": pod})


def _of_volcano(job: dict[str, Any], values: dict[str, str]) -> Iterator[Pod]:
    """The variables are those of Volcano's plug-in svc."""
    name, tasks = job["metadata"]["name"], job["spec"]["tasks"]
    assert "svc" in job["spec"]["plugins"]
    hosts = {task["name"]: [f"{name}-{task['name']}-{n}.{name}" for n in range(task["replicas"])] for task in tasks}
    own = {}
    for task, found in hosts.items():
        prefix = f"VC_{task.upper().replace('-', '_')}"
        own |= {f"{prefix}_HOSTS": ",".join(found), f"{prefix}_NUM": str(len(found))}
    for task in tasks:
        (container,) = task["template"]["spec"]["containers"]
        for address in hosts[task["name"]]:
            pod = address.partition(".")[0]
            yield _pod(pod, address, container, {"metadata.name": pod}, values, {**own, "HOSTNAME": pod})


def _pod(
    name: str,
    address: str,
    container: dict[str, Any],
    known: dict[str, str],
    values: dict[str, str],
    own: dict[str, str],
) -> Pod:
    env = dict(own)
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            env[variable["name"]] = known[source["fieldRef"]["fieldPath"]]
        else:
            env[variable["name"]] = _SECRET if "secretKeyRef" in source else variable["value"]
    assert values.keys() <= env.keys()
    env |= values
    env = {variable: _expanded(value, env) for variable, value in env.items()}
    return Pod(name, address, [_expanded(word, env) for word in container["command"]], env)


def _expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)
