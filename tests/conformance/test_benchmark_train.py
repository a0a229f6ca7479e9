"""`benchmarks/torch_train.py`: the evaluation of its bars."""

import importlib.util
import sys

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def train(root):
    """The program as a module."""
    sys.path.insert(0, str(root / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_train", root / "benchmarks" / "torch_train.py")
        module = sys.modules["benchmark_train"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "benchmarks"))
    return module


def figures(train, mode, **speeds):
    ways = {"mixed": "xvcomm, two islands", "nccl": "nccl", "gloo": "gloo"}
    return [
        train.Figure(ways[name], mode, 2, float(speed), [], name == "mixed", "2026-01-01", "GPU", failed=not speed)
        for name, speed in speeds.items()
    ]


@pytest.mark.parametrize(
    ("speeds", "word", "code"),
    [
        ({"mixed": 99, "nccl": 100}, " met: ", 0),
        ({"mixed": 98.9, "nccl": 100}, "NOT MET: ", 1),
        ({"mixed": 0, "nccl": 100}, "NOT MET: ", 1),
        ({"mixed": 99, "nccl": 0}, "", 1),
        ({"mixed": 99, "nccl": 100, "gloo": 0}, " met: ", 0),
    ],
    ids=["met", "missed", "failed", "nothing to compare with", "Gloo fails"],
)
def test_the_larger_pipeline_is_judged(train, capsys, speeds, word, code):
    assert train.verdict(figures(train, train.LARGE, **speeds)) == code
    printed = capsys.readouterr().out
    assert word in printed and bool(word) == bool(printed)


def test_other_modes_have_no_bar(train, capsys):
    for mode in train.SHAPES.keys() - {train.LARGE}:
        assert train.verdict(figures(train, mode, mixed=50, nccl=100)) == 0
        assert not capsys.readouterr().out
        assert train.verdict(figures(train, mode, mixed=0, nccl=100)) == 1
