"""Jobs on a Ray of two nodes, run by a Python that has it: `ray_jobs.py JOB FOLDER`. The nodes are processes of this machine.

The environment variables of a node stand for the machine: its workers are on a host, and in an island, of their own.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, EXAMPLES = ROOT / "deploy" / "ray", ROOT / "examples"
sys.path[:0] = [str(DEPLOY), str(EXAMPLES)]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

WORKERS = {"nvidia": 2, "amd": 2}


def nodes():
    """A Ray of two nodes with a label each."""
    cluster = Cluster()
    for vendor, host, island in (("nvidia", "a", "cuda"), ("amd", "b", "rocm")):
        own = {"XVCOMM_HOST": host, "XVCOMM_ISLAND": island}
        cluster.add_node(num_cpus=4, labels={"vendor": vendor}, env_vars={**os.environ, **own}, include_dashboard=False)
    ray.init(
        address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}, log_to_driver=False
    )
    return cluster


def losses(config):
    """On each worker: the training of examples/torch_ddp.py in its own process group, which Ray has made."""
    import argparse

    import torch
    import torch_ddp
    from llama.config import Model

    model, device = Model(2, 16, 2, 2, 24, 16), torch.device("cpu")
    settings = argparse.Namespace(mode="ddp", steps=3, micro_batches=2, sequences=2, seed=0, lr=1e-3, context=16)
    found = torch_ddp.train(model, settings, device, None)
    from ray import train

    context = train.get_context()
    if context.get_world_rank() == 0:
        size = context.get_world_size()
        alone = torch_ddp.train_alone(model, settings, device, torch_ddp.layout("ddp", size)[1])
        Path(config["folder"], "losses.json").write_text(
            json.dumps({"backend": torch.distributed.get_backend(), "size": size, "together": found, "alone": alone})
        )


def train(folder):
    """The trainer over two nodes and islands."""
    from train import trainer

    trainer(losses, WORKERS, {"folder": folder}, folder, gpus=False).fit()


def killed(folder):
    """A worker of deploy/ray/train.py is killed after some steps: the group is started again, and goes on."""
    from train import loop, trainer

    killed = []

    def kill():
        while len(list(Path(folder).glob("**/state.pt"))) < 2:
            time.sleep(0.05)
        workers = [p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"] or ())]
        killed.append(len(workers))
        workers[-1].kill()

    threading.Thread(target=kill, daemon=True).start()
    result = trainer(loop, {"nvidia": 1, "amd": 1}, {"steps": 20}, folder, gpus=False).fit()
    history = result.metrics_dataframe.set_index("step")["loss"].to_dict()
    print(json.dumps({"killed": killed, "losses": [history[step] for step in range(20)], "alone": alone(20)}))


def alone(steps):
    """The losses of deploy/ray/train.py in one process."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(data), data.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def actors(folder):
    """One of four actors is killed in its loop: the others shrink."""
    import actors as deployed

    python = Path(folder, "amd-python")
    python.write_text(f'#!/bin/sh\ntouch {folder}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    ranks = deployed.start(WORKERS, "group", {"amd": str(python)}, num_cpus=1)
    ray.get([actor.__ray_ready__.remote() for actor in ranks])
    running = [actor.train.remote(20_000) for actor in ranks]
    time.sleep(1)
    ray.kill(ranks[1])
    print(json.dumps(ray.get([running[rank] for rank in (0, 2, 3)])))


@ray.remote
class Member:
    """An actor of `ray.util.collective`."""

    def __init__(self):
        import xvcomm_ray

        xvcomm_ray.register()

    def all(self, rank):
        """Every operation; what it gives."""
        from ray.util import collective as col

        x = np.full(4, rank + 1.0)
        col.allreduce(x, "g")
        largest = np.full(4, float(rank))
        col.allreduce(largest, "g", types_max())
        y = np.full(2, float(rank))
        col.broadcast(y, 1, "g")
        z = np.full(2, rank + 1.0)
        col.reduce(z, 0, "g")
        parts = [np.zeros(2) for _ in range(2)]
        col.allgather(parts, np.full(2, float(rank)), "g")
        own = np.zeros(2)
        col.reducescatter(own, [np.full(2, 1.0 + rank), np.full(2, 10.0 + rank)], "g")
        got = np.zeros(3)
        (col.send(np.arange(3.0), 1, "g") if rank == 0 else col.recv(got, 0, "g"))
        col.barrier("g")
        found = [col.get_rank("g"), col.get_collective_group_size("g"), x[0], largest[0], y[0], z[0]]
        col.destroy_collective_group("g")
        return [*map(float, found), [float(p[0]) for p in parts], float(own[0]), got.tolist()]


def types_max():
    """Ray's name of the maximum."""
    from ray.util.collective.types import ReduceOp

    return ReduceOp.MAX


def collective(folder):
    """`ray.util.collective` by the backend of deploy/ray/xvcomm_ray.py."""
    import xvcomm_ray
    from ray.util import collective as col

    xvcomm_ray.register()
    members = [Member.options(label_selector={"vendor": v}).remote() for v in WORKERS]
    for _ in range(2):  # a group's name can be used again
        col.create_collective_group(members, 2, [0, 1], backend="xvcomm", group_name="g")
        print(json.dumps(ray.get([member.all.remote(rank) for rank, member in enumerate(members)])))


if __name__ == "__main__":
    cluster = nodes()
    try:
        globals()[sys.argv[1]](sys.argv[2])
    finally:
        begun = psutil.Process().children(recursive=True)
        ray.shutdown()
        cluster.shutdown()
        psutil.wait_procs(begun, timeout=30)
