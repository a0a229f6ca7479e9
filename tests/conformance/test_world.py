"""Ranks for tests: what they have imported when they start, and what becomes of them when they fail."""

import os
import sys

import pytest

from xvcomm.testing import RankFailure, World


def has(comm, module):
    return module in sys.modules


def test_modules_are_imported_before_the_ranks_start(tmp_path, monkeypatch):
    """Also those that only this process's path leads to."""
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with World(2, preload=["colorsys", "only_here"]) as ranks, World(1) as others:
        for module in ("colorsys", "only_here"):
            assert ranks.run(has, module) == [True, True]
            assert others.run(has, module) == [False]


def test_a_module_that_is_missing_is_left_out():
    with World(1, preload=["no_such_module", "colorsys"]) as ranks:
        assert ranks.run(has, "colorsys") == [True]


def fails_on_one(comm, after):
    """Rank 1 raises; the others wait for it, until their deadline."""
    if comm.rank == 1:
        raise ValueError("the first cause")
    comm.barrier(timeout=after)


def process(comm):
    comm.barrier()
    return os.getpid()


def test_ranks_start_again_after_a_failure():
    """A communicator that has failed is of no use to later calls: what failed once would fail them all."""
    with World(2, timeout=100) as ranks:
        before = ranks.run(process)
        with pytest.raises(RankFailure, match=r"\Arank 1: ValueError: the first cause\n--- rank 1\n"):
            ranks.run(fails_on_one, 0.2)
        after = ranks.run(process)
        assert not set(before) & set(after)
        assert ranks.run(process) == after


def test_failures_that_a_test_looks_at_do_not_start_ranks_again():
    with World(2, timeout=100) as ranks:
        before = ranks.run(process)
        with_groups = ranks.outcomes(fails_in_a_group)
        assert isinstance(with_groups[1], ValueError) and with_groups[0] is None
        assert ranks.run(process) == before


def fails_in_a_group(comm):
    comm.split(0).close()
    if comm.rank == 1:
        raise ValueError("expected")


def test_ranks_that_fail_again_and_again_name_the_first_failure():
    """They are not started for each of a hundred tests."""
    with World(1) as ranks:
        for cause in ("the first cause", "the second", "the third"):
            with pytest.raises(RankFailure, match=f"ValueError: {cause}"):
                ranks.run(fails_with, cause)
        with pytest.raises(RankFailure, match=r"3 calls failed before(.|\n)*ValueError: the first cause"):
            ranks.run(process)


def fails_with(comm, cause):
    raise ValueError(cause)
