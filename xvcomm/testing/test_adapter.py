"""Arrays of each framework, and of each pair of frameworks, on every registered backend: within an island
and between islands.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from xvcomm.testing import World, adapter, frameworks

ISLANDS = ("a:2", "a:2,b:1")
PRELOAD = ("torch", "jax.numpy")
NAMES = sorted({*frameworks.ON_HOST, *frameworks.ON_GPUS})
CASES: list[tuple[adapter.Check, tuple[str, ...]]] = [(check, (name,)) for name in NAMES for check in adapter.CHECKS]
CASES += [(check, pair) for pair in itertools.permutations(NAMES, 2) for check in adapter.MEETING]


@pytest.fixture(scope="module")
def absent(world: World, place: tuple[str, str]) -> dict[str, str]:
    """Why frameworks cannot be tested here."""
    there = frameworks.ON_HOST if place[0] == "host" else frameworks.ON_GPUS
    why = {name: f"{name} has no arrays on {place[0]}" for name in NAMES if name not in there}
    return why | {name: world.run(adapter.missing, [name])[0] for name in there}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("check", "names"), [pytest.param(check, names, id="-".join((*names, check.__name__))) for check, names in CASES]
)
def test_arrays_meet(world: World, absent: dict[str, str], check: adapter.Check, names: Sequence[str]) -> None:
    """Every dtype that the frameworks have in common; of two frameworks, ranks use them alternately."""
    why = "; ".join(absent[name] for name in names if absent[name])
    if why:
        pytest.skip(why)
    # JAX compiles a program for every shape, which takes long on a busy machine
    world.run(check, names, timeout=180.0)
