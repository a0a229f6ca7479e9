"""Ranks for tests: what they have imported when they start."""

import sys

from xvcomm.testing import World


def has(comm, module):
    return module in sys.modules


def test_modules_are_imported_before_the_ranks_start():
    with World(2, preload=["colorsys"]) as ranks, World(1) as others:
        assert ranks.run(has, "colorsys") == [True, True]
        assert others.run(has, "colorsys") == [False]


def test_a_module_that_is_missing_is_left_out():
    with World(1, preload=["no_such_module", "colorsys"]) as ranks:
        assert ranks.run(has, "colorsys") == [True]
