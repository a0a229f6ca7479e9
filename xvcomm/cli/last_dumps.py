"""What ranks of this host were doing when their launcher began to end them, written to XVCOMM_TRACE_DIR."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from xvcomm.config import Config
from xvcomm.errors import ConfigError
from xvcomm.system.threads import Daemon
from xvcomm.trace import live
from xvcomm.trace.snapshot import SUFFIX, Snapshot

_SECONDS = 5.0
"""How long the launcher waits at its end for what is being written."""


class LastDumps:
    """The dumps of ranks that a signal of their launcher may end before they have written any.

    Args:
        env: of the ranks.
        say: prints a line of the launcher.
    """

    def __init__(self, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._say = say
        self._threads: list[Daemon] = []
        self._folder: Path | None = None
        with contextlib.suppress(ConfigError):  # which the ranks report
            folder = Config.from_env(env).trace_dir
            self._folder = Path(folder) if folder else None

    def take(self, groups: Iterable[int]) -> None:
        """Read what the ranks in these process groups do, before they are ended, and let a thread write it. Does not wait for
        the disk, and looks at no other processes' files.
        """
        if self._folder is None:
            return
        found = list[Snapshot]()
        try:
            for job in live.jobs(set(groups)):
                with contextlib.suppress(OSError, ValueError):  # its ranks end by themselves just now
                    found += job.alone()
            thread = Daemon("xvcomm-dumps", partial(self._write, self._folder, found))
            thread.start()
            self._threads.append(thread)
        except Exception as error:  # whatever it is, the ranks must be ended
            self._say(f"cannot write what the ranks did to {self._folder} (XVCOMM_TRACE_DIR): {error}")

    def _write(self, folder: Path, found: Iterable[Snapshot]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for one in found:
                (rank,) = one.ranks
                path = folder / f"{one.job}-rank-{rank}{SUFFIX}"
                if not path.exists():  # what a rank writes itself tells more
                    one.save(path)
        except OSError as error:
            self._say(f"cannot write what the ranks did to {folder} (XVCOMM_TRACE_DIR): {error.strerror}")

    def finish(self) -> None:
        """Wait until all is written."""
        for thread in self._threads:
            thread.join(_SECONDS)
