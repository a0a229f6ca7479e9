"""Members of new communicators: of a split by the colours and keys of all ranks, of a subgroup by an agreement under its name."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex

import msgspec
import numpy as np

from xvcomm.abc.store import NotSet, PrefixStore, Store
from xvcomm.comm.objects import Objects, gather_bytes
from xvcomm.errors import Aborted, ArgumentError, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.rendezvous.store.failure import Failure, Outcome, decode_outcome
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

_SETTLE_SECONDS = 5.0
_LOOKS = 8
"""Number of members whose cards a waiting rank reads at a time: each read is a request to the store."""
_NAMED = 16
_Choice = tuple[int | str | None, int]
_decode_choice = msgspec.msgpack.Decoder(_Choice).decode


def subgroups(
    comm: Objects, color: SupportsIndex | str | None, key: SupportsIndex, deadline: Deadline
) -> list[int] | None:
    """This rank's group, as ranks of `comm` in the group's order; None if `color` is None.

    Raises:
        ArgumentError: a colour is neither int, str nor None, or a key is not an int.
        MismatchError: the colours are ints on some ranks and strs on others; raised on all ranks.
    """
    if not isinstance(color, str) and color is not None:
        color = _whole("color", color, "an int, a str, or None")
    mine = np.frombuffer(msgspec.msgpack.encode((color, _whole("key", key, "an int"))), np.uint8)
    gathered, counts = gather_bytes(comm, mine, None, deadline.left())
    packed = gathered.tobytes()
    choices, start = [], 0
    for count in counts:
        choices.append(_decode_choice(packed[start : start + count]))
        start += count
    _check_types(comm, choices)
    if color is None:
        return None
    members = [(k, rank) for rank, (c, k) in enumerate(choices) if c == color]
    return [rank for _, rank in sorted(members)]


def _whole(what: str, value: SupportsIndex, wanted: str) -> int:
    """Convert an integer type, such as bool or numpy's, to a plain int."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise ArgumentError(f"split: {what} {value!r} is {type(value).__name__}; use {wanted}") from None


def _check_types(comm: Objects, choices: list[_Choice]) -> None:
    first: dict[type, int] = {}
    for rank, (color, _) in enumerate(choices):
        if color is not None:
            first.setdefault(type(color), rank)
    if len(first) > 1:
        said = "; ".join(f"rank {r} gave the {t.__name__} {choices[r][0]!r}" for t, r in first.items())
        raise MismatchError(f"split: colours must all be of one type: {said}", rank=comm.rank, op="split")


@contextlib.contextmanager
def naming(context: Context) -> Iterator[None]:
    """Let an error that names a rank by its number in the whole job name it by the one in this communicator."""
    try:
        yield
    except XvcommError as error:
        error.rank = context.rank
        error.peer = context.ranks.index(error.peer) if error.peer in context.ranks else None
        raise


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """What a waiting member is waiting for: the `number`-th group with these members under a name."""

    members: tuple[int, ...]
    number: int


_decode_card = msgspec.msgpack.Decoder(_Card).decode


class Meetings:
    """Agreement of the members of subgroups, through the store, so that other ranks of the parent are not involved.
    Thread-safe.

    Args:
        context: of the parent communicator.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held: dict[tuple[tuple[int, ...], str], int] = {}
        self._gate = threading.Lock()

    def meet(self, ranks: Sequence[int], name: str, deadline: Deadline) -> tuple[str, tuple[int, ...]]:
        """Wait until all members have called this; returns the group's path, and its members as ranks of the whole job.

        Raises:
            XvcommError: names ranks by their numbers in the whole job.
            ArgumentError: `ranks` are not distinct ranks of the parent that include this one; `name` is not a str.
            MismatchError: a member waits under this name for other ranks, which include this one. On all members that came.
            DeadlineExceeded: names the members that did not come. On all members that came.
            PeerLost: a member died, or closed the parent, before it came. On all members that came.
            Aborted: a member failed meanwhile, or the parent was aborted.
        """
        context = self._context
        members = self._checked(ranks, name)
        context.check_in_job()
        with self._gate:
            number = self._held[members, name] = self._held.get((members, name), 0) + 1
        path = f"{context.path}.{_digest(repr(members), name)}.{number}"
        if len(members) > 1:
            self._await(_Card(members, number), name, path, deadline)
        return path, tuple(context.ranks[m] for m in members)

    def _checked(self, ranks: Sequence[int], name: str) -> tuple[int, ...]:
        if not isinstance(name, str):
            raise ArgumentError(f"subgroup: name {name!r} is {type(name).__name__}; use a str")
        try:
            members = tuple(operator.index(rank) for rank in ranks)
        except TypeError:
            raise ArgumentError(f"subgroup: ranks {ranks!r}: expected integers") from None
        size, me = len(self._context.ranks), self._context.rank
        wrong = next((m for m in members if not 0 <= m < size), None)
        if wrong is not None:
            raise ArgumentError(f"subgroup: rank {wrong}: ranks of this communicator go from 0 to {size - 1}")
        twice = next((m for i, m in enumerate(members) if m in members[:i]), None)
        if twice is not None:
            raise ArgumentError(f"subgroup: rank {twice} occurs twice in ranks {_listed(members)}")
        if me not in members:
            raise ArgumentError(
                f"subgroup: this rank, {me}, is not in ranks {_listed(members)}; only the members of a group call this"
            )
        return members

    def _await(self, mine: _Card, name: str, path: str, deadline: Deadline) -> None:
        """Wait for all members. One member decides the outcome for all that came, as in `join_barrier`."""
        context, store = self._context, self._context.session.store
        cards = PrefixStore(f"comm/{context.path}/{_digest(name)}", store)
        plain = PrefixStore(f"comm/{path}", store)
        looks = 0

        def look() -> None:
            """Called periodically while waiting; usually all members come before the first call."""
            nonlocal looks
            context.check_in_job()
            self._miss(mine, name, plain)
            if not looks:
                cards.set(str(context.rank), msgspec.msgpack.encode(mine), deadline)
            self._compare(mine, name, cards, looks)
            looks += 1

        place = context.session.guarded(f"comm/{path}", look)
        try:
            place.set(f"here/{context.rank}", b"", deadline)
            if place.add("here", 1, deadline) == len(mine.members):
                failure = _decide(place, None)
            else:
                failure = decode_outcome(place.get("outcome", deadline)).failure
        except (NotSet, MismatchError) as error:
            context.check_in_job()  # if the parent has failed, that is the reason, which all members know
            late = isinstance(error, NotSet)
            failure = _decide(place, _late(place, mine.members, name, context.ranks) if late else error)
        except DeadlineExceeded:
            context.check_in_job()
            raise  # the store does not answer, so the others cannot be informed
        except BaseException as error:
            why: XvcommError
            if isinstance(error, PeerLost) and error.peer is not None:
                why = error
            else:
                failed = error.peer if isinstance(error, Aborted) else context.session.rank
                why = Aborted(f"rank {context.rank} failed: {type(error).__name__}: {error}", peer=failed)
            with contextlib.suppress(XvcommError):
                _decide(place, why)
            raise
        if failure is not None:
            raise failure.error(rank=context.session.rank, op="subgroup")

    def _miss(self, mine: _Card, name: str, place: Store) -> None:
        """Raise PeerLost for a member that closed the parent before it came."""
        context = self._context
        for member in context.lifecycle.departed.intersection(mine.members):
            if not place.has(f"here/{member}"):
                info = context.session.infos[context.ranks[member]]
                raise PeerLost(
                    f"subgroup {name!r} of ranks {_listed(mine.members)}: rank {member} on {info.hostname} closed the "
                    f"communicator before it joined; {context.session.liveness.last_words(info.rank)}",
                    rank=context.session.rank, peer=info.rank, op="subgroup",
                )  # fmt: skip

    def _compare(self, mine: _Card, name: str, cards: Store, looks: int) -> None:
        """Raise MismatchError if a member waits for another group that includes this rank, since neither can complete then."""
        me, members = self._context.rank, mine.members
        for i in range(min(_LOOKS, len(members))):
            other = members[(looks * _LOOKS + i) % len(members)]
            try:
                theirs = _decode_card(cards.get(str(other), Deadline.after(0)))
            except DeadlineExceeded:
                continue
            with self._gate:
                came = self._held.get((theirs.members, name), 0) >= theirs.number
            if me in theirs.members and theirs.members != members and not came:
                raise MismatchError(
                    f"subgroup {name!r}: rank {me} gave ranks {_listed(members)}, rank {other} gave "
                    f"{_listed(theirs.members)}; all members must pass equal ranks, and create groups of one name in the "
                    "same order"
                )


def _decide(place: Store, why: XvcommError | None) -> Failure | None:
    """Publish why there is no group, or that there is one, unless another member has published that; gives what applies."""
    mine = msgspec.msgpack.encode(Outcome(None if why is None else Failure.of(why)))
    try:
        return decode_outcome(place.decide("outcome", mine, Deadline.after(_SETTLE_SECONDS))).failure
    except NotSet as error:
        raise DeadlineExceeded(
            "subgroup: the member that decides the outcome is stopped or very slow, or has ended; look for a stopped process"
        ) from error


def _late(place: Store, members: Sequence[int], name: str, world: Sequence[int]) -> DeadlineExceeded:
    """Why the members that came give up; `world`: the numbers of the parent's ranks in the whole job."""
    absent = [rank for rank in members if not place.has(f"here/{rank}")]
    who = f"{'rank' if len(absent) == 1 else 'ranks'} {_listed(absent)}"
    text = (
        f"subgroup {name!r} of ranks {_listed(members)}: {who} did not join in time; all members, and only they, must "
        "call subgroup() with equal ranks and name, equally often"
    )
    return DeadlineExceeded(text, peer=world[absent[0]] if absent else None)


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + more


def _digest(*texts: str) -> str:
    """A short name for texts of any length."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]
