"""What is put before blocks of Python that are no programs, so that they run; those of one job run in it one after the other."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fragment:
    """A block of a page.

    Attributes:
        page: path in the tree.
        first: what its first line begins with.
        job: which frameworks its job has: numpy, torch or jax.
        before: what the page takes for granted.
        after: what uses the block, and what must be true then.
    """

    page: str
    first: str
    job: str
    before: str = ""
    after: str = ""


_COMM = "import numpy as np, xvcomm\ncomm = xvcomm.init()\n"
_NEIGHBOURS = "right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size\n"
_GROUP = 'import torch, torch.distributed as dist\ndist.init_process_group("xvcomm")\n'
_JAX = "import jax, jax.numpy as jnp\nfrom xvcomm.adapters import jax as xvjax\ncomm = xvjax.init()\nx = jnp.ones(4)\n"
_STAGE = """
class Stage:
    input_spec = output_spec = ((4,), "float32")
    def forward(self, x, micro_batch): return 1.0 if comm.rank == comm.size - 1 else np.ones(4, np.float32)
    def backward(self, dy, micro_batch): return None if comm.rank == 0 else np.ones(4, np.float32)
    def empty(self, shape, dtype): return np.empty(shape, dtype)
stage = Stage()
"""
_CUPY = """
import contextlib, types
class cupy:
    class cuda:
        Device, Stream = lambda: types.SimpleNamespace(id=0), contextlib.nullcontext
class xvcomm:
    init = staticmethod(lambda device: comm)
x = np.ones(4); y = np.empty(4)
"""

FRAGMENTS = [
    Fragment(
        "README.md", "comm = xvcomm.init() ", "numpy",
        _COMM + _NEIGHBOURS + "x = np.ones(4); jx = np.ones(4); buf = np.empty(4)",
        "assert (buf == comm.size).all()",
    ),
    Fragment("README.md", "torch.distributed.init", "torch", "import torch", "assert xvjax and NCCLBackend and MPI"),
    Fragment(
        "docs/rdma.md", "with comm.register(", "numpy", _COMM + "steps = 3; gradients = np.ones(4)",
        "assert (gradients == comm.size**3).all()",
    ),
    Fragment(
        "docs/rdma.md", "class RegisteredStage(", "numpy", "import itertools\n" + _COMM + _STAGE,
        "from xvcomm import pipeline\nmade = RegisteredStage(comm, 3)\n"
        "schedule = pipeline.build('1f1b', stages=comm.size, micro_batches=3)\n"
        "losses = [pipeline.Pipeline(made, comm, schedule).run() for _ in range(2)]\n"
        "assert losses[0] == losses[1] and len(losses[0]) == (3 if comm.rank == comm.size - 1 else 0)\nmade.held.close()",
    ),
    Fragment(
        "docs/concepts.md", "found = comm.probe()", "numpy",
        _COMM + _NEIGHBOURS + "comm.send(np.arange(3), right)", "assert buffer.tolist() == [0, 1, 2]",
    ),
    Fragment("docs/concepts.md", "from xvcomm", "numpy", _COMM + _STAGE, "assert len(losses or [0] * 16) == 16"),
    Fragment("docs/cupy.md", "comm = xvcomm.init(device=", "numpy", _COMM + _NEIGHBOURS + _CUPY, "work.wait()"),
    Fragment(
        "docs/cupy.md", "from xvcomm.adapters.cupy", "numpy",
        _COMM + "in_array = np.ones(4); out_array = np.empty(4); n_devices, rank, peer = comm.size, comm.rank, comm.rank ^ 1\n"
        "comm.close()",
    ),
    Fragment(
        "docs/faults.md", "with xvcomm.init() as comm:", "numpy",
        "import numpy as np, xvcomm\nsteps = 3; done = []\ndef restore(step): pass\n"
        "def train(comm, step):\n    comm.all_reduce(np.ones(4)); done.append(step)",
        "assert done == [0, 1, 2]",
    ),
    Fragment(
        "docs/faults.md", "with xvcomm.init() as comm:", "numpy",
        "import numpy as np, xvcomm\nsteps = 3; done = []\ndef catch_up(comm, step): return step\n"
        "def train(comm, step):\n    comm.all_reduce(np.ones(4)); done.append(step)",
        "assert done == [0, 1, 2]",
    ),
    Fragment("docs/faults.md", "for record in comm.history()", "numpy", _COMM + "comm.barrier()", "assert record.describe()"),
    Fragment(
        "docs/gpus.md", "import os", "torch", "import torch\ntorch.cuda.set_device = lambda index: None", "assert comm.size == 2"
    ),
    Fragment(
        "docs/gpus.md", "work = comm.all_reduce", "numpy",
        _COMM + "gradient = np.ones(4); batch = None\ndef model(batch): return 0.0", "assert (gradient == comm.size).all()",
    ),
    Fragment("docs/gpus.md", "label = comm.topology", "numpy", _COMM, "assert same.size == comm.size; same.close()"),
    Fragment(
        "docs/mpi.md", "from xvcomm.adapters.mpi import MPI", "numpy",
        _COMM + _NEIGHBOURS + "x = np.ones(4); y = np.empty(4); comm.close()", "assert data == {'a': 7}",
    ),
    Fragment("docs/torch.md", "import torch.distributed as dist", "torch", "", "assert dist.get_world_size() == 2"),
    Fragment(
        "docs/torch.md", "from xvcomm.adapters.torch import communicator", "torch",
        _GROUP + "loss = torch.ones(2, requires_grad=True).sum()", "assert communicator().size == 2",
    ),
    Fragment(
        "docs/torch.md", "from xvcomm.adapters.torch import communicator", "torch",
        _GROUP + "dist.barrier()", "assert record.describe()",
    ),
    Fragment(
        "docs/torch.md", "from xvcomm.adapters.torch import functions", "torch",
        "import torch, xvcomm\nx = torch.ones(2, requires_grad=True)\ndef f(y): return y.sum()",
        "loss.backward(); assert x.grad.tolist() == [4.0, 4.0]",
    ),
    Fragment(
        "docs/jax.md", "import jax", "jax", "def loss_of(params, batch): return (params * batch).sum()",
        "gradient, loss = step(jax.numpy.ones(2), jax.numpy.full(2, comm.rank + 1.0)); assert gradient.tolist() == [1.5, 1.5]",
    ),
    Fragment("docs/jax.md", "@jax.jit", "jax", _JAX, "assert z.tolist() == [8.0] * 4"),
    Fragment(
        "docs/jax.md", "def first(w):", "jax", _JAX + "w0 = w1 = jnp.ones(4)\ndef loss_of(y): return y.sum()",
        "assert (dw0 if comm.rank == 0 else dw1).tolist() == [1.0] * 4",
    ),
    Fragment(
        "docs/jax.md", "def local(w, x):", "jax",
        _JAX + "from jax.sharding import Mesh, PartitionSpec as P\nmesh = Mesh(jax.devices()[:1], ('d',))\n"
        "def loss_of(w, x): return (w * x).sum()",
        "assert step(jnp.ones(()), x).shape == ()",
    ),
    Fragment("docs/jax.md", "with xvjax.named", "jax", _JAX + "step = xvjax.all_reduce", "assert y.tolist() == [2.0] * 4"),
]  # fmt: skip

NOT_RUN = {
    ("docs/from-nccl.md", "torch.distributed.init_process_group"): "needs transformers",
    ("docs/from-nccl.md", "from lightning"): "needs Lightning",
    ("docs/from-nccl.md", "deepspeed."): "needs DeepSpeed",
}  # fmt: skip
"""Blocks that are only compiled, and why."""


def main(blocks: Path) -> None:
    """Run the blocks of a file as a rank: pairs of a name and a program, each in a namespace of its own."""
    for name, program in json.loads(blocks.read_text()):
        namespace: dict[str, object] = {}
        try:
            exec(compile(program, name, "exec"), namespace)
        except Exception as error:
            error.add_note(f"in {name}:\n{program}")
            raise
        _close(namespace)


def _close(namespace: dict[str, object]) -> None:
    """End what a block has left open."""
    if torch := sys.modules.get("torch"):
        with contextlib.suppress(ValueError, AssertionError):
            torch.distributed.destroy_process_group()
    comm = namespace.get("comm")
    if hasattr(comm, "close"):
        comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
