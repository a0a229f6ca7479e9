"""Keys of memory that all devices register, but for those that do not answer any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xvcomm.abc.cards import Keys
from xvcomm.errors import ResourceError

if TYPE_CHECKING:
    from xvcomm.backends.rdma.pairs import Domain


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
