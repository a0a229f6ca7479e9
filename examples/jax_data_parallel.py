"""Data-parallel training in JAX over islands: one jitted step whose gradients are averaged over all ranks.

    xvcomm run -n 4 --islands cuda:2,rocm:2 -- examples/jax_data_parallel.py --check

The model predicts the next byte of the Python standard library's source code from the preceding bytes. `--check` also trains
in one process on the samples of all ranks, and exits with code 1 unless the losses agree to 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llama.data import corpus

from xvcomm.adapters import jax as xvjax

CONTEXT, WIDTH, BYTES = 16, 128, 256
RATE = 0.2
TOLERANCE = 1e-5
Parameters = dict[str, jax.Array]


def initial(seed: int) -> Parameters:
    """Initial parameters (an embedding and two layers), the same on every rank."""
    draw = np.random.default_rng(seed)
    shapes = {"embed": (BYTES, 16), "hidden": (CONTEXT * 16, WIDTH), "out": (WIDTH, BYTES)}
    return {n: jnp.asarray(draw.normal(0, s[0] ** -0.5, s), jnp.float32) for n, s in shapes.items()}


def loss_of(parameters: Parameters, text: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of each window's last byte; windows have shape (samples, CONTEXT + 1)."""
    embedded = parameters["embed"][text[:, :-1]].reshape(len(text), -1)
    logits = jnp.tanh(embedded @ parameters["hidden"]) @ parameters["out"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, -1:], axis=1)
    return -chosen.mean()


def update(parameters: Parameters, gradients: Parameters) -> Parameters:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)


@jax.jit
def step(parameters: Parameters, text: jax.Array) -> tuple[Parameters, jax.Array]:
    """The new parameters, and the loss averaged over all ranks."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, text)
    gradients = jax.tree.map(lambda g: xvjax.all_reduce(g, "avg"), gradients)
    return update(parameters, gradients), xvjax.all_reduce(loss, "avg")


@jax.jit
def alone(parameters: Parameters, text: jax.Array) -> tuple[Parameters, jax.Array]:
    """The same step in one process that has all samples."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, text)
    return update(parameters, gradients), loss


def windows(text: np.ndarray, samples: int, number: int) -> np.ndarray:
    """All ranks' samples of one step."""
    starts = np.random.default_rng(number).integers(0, len(text) - CONTEXT - 1, samples)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def main() -> int:
    """Train, print the losses, and compare them with one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=64, help="a rank, in each step")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    arguments = parser.parse_args()
    comm = xvjax.init()
    if comm.device != "host":
        mine = next(d for d in jax.local_devices() if d.local_hardware_id == comm.device_index)
        jax.config.update("jax_default_device", mine)
        jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round products to fewer bits
    text, parameters, everything = corpus(1 << 20), initial(0), initial(0)
    worst, loss = 0.0, float("nan")
    for number in range(arguments.steps):
        whole: Any = windows(text, comm.size * arguments.samples, number).astype(np.int32)
        mine = whole[comm.rank * arguments.samples : (comm.rank + 1) * arguments.samples]
        parameters, mean = step(parameters, jnp.asarray(mine))
        loss = float(mean)
        if arguments.check:
            everything, expected = alone(everything, jnp.asarray(whole))
            worst = max(worst, abs(loss - float(expected)) / float(expected))
        if comm.rank == 0 and (number % 20 == 0 or number == arguments.steps - 1):
            print(f"step {number}: loss {loss:.4f}", flush=True)
    if comm.rank == 0 and arguments.check:
        print(f"worst difference from one process: {worst:.1e}, relative")
    comm.close()
    return 1 if worst > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
