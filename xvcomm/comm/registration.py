"""Arrays that the user registers, so that messages between hosts go from and into them without a copy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from xvcomm.errors import ClosedError
from xvcomm.memory.readers import view

if TYPE_CHECKING:
    from types import TracebackType

    from xvcomm.engine.context import Context


class Registration:
    """What `Communicator.register` returns; leaving its `with` block closes it. Thread-safe."""

    def __init__(self, held: contextlib.ExitStack) -> None:
        self._held = held

    def close(self) -> None:
        """Register the array no more. Idempotent.

        Waits for messages under way that use it, but no longer than ten seconds; then they go on through the ring.
        """
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registering:
    """Part of Communicator."""

    _context: Context
    rank: int

    def register(self, array: Any) -> Registration:
        """Register an array with this rank's RDMA devices, for messages to and from other hosts (as ncclCommRegister in NCCL).

        Messages of 64 KiB or more go from a registered array into a registered array without a copy; if it is registered at one
        end only, one copy is saved. They may be of any part of it, in any operation, of any communicator of the job. A message
        that fits the ring, see `XVCOMM_WIRE_SLOTS`, goes on without its receiver, through the ring, unless that waits already.
        Worth it for arrays that are used many times: registering locks their memory, page by page.

        Without RDMA, on one host, and for arrays in a GPU's memory this does nothing, successfully: a program can always call it.

        The array is kept alive until the registration is closed, or the job is; after `grow` has taken newcomers in, register it
        again. Its memory must not be given back or mapped anew meanwhile, as by `torch.Tensor.resize_`: the devices would keep
        the old pages. Arrays may overlap. In a forked child nothing is registered; before Linux 5.12 it does not have the
        registered pages at all.

        Raises:
            ArrayError, DTypeError: not a contiguous array.
            ResourceError: a device or a limit of memory refuses; says what to do.
            ClosedError: this communicator was closed, or another one has taken its place.
        """
        found = view(array)
        if closed := self._context.lifecycle.closed:
            raise ClosedError(f"register {closed}", rank=self.rank)
        with contextlib.ExitStack() as undo:
            if found.device == "host":
                for transport in self._context.session.transports:
                    undo.enter_context(transport.register(found))
            return Registration(undo.pop_all())
