"""The computation of a pipeline stage, independent of the framework."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, util
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llama.config import Model, Part
from xvcomm.errors import ArgumentError, BackendUnavailable

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

FRAMEWORKS = {"numpy": "NumpyPart", "torch": "TorchPart", "jax": "JaxPart"}
BUCKET_ELEMENTS = 1 << 20


class Framework(Protocol):
    """One part of the model in one framework.

    Attributes:
        part: which part.
        arrays: the framework's array namespace.
        parameters: float32, by name.
    """

    part: Part
    arrays: Any
    parameters: dict[str, Any]

    @staticmethod
    def settle(device: str, index: int) -> None:
        """Use this device from now on, given by its kind as in `Device` and its index on this host.

        Raises:
            ArgumentError: the framework does not support this device.
        """

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Any:
        """A float32 array that receives activations or their gradients."""

    def scalar(self, value: float) -> Any:
        """A float32 scalar."""

    def forward(self, x: Any, targets: np.ndarray | None) -> tuple[Any, Any]:
        """The output, and the values that backward needs.

        Args:
            x: tokens, int64 of shape (batch, context), if the part embeds; otherwise activations (batch, context, dim).
            targets: the next tokens if the part predicts, whose output is then the mean loss; otherwise None.
        """

    def backward(self, saved: Any, dy: Any) -> tuple[Any, dict[str, Any]]:
        """The gradients of the input (None for tokens) and of the parameters."""

    def backward_input(self, saved: Any, dy: Any) -> Any:
        """The first half of `backward`: the input's gradient."""

    def backward_weight(self, saved: Any, dy: Any) -> dict[str, Any]:
        """The second half of `backward`: the parameters' gradients; may be called any time after the first."""

    def update(self, gradients: dict[str, Any], step: int) -> None:
        """One AdamW step on all parameters; `step` counts from 1."""

    def state(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Each parameter with its two moments, in host memory."""

    def load(self, state: dict[str, tuple[np.ndarray, ...]]) -> None:
        """Continue from what `state` returned on another rank."""


def framework(name: str) -> type[Framework]:
    """The class that implements parts in the framework `name`; imports that framework.

    Raises:
        ArgumentError: unknown framework.
        BackendUnavailable: it is not installed.
    """
    if name not in FRAMEWORKS:
        raise ArgumentError(f"unknown framework {name!r}; use one of {', '.join(FRAMEWORKS)}")
    if util.find_spec(name) is None:
        raise BackendUnavailable(f"{name} is not installed: pip install 'xvcomm[{name}]', or use --framework numpy")
    return getattr(import_module(f"llama.{name}_stage"), FRAMEWORKS[name])


def mean_loss(everybody: Communicator, losses: list[Any], count: int) -> float:
    """The mean over `count` micro-batches, of which each rank gives what it has; the same on every rank."""
    return sum(everybody.all_gather_object(sum(map(float, losses)) / count))


class Stage:
    """One virtual stage as `xvcomm.pipeline` drives it, with the gradients that it accumulates in a step."""

    def __init__(self, part: Framework, model: Model, micro_batches: int, sequences: int) -> None:
        """Wrap a part.

        Args:
            part: what to compute.
            model: sizes.
            micro_batches: per step of this rank; the gradients are the mean over them.
            sequences: per micro-batch.
        """
        self._part = part
        self._share = 1 / micro_batches
        activations = ((sequences, model.context, model.dim), "float32")
        self.input_spec = None if part.part.embeds else activations
        self.output_spec = None if part.part.predicts else activations

    def begin(self, windows: np.ndarray) -> None:
        """Take the text of one step, int64 of shape (micro-batches, sequences, context + 1), and forget gradients."""
        self._windows = windows
        self._saved: dict[int, Any] = {}
        self._gradients: dict[str, Any] = {}

    def forward(self, x: Any, micro_batch: int) -> Any:
        """See `xvcomm.pipeline.Stage.forward`; the loss is the mean over the micro-batch."""
        window = self._windows[micro_batch]
        x = window[:, :-1] if self._part.part.embeds else x
        y, self._saved[micro_batch] = self._part.forward(x, window[:, 1:] if self._part.part.predicts else None)
        return y

    def backward(self, dy: Any, micro_batch: int) -> Any:
        """See `xvcomm.pipeline.Stage.backward`."""
        dx, gradients = self._part.backward(self._saved.pop(micro_batch), self._start(dy))
        self._add(gradients)
        return dx

    def backward_input(self, dy: Any, micro_batch: int) -> Any:
        """See `xvcomm.pipeline.SplitBackward.backward_input`."""
        saved, dy = self._saved[micro_batch], self._start(dy)
        self._saved[micro_batch] = saved, dy
        return self._part.backward_input(saved, dy)

    def backward_weight(self, micro_batch: int) -> None:
        """See `xvcomm.pipeline.SplitBackward.backward_weight`."""
        self._add(self._part.backward_weight(*self._saved.pop(micro_batch)))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `xvcomm.pipeline.Stage.empty`."""
        return self._part.empty(shape)

    def average_gradients(self, replicas: Communicator) -> None:
        """Average the gradients over the ranks that hold the same part, in a few large messages."""
        for names in self._buckets():
            flat = self._part.arrays.concatenate([self._gradients[name].reshape(-1) for name in names])
            flat = replicas.all_reduce(flat, op="avg")
            start = 0
            for name in names:
                shape = self._gradients[name].shape
                stop = start + prod(shape)
                self._gradients[name] = flat[start:stop].reshape(shape)
                start = stop

    def update(self, step: int) -> None:
        """One AdamW step with the accumulated gradients; `step` counts from 1."""
        self._part.update(self._gradients, step)

    def _start(self, dy: Any) -> Any:
        return self._part.scalar(self._share) if self._part.part.predicts else dy

    def _add(self, gradients: dict[str, Any]) -> None:
        have = self._gradients
        self._gradients = {name: have[name] + new if name in have else new for name, new in gradients.items()}

    def _buckets(self) -> Iterator[list[str]]:
        names: list[str] = []
        filled = 0
        for name in sorted(self._gradients):
            names.append(name)
            filled += prod(self._gradients[name].shape)
            if filled >= BUCKET_ELEMENTS:
                yield names
                names, filled = [], 0
        if names:
            yield names
