"""Fork servers beside multiprocessing's own: the processes that they fork have large modules from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing import context, forkserver, popen_forkserver
from typing import Any


def forked_with(modules: Sequence[str]) -> Callable[..., context.ForkServerProcess]:
    """Creates processes like `multiprocessing.Process`, whose server has imported these modules.

    multiprocessing has one server, and its first process determines what that server imports. Here each selection of modules has
    its own server. The server starts with its first process and ends with the interpreter.
    """
    return partial(_Process, _server(tuple(modules)))


@cache
def _server(modules: tuple[str, ...]) -> forkserver.ForkServer:
    server = _Server()
    server.set_forkserver_preload(["xvcomm.testing.forked", *modules])
    return server


PATH = "TEST_RANKS_PATH"
"""The variable by which a server gets this process's import path."""


class _Server(forkserver.ForkServer):
    """Finds modules where this process does; multiprocessing's server has another path, and leaves out what it does not find."""

    def ensure_running(self) -> None:
        os.environ[PATH] = os.pathsep.join(sys.path)
        try:
            super().ensure_running()
        finally:
            del os.environ[PATH]


class _Process(context.ForkServerProcess):
    def __init__(self, server: forkserver.ForkServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server

    def __getstate__(self) -> dict[str, Any]:
        """What the forked process gets: all but the server."""
        return {name: value for name, value in self.__dict__.items() if name != "_server"}

    @staticmethod
    def _Popen(process_obj: Any) -> popen_forkserver.Popen:
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        theirs = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = process_obj._server.connect_to_new_process
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        finally:
            forkserver.connect_to_new_process = theirs
