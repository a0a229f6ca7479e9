"""That memory is registered only after libibverbs was prepared for forks."""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xvcomm.backends.rdma.library import libibverbs
from xvcomm.backends.rdma.pairs import Domain
from xvcomm.errors import ResourceError


class Opened(Exception):
    """The device was opened."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What was called, in order; `result` is that of ibv_fork_init."""
    made = SimpleNamespace(names=[], result=0)

    class Library:
        def __getattr__(self, name: str) -> Any:
            def function(*_: Any) -> int:
                made.names.append(name)
                return int(made.result)

            setattr(self, name, function)
            return function

    def opened(name: str) -> None:
        made.names.append("open")
        raise Opened

    for name, members in {"device": {"Context": opened}, "pd": {}, "pyverbs_error": {"PyverbsError": OSError}}.items():
        module = ModuleType(f"pyverbs.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "pyverbs", ModuleType("pyverbs"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    libibverbs.cache_clear()
    yield made
    libibverbs.cache_clear()


def test_forks_are_prepared_before_a_device_is_opened(calls: Any) -> None:
    with pytest.raises(Opened):
        Domain("mlx5_0")
    assert calls.names == ["ibv_fork_init", "open"]


def test_memory_that_others_have_registered_before(calls: Any) -> None:
    calls.result = errno.EINVAL
    with pytest.raises(ResourceError, match=r"forks are not safe beside RDMA here.*RDMAV_FORK_SAFE=1"):
        Domain("mlx5_0")
    assert "open" not in calls.names
