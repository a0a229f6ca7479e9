"""The decoder in torch, with gradients by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llama.config import NORM_EPS, AdamW, Model, Part, initial_parameters, rotary_tables


class TorchPart:
    """One part of the model; see `llama.stage.Framework` for the contract."""

    arrays = torch

    def __init__(self, model: Model, part: Part, seed: int, optimizer: AdamW) -> None:
        self.part = part
        initial = initial_parameters(model, part, seed)
        self.parameters = {name: torch.as_tensor(p).requires_grad_() for name, p in initial.items()}
        self._decoder = Decoder(model, self.parameters)
        self._optimizer = optimizer
        self._moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in self.parameters.items()}

    @staticmethod
    def settle(device: str, index: int) -> None:
        """Use this device from now on."""
        if device != "host":
            torch.set_default_device(f"cuda:{index}")  # torch calls AMD's GPUs so, too

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Tensor:
        """A tensor to receive activations into."""
        return torch.empty(shape, dtype=torch.float32)

    def forward(self, x: Any, targets: Any) -> tuple[Tensor, Any]:
        """The output, or the mean loss if the part predicts, and the saved values for backward."""
        x = torch.as_tensor(x) if self.part.embeds else x.detach().requires_grad_()
        y = self._decoder(self.part, x, None if targets is None else torch.as_tensor(targets))
        return y.detach(), (x, y)

    def backward_input(self, saved: Any, dy: Tensor) -> Tensor | None:
        """The input's gradient from the output's; None for tokens."""
        x, y = saved
        return None if self.part.embeds else torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    def backward_weight(self, saved: Any, dy: Tensor) -> dict[str, Tensor]:
        """The parameters' gradients."""
        _, y = saved
        return dict(zip(self.parameters, torch.autograd.grad(y, self.parameters.values(), dy), strict=True))

    def backward(self, saved: Any, dy: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Both gradients in one call."""
        if self.part.embeds:
            return None, self.backward_weight(saved, dy)
        x, y = saved
        dx, *gradients = torch.autograd.grad(y, (x, *self.parameters.values()), dy)
        return dx, dict(zip(self.parameters, gradients, strict=True))

    def scalar(self, value: float) -> Tensor:
        """A float32 scalar."""
        return torch.tensor(value)

    def update(self, gradients: dict[str, Tensor], step: int) -> None:
        """One AdamW step; `step` counts from 1."""
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = self.parameters[name]
                new, *self._moments[name] = self._optimizer.update(parameter, gradient, *self._moments[name], step)
                parameter.copy_(new)

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Each parameter with its two moments, in host memory."""
        tensors = {name: (parameter.detach(), *self._moments[name]) for name, parameter in self.parameters.items()}
        return {name: tuple(tensor.cpu().numpy() for tensor in each) for name, each in tensors.items()}

    def load(self, state: dict[str, tuple[Any, ...]]) -> None:
        """Continue from the state of another rank."""
        with torch.no_grad():
            for name, (parameter, *moments) in state.items():
                self.parameters[name].copy_(torch.as_tensor(parameter))
                self._moments[name] = [torch.as_tensor(moment) for moment in moments]


class Decoder:
    """The model as a function of named parameters. Activations are (batch, tokens, dim)."""

    def __init__(self, model: Model, parameters: dict[str, Tensor]) -> None:
        self._model = model
        self._parameters = parameters
        self._cos, self._sin = (torch.as_tensor(table) for table in rotary_tables(model))

    def __call__(self, part: Part, x: Tensor, targets: Tensor | None) -> Tensor:
        """The part's activations, or the mean cross-entropy of the next byte in nats."""
        if part.embeds:
            x = F.embedding(x, self._parameters["embedding"])
        for layer in range(part.first, part.stop):
            x = x + self._attention(f"{layer}.attention", x)
            x = x + self._mlp(f"{layer}.mlp", x)
        if targets is None:
            return x
        logits = self._norm("head.norm", x) @ self._parameters["head.out"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _attention(self, name: str, x: Tensor) -> Tensor:
        normed = self._norm(f"{name}.norm", x)
        q, k, v = (self._heads(normed @ self._parameters[f"{name}.{which}"]) for which in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2) @ self._parameters[f"{name}.out"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        normed = self._norm(f"{name}.norm", x)
        gate, up = normed @ self._parameters[f"{name}.gate"], normed @ self._parameters[f"{name}.up"]
        return (F.silu(gate) * up) @ self._parameters[f"{name}.down"]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._model.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self._cos - b * self._sin, b * self._cos + a * self._sin), -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self._model.dim,), self._parameters[name], NORM_EPS)
