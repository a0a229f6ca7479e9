"""The files of deploy/kubernetes: valid by the published types, and their containers' commands train, started as pods are."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="PyYAML reads the files")
from pods import FOLDER, documents, pods

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--micro-batches", "4", "--steps", "3", "--islands", "cuda:2,rocm:2", "--pp", "2", "--check"),
)
FILES = ("jobset.yaml", "jobset-rdma.yaml", "trainer.yaml", "volcano.yaml")
IN_POD = 'mount -t tmpfs tmpfs /dev/shm && hostname "$1" && shift && exec "$@"'
VOLCANO = {
    "spec": {
        "schedulerName": str, "minAvailable": int, "volumes": list, "tasks": list, "policies": list, "plugins": dict,
        "runningEstimate": str, "queue": str, "maxRetry": int, "ttlSecondsAfterFinished": int, "priorityClassName": str,
        "minSuccess": int, "networkTopology": dict,
    },
    "task": {
        "name": str, "replicas": int, "minAvailable": int, "template": dict, "policies": list, "topologyPolicy": str,
        "maxRetry": int, "dependsOn": dict, "partitionPolicy": dict,
    },
    "policy": {"action": str, "event": str, "events": list, "exitCode": int, "timeout": str},
}  # fmt: skip
"""Fields of batch.volcano.sh/v1alpha1 and their types, from its definition: no package has them."""
EVENTS = {"*", "PodPending", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed", "JobUpdated"}
ACTIONS = {
    "AbortJob", "RestartJob", "RestartTask", "RestartPod", "RestartPartition", "TerminateJob", "CompleteJob", "ResumeJob",
}  # fmt: skip
"""What Volcano's webhook lets a policy name."""
SVC = {"publish-not-ready-addresses", "disable-network-policy", "inject-hosts-env"}
"""Flags of its plug-in svc."""


def test_all_files_are_tested():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FILES)


def test_types():
    """Each resource is what its published type says, without unknown fields; of Volcano's job, the pods are."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the types of Kubernetes, JobSet and Trainer")
    for file in FILES:
        for resource in documents(file):
            if resource["kind"] == "Job":
                for task in resource["spec"]["tasks"]:
                    valid(models.IoK8sApiCoreV1PodTemplateSpec, task["template"])
                continue
            group = "Jobset" if resource["kind"] == "JobSet" else "Trainer"
            version = resource["apiVersion"].partition("/")[2].capitalize()
            valid(getattr(models, f"{group}{version}{resource['kind']}"), resource)


def valid(model, resource):
    """Compare a resource with what its type keeps of it."""
    assert model.from_dict(resource).to_dict() == resource


def test_volcano():
    """Fields, events and actions of Volcano's job, and that all pods must be there."""
    (job,) = documents("volcano.yaml")
    spec = job["spec"]
    assert job["apiVersion"] == "batch.volcano.sh/v1alpha1"
    policies = [*spec["policies"], *(policy for task in spec["tasks"] for policy in task.get("policies", []))]
    for kind, parts in {"spec": [spec], "task": spec["tasks"], "policy": policies}.items():
        for part in parts:
            assert {name for name, value in part.items() if type(value) is not VOLCANO[kind].get(name)} == set()
    assert {policy["event"] for policy in policies} <= EVENTS
    assert {policy["action"] for policy in policies} <= ACTIONS
    assert {flag.strip("-").partition("=")[0] for flag in spec["plugins"]["svc"]} <= SVC
    assert spec["minAvailable"] == sum(task["replicas"] for task in spec["tasks"])


def test_no_task_of_volcano_ends_the_job():
    """`CompleteJob` stops the pods of the other tasks; without it the job is complete when all pods are."""
    (job,) = documents("volcano.yaml")
    assert len(job["spec"]["tasks"]) > 1
    assert "CompleteJob" not in {
        policy["action"] for part in (job["spec"], *job["spec"]["tasks"]) for policy in part.get("policies", [])
    }


def test_capabilities_are_added_for_root():
    """Kubernetes has no ambient capabilities: another user does not get what is added."""
    contexts = [context for file in FILES for context in values(documents(file), "securityContext")]
    adding = [context for context in contexts if context.get("capabilities", {}).get("add")]
    assert adding and {context.get("runAsUser") for context in adding} == {0}


def values(tree, key):
    """What stands under a key, anywhere in a tree of dicts and lists."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if name == key:
            yield value
        elif isinstance(value, (dict, list)):
            yield from values(value, key)


def begin(hosts, pod, side, *arguments, env):
    """Start a pod's container on a node: hostname and shared memory of its own, its command, these arguments."""
    hosts.name(side, pod.name)  # as the kubelet writes it into /etc/hosts
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    enter = ("unshare", "--mount", "--uts", "sh", "-ec", IN_POD, "sh", pod.name)
    return hosts.begin(side, *enter, *pod.command, *arguments, env={**pod.env, **own, **env})


@pytest.mark.parametrize(
    "file",
    ["jobset.yaml", *(pytest.param(file, marks=pytest.mark.clusters) for file in FILES if file != "jobset.yaml")],
)
def test_training(nodes, tmp_path, file):
    """Half of the pods on each of two nodes; their DNS names come after their start. The losses of one process."""
    one_each = len(pods(file)) == 4
    if not one_each:
        pytest.importorskip("torch")
    found = pods(file, **({} if one_each else {"GPUS": "2"}))
    plain = {"XVCOMM_METRICS": ""}
    started = [
        begin(nodes, pod, number * 2 // len(found), TRAIN, *SMALL, "--out", tmp_path, env=plain)
        for number, pod in enumerate(found)
    ]
    for number, pod in enumerate(found):
        nodes.name(number * 2 // len(found), pod.address)
    printed = [process.communicate(timeout=200)[0] for process in started]
    assert not any(process.returncode for process in started), "\n---\n".join(printed)
    *_, last = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert last["check"]["passed"]


def test_probe(tmp_path):
    """The address that the kubelet asks is one that a rank answers."""
    pytest.importorskip("prometheus_client")
    import xvcomm

    for pod in pods("jobset.yaml"):
        assert pod.env["XVCOMM_METRICS"] == ":9400"
    (container,) = documents("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    probe = container["livenessProbe"]["httpGet"]
    with (
        xvcomm.init(env={"XVCOMM_DEVICE": "host", "XVCOMM_METRICS": f"127.0.0.1:{probe['port']}"}),
        urllib.request.urlopen(f"http://127.0.0.1:{probe['port']}{probe['path']}", timeout=10) as answer,
    ):
        assert answer.status == 200
