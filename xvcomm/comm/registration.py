"""Arrays that the user registers, so that messages between hosts go from and into them without a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from xvcomm.errors import ClosedError
from xvcomm.memory.readers import view

if TYPE_CHECKING:
    from xvcomm.engine.context import Context


class Registration:
    """What `Communicator.register` returns; leaving its `with` block closes it. Thread-safe."""

    def __init__(self, ends: Sequence[Callable[[], None]]) -> None:
        self._ends = ends  # what deregisters the array with each transport

    def close(self) -> None:
        """Register the array no more. Idempotent; of several threads none returns before that is done.

        Waits for messages under way that use it, but no longer than ten seconds; they go on through the ring.
        """
        for end in self._ends:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Registering:
    """Part of Communicator."""

    _context: Context
    rank: int

    def register(self, array: Any) -> Registration:
        """Register an array with this rank's RDMA devices, for messages to and from other hosts (as ncclCommRegister in NCCL).

        Messages of 64 KiB or more go from a registered array into a registered array without a copy; one copy is saved if only
        the receiver's is registered. They may be of any part of it, in any operation, of any communicator of the job. The sender
        of a point-to-point message that fits the ring, see `XVCOMM_WIRE_SLOTS`, does not wait for its receiver: the message goes
        through the ring, unless the receiver waits already with a registered array. A message that does not fit saves a copy
        also if only the sender's array is registered. Worth it for arrays that are used many times: registering locks their
        memory, page by page.

        Without RDMA and on one host this does nothing, successfully: a program can always call it. So it does for an array in a
        GPU's memory: the GPU copies it to and from slots, which lie where RDMA devices reach them (Device-Direct).

        After a call with an array has failed, close its registration and register it again; those of other arrays go on, also
        over `shrink`. `grow` makes another job: register all arrays again. The memory is kept until the registration is closed,
        or the job is, even if the array takes another one (`torch.Tensor.set_`). What gives it back (`torch.Tensor.resize_`)
        must not be called meanwhile: the devices would keep the old pages. Arrays may overlap. In a forked child nothing is
        registered; before Linux 5.12 it does not have the registered pages at all.

        Raises:
            ArrayError, DTypeError: not a contiguous array.
            ResourceError: a device or a limit of memory refuses; says what to do.
            ClosedError: this communicator was closed, or another one has taken its place.
        """
        found = view(array)
        if closed := self._context.lifecycle.closed:
            raise ClosedError(f"register {closed}", rank=self.rank)
        if found.device != "host":
            return Registration(())
        ends: list[Callable[[], None]] = []
        with contextlib.ExitStack() as undo:
            for transport in self._context.session.transports:
                ends.append(transport.register(found))
                undo.callback(ends[-1])
            undo.pop_all()
        return Registration(ends)
