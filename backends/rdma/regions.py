"""Registers memory: with all devices, but for those that do not answer any more; with access flags that not all know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from xvcomm.abc.cards import Keys
from xvcomm.errors import ResourceError

if TYPE_CHECKING:
    from xvcomm.backends.rdma.pairs import Domain

Region = TypeVar("Region")


def register_all(domains: Sequence[Domain], register: Callable[[Domain], Any]) -> list[Keys]:
    """Register memory with each device; the keys of one that was removed are 0, and no rail uses them.

    Args:
        register: with one device; gives its region, with `lkey` and `rkey`.

    Raises:
        ResourceError: a device refuses that answers, or none answers.
    """
    keys: list[Keys] = []
    for domain in domains:
        try:
            region = register(domain)
        except ResourceError:
            if answers(domain) or not any(map(answers, domains)):
                raise
            keys.append(Keys(0, 0))
        else:
            keys.append(Keys(region.lkey, region.rkey))
    return keys


def answers(domain: Domain) -> bool:
    """Whether a device still tells its ports."""
    try:
        domain.ask()
    except ResourceError:
        return False
    return True


def with_optional(register: Callable[[int], Region], access: int, optional: int) -> tuple[Region, int]:
    """Register memory with optional access flags, or without them where the device or the kernel refuses them.

    Args:
        register: takes the flags.

    Returns:
        The region, and the optional flags that it has.

    Raises:
        ResourceError: it is refused without them, too.
    """
    if optional:
        with contextlib.suppress(ResourceError):
            return register(access | optional), optional
    return register(access), 0
