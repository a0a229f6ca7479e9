"""Jobs over two hosts: every way to start them, and what happens to all when one process dies."""

from __future__ import annotations

import sys
from pathlib import Path

RANKS = str(Path(__file__).parent / "ranks.py")


def start(two_hosts, sides, *arguments, env=None):
    """A rank on each of these hosts, by variables alone."""
    job = {"XVCOMM_SIZE": str(len(sides)), "XVCOMM_STORE": "tcp://a:29711", **(env or {})}
    return [
        two_hosts.begin(side, sys.executable, RANKS, *arguments, env={**job, "XVCOMM_RANK": str(rank)})
        for rank, side in enumerate(sides)
    ]


def test_rank_0_is_killed(two_hosts):
    """Ranks without a wire to rank 0 hear of its death from the store, which dies with it."""
    first, *others = start(two_hosts, (0, 1, 1), "outlive")
    text, _ = first.communicate(timeout=60)
    assert first.returncode == -9 and text.startswith("ready"), text
    killed = float(text.split()[1])
    for text in two_hosts.outputs(others):
        raised, peer, words = text.split(maxsplit=2)
        assert float(raised) - killed < 2 and peer == "0" and "rank 0 on a was lost" in words, text
