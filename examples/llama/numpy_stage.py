"""The decoder in numpy, with a manual backward pass.

Each layer returns its output and a function that maps the output's gradient to the input's. The computations of weight
gradients are collected as a list of functions, so that a zero-bubble schedule can call them later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llama.config import NORM_EPS, AdamW, Model, Part, initial_parameters, rotary_tables
from xvcomm.errors import ArgumentError

Array = np.ndarray
Pull = Callable[[Array], Array]
Later = list[tuple[str, Callable[[], Array]]]


class NumpyPart:
    """One part of the model; see `llama.stage.Framework` for the contract."""

    arrays = np

    def __init__(self, model: Model, part: Part, seed: int, optimizer: AdamW) -> None:
        self.part = part
        self.parameters = initial_parameters(model, part, seed)
        self._optimizer = optimizer
        self._moments = {name: [np.zeros_like(p), np.zeros_like(p)] for name, p in self.parameters.items()}
        self._decoder = Decoder(model, self.parameters)

    @staticmethod
    def settle(device: str, index: int) -> None:
        """Reject any device but host memory."""
        if device != "host":
            raise ArgumentError(
                f"numpy computes in host memory, not on {device}: set XVCOMM_DEVICE=host, or use another --framework"
            )

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Array:
        """An array to receive activations into."""
        return np.empty(shape, np.float32)

    def forward(self, x: Array, targets: Array | None) -> tuple[Array, Any]:
        """The output, or the mean loss if the part predicts, and the saved values for backward."""
        later: Later = []
        pulls: list[Pull] = []
        decoder = self._decoder
        if self.part.embeds:
            x = decoder.embed(x, later, pulls)
        for layer in range(self.part.first, self.part.stop):
            x = decoder.attention(f"{layer}.attention", x, later, pulls)
            x = decoder.mlp(f"{layer}.mlp", x, later, pulls)
        if targets is not None:
            x = decoder.loss(x, targets, later, pulls)
        return x, (pulls, later)

    def backward_input(self, saved: Any, dy: Array) -> Array:
        """The input's gradient from the output's."""
        for pull in reversed(saved[0]):
            dy = pull(dy)
        return dy

    def backward_weight(self, saved: Any, dy: Array) -> dict[str, Array]:
        """The parameters' gradients; `backward_input` must have been called before."""
        return {name: gradient() for name, gradient in saved[1]}

    def backward(self, saved: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        """Both gradients in one call."""
        dx = self.backward_input(saved, dy)
        return dx, self.backward_weight(saved, dy)

    def scalar(self, value: float) -> Array:
        """A float32 scalar."""
        return np.float32(value)

    def update(self, gradients: dict[str, Array], step: int) -> None:
        """One AdamW step; `step` counts from 1."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            new, *self._moments[name] = self._optimizer.update(parameter, gradient, *self._moments[name], step)
            self.parameters[name] = new

    def state(self) -> dict[str, tuple[Array, ...]]:
        """Each parameter with its two moments."""
        return {name: (parameter, *self._moments[name]) for name, parameter in self.parameters.items()}

    def load(self, state: dict[str, tuple[Array, ...]]) -> None:
        """Continue from the state of another rank."""
        for name, (parameter, *moments) in state.items():
            self.parameters[name], self._moments[name] = parameter, moments


class Decoder:
    """The layers of the decoder over a dict of named float32 parameters. Activations are (batch, tokens, dim)."""

    def __init__(self, model: Model, parameters: dict[str, Array]) -> None:
        self._model = model
        self._parameters = parameters
        self._cos, self._sin = (table[:, None, :] for table in rotary_tables(model))
        self._future = np.triu(np.full((model.context, model.context), -np.inf, np.float32), 1)

    def embed(self, tokens: Array, later: Later, pulls: list[Pull]) -> Array:
        """Embedding vectors of the tokens."""
        table = self._parameters["embedding"]

        def pull(dy: Array) -> Array:
            def gradient() -> Array:
                total = np.zeros_like(table)
                np.add.at(total, tokens, dy)
                return total

            later.append(("embedding", gradient))
            return dy

        pulls.append(pull)
        return table[tokens]

    def attention(self, name: str, x: Array, later: Later, pulls: list[Pull]) -> Array:
        """x + causal grouped-query attention of norm(x), with rotary positions."""
        normed, norm_pull = self._norm(f"{name}.norm", x, later)
        q, q_pull = self._linear(f"{name}.query", normed, later)
        k, k_pull = self._linear(f"{name}.key", normed, later)
        v, v_pull = self._linear(f"{name}.value", normed, later)
        mixed, mix_pull = self._mix(self._rotate(self._heads(q)), self._rotate(self._heads(k)), self._heads(v))
        y, out_pull = self._linear(f"{name}.out", mixed.reshape(x.shape), later)

        def pull(dy: Array) -> Array:
            dq, dk, dv = mix_pull(self._heads(out_pull(dy)))
            dq, dk = self._rotate(dq, -1), self._rotate(dk, -1)
            return dy + norm_pull(
                q_pull(dq.reshape(q.shape)) + k_pull(dk.reshape(k.shape)) + v_pull(dv.reshape(v.shape))
            )

        pulls.append(pull)
        return x + y

    def mlp(self, name: str, x: Array, later: Later, pulls: list[Pull]) -> Array:
        """x + SwiGLU of norm(x)."""
        normed, norm_pull = self._norm(f"{name}.norm", x, later)
        gate, gate_pull = self._linear(f"{name}.gate", normed, later)
        up, up_pull = self._linear(f"{name}.up", normed, later)
        sigmoid = 1 / (1 + np.exp(-gate))
        silu = gate * sigmoid
        y, down_pull = self._linear(f"{name}.down", silu * up, later)

        def pull(dy: Array) -> Array:
            dh = down_pull(dy)
            dgate = dh * up * (sigmoid + silu * (1 - sigmoid))
            return dy + norm_pull(gate_pull(dgate) + up_pull(dh * silu))

        pulls.append(pull)
        return x + y

    def loss(self, x: Array, targets: Array, later: Later, pulls: list[Pull]) -> Array:
        """Mean cross-entropy of the next byte, in nats."""
        normed, norm_pull = self._norm("head.norm", x, later)
        logits, out_pull = self._linear("head.out", normed, later)
        logits = logits - logits.max(-1, keepdims=True)
        normalizer = np.log(np.exp(logits).sum(-1, keepdims=True))
        index = targets[..., None]
        losses = normalizer - np.take_along_axis(logits, index, -1)

        def pull(dy: Array) -> Array:
            dlogits = np.exp(logits - normalizer)
            np.put_along_axis(dlogits, index, np.take_along_axis(dlogits, index, -1) - 1, -1)
            return norm_pull(out_pull(dlogits * (dy / np.float32(targets.size))))

        pulls.append(pull)
        return losses.mean()

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self._model.head_dim)

    def _rotate(self, x: Array, direction: int = 1) -> Array:
        a, b = np.split(x, 2, -1)
        sin = direction * self._sin
        return np.concatenate((a * self._cos - b * sin, b * self._cos + a * sin), -1)

    def _linear(self, name: str, x: Array, later: Later) -> tuple[Array, Pull]:
        weight = self._parameters[name]

        def pull(dy: Array) -> Array:
            later.append((name, lambda: x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])))
            return dy @ weight.T

        return x @ weight, pull

    def _norm(self, name: str, x: Array, later: Later) -> tuple[Array, Pull]:
        gain = self._parameters[name]
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(NORM_EPS))
        normed = x * inverse

        def pull(dy: Array) -> Array:
            later.append((name, lambda: (dy * normed).sum((0, 1))))
            dn = dy * gain
            return inverse * (dn - normed * (dn * normed).mean(-1, keepdims=True))

        return normed * gain, pull

    def _mix(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        """Softmax attention on (batch, tokens, heads, head_dim); query heads are grouped by their key head."""
        groups = (self._model.kv_heads, self._model.heads // self._model.kv_heads)
        scale = np.float32(self._model.head_dim**-0.5)

        def grouped(x: Array) -> Array:
            return x.reshape(*x.shape[:2], *groups, -1).transpose(0, 2, 3, 1, 4)

        def ungrouped(x: Array) -> Array:
            return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])

        query, key, value = grouped(q), k.transpose(0, 2, 1, 3)[:, :, None], v.transpose(0, 2, 1, 3)[:, :, None]
        scores = query @ key.swapaxes(-1, -2) * scale + self._future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)

        def pull(dy: Array) -> tuple[Array, Array, Array]:
            dmixed = grouped(dy)
            dweights = dmixed @ value.swapaxes(-1, -2)
            dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * scale
            dkey = (dscores.swapaxes(-1, -2) @ query).sum(2)
            dvalue = (weights.swapaxes(-1, -2) @ dmixed).sum(2)
            return ungrouped(dscores @ key), dkey.transpose(0, 2, 1, 3), dvalue.transpose(0, 2, 1, 3)

        return ungrouped(weights @ value), pull
