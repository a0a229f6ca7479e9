"""A rank's process on this host: started, signalled and waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xvcomm.cli.output import RankStream
from xvcomm.errors import ResourceError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Command and environment of one rank; the label is part of its output prefix."""

    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


class RankProcess:
    """The process of a rank, and its process group, which the kernel kills when this process dies.

    Args:
        number: of the rank on this host; the first one has this process's standard input.
        out, err: what is told of its output.

    Attributes:
        awaited: how many processes with this rank's number must have returned for this one to be one of the job; 0: it began the
            job.
        code: of its exit, or minus the number of the signal that killed it; None while it runs.

    Raises:
        ResourceError: it cannot be started.
    """

    def __init__(self, number: int, spec: RankSpec, out: RankStream, err: RankStream) -> None:
        # A rank has its own process group, so reading from a terminal would stop it.
        takes_input = number == 0 and not os.isatty(0)
        try:
            self._process = subprocess.Popen(
                spec.argv,
                env=spec.env,
                stdin=None if takes_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                preexec_fn=_ends_with(os.getpid()),
            )
        except OSError as error:
            raise ResourceError(f"rank {number}: cannot start {spec.argv[0]!r}: {error}") from error
        self.out, self.err = out, err
        self.awaited = 0
        self.code: int | None = None

    def take_pipes(self) -> dict[int, RankStream]:
        """The descriptors of its output, which the caller closes, with what is told of it."""
        found = {}
        for pipe, stream in ((self._process.stdout, self.out), (self._process.stderr, self.err)):
            assert pipe is not None
            found[os.dup(pipe.fileno())] = stream
            pipe.close()
        return found

    def note_end(self) -> bool:
        """Set `code` if it has ended since the last call; whether it has. It is not reaped, so its group keeps its id."""
        if self.code is not None:
            return False
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return False
        self.code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, if it was not reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    @property
    def group(self) -> int:
        """Its process group."""
        return self._process.pid

    def end(self) -> None:
        """Kill what runs of its group, and reap it."""
        self.signal(signal.SIGKILL)
        self._process.wait()


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGKILL` for 9; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ends_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that asks the kernel to kill the rank when the launcher dies, even by SIGKILL."""
    libc = ctypes.CDLL(None)

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arm
