"""The interface of a stage, which can be implemented with any framework."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import BY_NAME


class Spec(NamedTuple):
    """Shape and dtype name of the data between two stages, for one micro-batch.

    A gradient has the spec of its activation.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or 'one'} {self.dtype}"

    @classmethod
    def of(cls, array: Any) -> Spec:
        """The spec of an array of any framework whose dtype is printed like numpy's, torch's or jax's."""
        return cls(tuple(int(n) for n in array.shape), str(array.dtype).rpartition(".")[2])

    @classmethod
    def parse(cls, spec: Any) -> Spec | None:
        """Convert a (shape, dtype name) pair to a Spec; None stays None.

        Raises:
            ArgumentError: it is not such a pair, or xvcomm does not support the dtype.
        """
        if spec is None:
            return None
        try:
            shape, dtype = spec
            parsed = cls(tuple(int(n) for n in shape), str(dtype))
        except (TypeError, ValueError):
            raise ArgumentError(f"{spec!r} is not a (shape, dtype name) pair such as ((4, 128), 'float32')") from None
        if parsed.dtype not in BY_NAME or any(n < 0 for n in parsed.shape):
            raise ArgumentError(f"{spec!r}: sizes must not be negative and the dtype one of {', '.join(BY_NAME)}")
        return parsed


class StageSpec(NamedTuple):
    """Input and output of one virtual stage.

    Attributes:
        input: None for the first stage, which reads its own data.
        output: None for the last stage, which returns a loss.
    """

    input: Spec | None
    output: Spec | None


class Stage(Protocol):
    """One virtual stage. It stores what `backward` needs of `forward` by micro-batch."""

    @property
    def input_spec(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype name of `x`; not used on the first stage. The gradient `dx` has the same."""

    @property
    def output_spec(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype name of `y`; not used on the last stage. The gradient `dy` has the same."""

    def forward(self, x: Any, micro_batch: int) -> Any:
        """Compute the output `y` for one micro-batch; on the last stage its loss, in any form.

        Args:
            x: the previous stage's output as plain data, without autograd history; None on the first stage, which reads
                micro-batch `micro_batch` of its own data.
            micro_batch: 0 to micro-batches - 1.
        """

    def backward(self, dy: Any, micro_batch: int) -> Any:
        """Compute the gradient `dx` of the input of one micro-batch, and add to the stage's weight gradients.

        Args:
            dy: gradient of `y`; None on the last stage, which starts from its loss.
            micro_batch: one for which `forward` was called.

        Returns:
            `dx`; None on the first stage.
        """

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Create a contiguous array to receive into, of the stage's framework and on its device."""


@runtime_checkable
class SplitBackward(Protocol):
    """Additional methods that zero-bubble schedules need: the backward pass split in two."""

    def backward_input(self, dy: Any, micro_batch: int) -> Any:
        """Like `Stage.backward`, without the weight gradients."""

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` of the same micro-batch left out."""
