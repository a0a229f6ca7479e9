"""What a tracker asks of its communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device
from xvcomm.trace.format import DONE
from xvcomm.trace.operation import Operation
from xvcomm.trace.recorder import Recorder


class Owner(Protocol):
    """The communicator whose operations are tracked."""

    @property
    def device(self) -> Device:
        """The rank's."""

    @property
    def recorder(self) -> Recorder:
        """The rank's flight recorder."""

    def joined_native(self) -> Collective | None:
        """The native library, if it was joined."""

    def awaits(self, operation: Operation) -> bool:
        """Whether a rank has not come to a collective yet, as far as this host can tell."""

    def stopped(self, newest: Callable[[], Operation]) -> int:
        """0, or the abort word that says that a native collective gave no result."""

    def miss(self, newest: Callable[[], Operation]) -> None:
        """Stop a collective if a rank left before it came to it."""

    def explain(self, error: BaseException, operation: Operation) -> BaseException:
        """Stop the communicator for an error from below; gives the error for the user."""

    def end(self, operation: Operation, state: int = DONE) -> None:
        """An operation is over."""

    def end_all(self, operations: Sequence[Operation], state: int = DONE) -> None:
        """The same of several at once."""
