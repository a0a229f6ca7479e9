"""The table of shapes that compiled code runs."""

from __future__ import annotations

from xvcomm.engine.cache import LaunchCache


def test_a_shape_is_prepared_when_it_comes_again() -> None:
    launches, made = LaunchCache(enabled=True), list[str]()
    for shape in ("a", "b", "a"):
        assert launches.find(shape) is None
        launches.prepare(shape, lambda shape=shape: made.append(shape) or f"launch of {shape}")
    assert made == ["a"] and launches.find("a") == "launch of a" and launches.find("b") is None


def test_a_shape_is_prepared_at_once() -> None:
    launches = LaunchCache(enabled=True)
    assert launches.prepare("a", lambda: "launch", at_once=True) == launches.find("a") == "launch"


def test_a_shape_that_cannot_be_compiled_is_asked_once() -> None:
    launches, asked = LaunchCache(enabled=True), list[int]()
    for _ in range(5):
        assert launches.prepare("shape", lambda: asked.append(1)) is None
    assert len(asked) == 1 and launches.find("shape") is None


def test_disabled_it_prepares_nothing() -> None:
    launches = LaunchCache(enabled=False)
    for _ in range(3):
        assert launches.prepare("shape", lambda: 1 / 0) is None


def test_it_is_bounded() -> None:
    launches = LaunchCache(enabled=True)
    for shape in range(10_000):
        launches.alias(("key", shape), "launch")
        launches.prepare(shape, lambda: "launch")
        launches.prepare(shape, lambda: "launch")
    assert sum(launches.find(shape) is not None for shape in range(10_000)) <= 2000
    assert sum(launches.find(("key", shape)) is not None for shape in range(10_000)) <= 2000
    assert launches.find(9_999) == "launch"
