"""The decoder in jax: one compiled function for the forward pass, one or two for the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from llama.config import NORM_EPS, AdamW, Model, Part, initial_parameters, rotary_tables

Parameters = dict[str, jax.Array]


class JaxPart:
    """One part of the model; see `llama.stage.Framework` for the contract."""

    arrays = jnp

    def __init__(self, model: Model, part: Part, seed: int, optimizer: AdamW) -> None:
        self.part = part
        self.parameters = {name: jnp.asarray(p) for name, p in initial_parameters(model, part, seed).items()}
        self._moments = {name: (jnp.zeros_like(p), jnp.zeros_like(p)) for name, p in self.parameters.items()}
        self._forward = jax.jit(partial(_forward, model, part))
        self._update = jax.jit(partial(_update, optimizer))

    @staticmethod
    def settle(device: str, index: int) -> None:
        """Use this device from now on."""
        if device == "host":
            jax.config.update("jax_platforms", "cpu")
            return
        found = next(d for d in jax.local_devices(backend="gpu") if d.local_hardware_id == index)
        jax.config.update("jax_default_device", found)
        jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round products to fewer bits

    @staticmethod
    def empty(shape: tuple[int, ...]) -> jax.Array:
        """An array that describes what is received; jax arrays are never written in place."""
        return jnp.empty(shape, jnp.float32)

    def forward(self, x: Any, targets: Any) -> tuple[jax.Array, Any]:
        """The output, or the mean loss if the part predicts, and the saved values for backward."""
        return self._forward(self.parameters, x, targets)

    def backward_input(self, saved: Any, dy: jax.Array) -> jax.Array | None:
        """The input's gradient from the output's; None for tokens."""
        return None if self.part.embeds else _pull_input(saved, dy)

    def backward_weight(self, saved: Any, dy: jax.Array) -> Parameters:
        """The parameters' gradients."""
        return _pull_weight(saved, dy)

    def backward(self, saved: Any, dy: jax.Array) -> tuple[jax.Array | None, Parameters]:
        """Both gradients in one call."""
        if self.part.embeds:
            return None, _pull_weight(saved, dy)
        gradients, dx = _pull_both(saved, dy)
        return dx, gradients

    def scalar(self, value: float) -> jax.Array:
        """A float32 scalar."""
        return jnp.float32(value)

    def update(self, gradients: Parameters, step: int) -> None:
        """One AdamW step; `step` counts from 1."""
        self.parameters, self._moments = self._update(self.parameters, gradients, self._moments, jnp.float32(step))

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Each parameter with its two moments, in host memory."""
        return jax.device_get({name: (p, *self._moments[name]) for name, p in self.parameters.items()})

    def load(self, state: dict[str, tuple[Any, ...]]) -> None:
        """Continue from the state of another rank."""
        arrays = jax.tree.map(jnp.asarray, state)
        self.parameters = {name: each[0] for name, each in arrays.items()}
        self._moments = {name: each[1:] for name, each in arrays.items()}


def _forward(model: Model, part: Part, parameters: Parameters, x: Any, targets: Any) -> tuple[jax.Array, Any]:
    """The output and its vector-Jacobian product, which is a pytree and so can be returned by a compiled function."""
    if part.embeds:
        return jax.vjp(lambda p: _decode(model, part, p, x, targets), parameters)
    return jax.vjp(lambda p, x: _decode(model, part, p, x, targets), parameters, x)


@jax.jit
def _pull_both(pull: Any, dy: jax.Array) -> Any:
    return pull(dy)


@jax.jit
def _pull_weight(pull: Any, dy: jax.Array) -> Any:
    return pull(dy)[0]


@jax.jit
def _pull_input(pull: Any, dy: jax.Array) -> Any:
    """The input's gradient only; the compiler removes the computation that only the weights need."""
    return pull(dy)[1]


def _update(optimizer: AdamW, parameters: Parameters, gradients: Parameters, moments: Any, step: Any) -> Any:
    new = {name: optimizer.update(parameters[name], gradients[name], *moments[name], step) for name in parameters}
    return {name: state[0] for name, state in new.items()}, {name: state[1:] for name, state in new.items()}


def _decode(model: Model, part: Part, parameters: Parameters, x: jax.Array, targets: Any) -> jax.Array:
    if part.embeds:
        x = parameters["embedding"][x]
    for layer in range(part.first, part.stop):
        x = x + _attention(model, parameters, f"{layer}.attention", x)
        x = x + _mlp(parameters, f"{layer}.mlp", x)
    if targets is None:
        return x
    scores = jax.nn.log_softmax(_norm(x, parameters["head.norm"]) @ parameters["head.out"])
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


def _attention(model: Model, parameters: Parameters, name: str, x: jax.Array) -> jax.Array:
    normed = _norm(x, parameters[f"{name}.norm"])
    q, k, v = (
        (normed @ parameters[f"{name}.{which}"]).reshape(*x.shape[:2], -1, model.head_dim)
        for which in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(_rotate(model, q), _rotate(model, k), v, is_causal=True)
    return mixed.reshape(x.shape) @ parameters[f"{name}.out"]


def _mlp(parameters: Parameters, name: str, x: jax.Array) -> jax.Array:
    normed = _norm(x, parameters[f"{name}.norm"])
    gate, up = normed @ parameters[f"{name}.gate"], normed @ parameters[f"{name}.up"]
    return (jax.nn.silu(gate) * up) @ parameters[f"{name}.down"]


def _rotate(model: Model, x: jax.Array) -> jax.Array:
    cos, sin = (table[:, None, :] for table in rotary_tables(model))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + NORM_EPS) * gain
