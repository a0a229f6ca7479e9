"""Joins an island's members to one communicator of NCCL or RCCL: they compare their properties, then join on a thread."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from xvcomm.abc.collective import CollectiveStalled
from xvcomm.abc.store import NotSet, Store
from xvcomm.backends.gpu.vendor import Library
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable, DeadlineExceeded
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline


class Member(msgspec.Struct, frozen=True):
    """Properties of a member, compared before the library is called, which would block or print on differences.

    Attributes:
        dtypes: dtypes that its library can reduce on its GPU.
        gpu: equal for two members exactly if they use the same GPU.
        obstacle: why it cannot take part; otherwise empty.
    """

    who: str
    library: str
    version: int
    dtypes: list[str]
    gpu: str
    obstacle: str = ""

    @classmethod
    def of(cls, config: Config, me: int, library: Library, gpu: str) -> Member:
        """Properties of member `me`, on the GPU of this name on this host."""
        version, obstacle = library.version(), ""
        if version < library.least_version:
            least = version_text(library.least_version)
            obstacle = f"{library.name} {version_text(version)} is too old: install {least} or a newer one"
        elif os.environ.get("NCCL_COMM_BLOCKING") == "0":
            obstacle = f"NCCL_COMM_BLOCKING=0 makes {library.name} start a thread for each call: unset it"
        number = f"rank {config.rank}" if config.rank is not None else f"member {me}"
        host = socket.gethostname()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        dtypes = sorted(library.dtypes())
        return cls(f"{number} on {host}", library.name, version, dtypes, f"{gpu}, boot {boot}", obstacle)


class Verdict(msgspec.Struct, frozen=True):
    """Answer of member 0 to all: why they cannot be joined, or what they need to join."""

    refusal: str = ""
    dtypes: list[str] = []
    unique_id: bytes = b""


_decode_member, _decode_verdict = msgspec.json.Decoder(Member).decode, msgspec.json.Decoder(Verdict).decode


def version_text(version: int) -> str:
    """Version number as text: `2.28.9` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def refusal(members: Sequence[Member]) -> str:
    """Why these members cannot be joined, and what to do; empty if they can."""
    for member in members:
        if member.obstacle:
            return f"{member.who}: {member.obstacle}"
    versions: dict[str, list[str]] = {}
    gpus: dict[str, list[str]] = {}
    for member in members:
        versions.setdefault(f"{member.library} {version_text(member.version)}", []).append(member.who)
        gpus.setdefault(member.gpu, []).append(member.who)
    if len(versions) > 1:
        found = "; ".join(f"{version}: {', '.join(whose)}" for version, whose in versions.items())
        return f"{found}: install one version for all, or put them into different islands (XVCOMM_ISLAND)"
    for gpu, whose in gpus.items():
        if len(whose) > 1:
            return (
                f"{' and '.join(whose)} are on one GPU ({gpu}), where {members[0].library} cannot join them: give each "
                "its own GPU (XVCOMM_DEVICE_INDEX), or put them into different islands (XVCOMM_ISLAND)"
            )
    return ""


def meet(mine: Member, me: int, members: int, name: str, store: Store, deadline: Deadline, library: Library) -> Verdict:
    """Exchange and compare the properties of the members; all get the same answer.

    Raises:
        BackendUnavailable: they cannot be joined; on all of them.
        CollectiveStalled: not all members came in time.
    """
    store.set(f"{name}/{me}", msgspec.json.encode(mine), deadline)
    keys = [f"{name}/{member}" for member in range(members)]
    if me:
        try:
            verdict = _decode_verdict(store.get(name, deadline))
        except NotSet as error:
            raise CollectiveStalled(_missing(keys, store) or (0,)) from error
    else:
        try:
            store.wait(keys, deadline)
        except NotSet as error:
            raise CollectiveStalled(_missing(keys, store)) from error
        everybody = [_decode_member(store.get(key, deadline)) for key in keys]
        verdict = Verdict(refusal(everybody))
        if not verdict.refusal:
            # With the same version of the library, some GPUs may support reductions that others do not.
            common = set(mine.dtypes).intersection(*(member.dtypes for member in everybody))
            verdict = Verdict("", sorted(common), library.unique_id())
        store.set(name, msgspec.json.encode(verdict), deadline)
    if verdict.refusal:
        raise BackendUnavailable(verdict.refusal)
    return verdict


def _missing(keys: Sequence[str], store: Store) -> list[int]:
    """The members whose keys are not set."""
    return [member for member, key in enumerate(keys) if not store.has(key)]


def join(start: Callable[[], int], free: Callable[[int], None], done: str, store: Store, deadline: Deadline) -> int:
    """Return the communicator of `start`, which runs on a thread because it blocks; the wait for it observes deadline and lost
    peers.

    Args:
        start: creates the communicator.
        free: frees a communicator that is created too late.
        done: key, of this member only, that is set when `start` has returned.
        store: through which the wait ends early.
        deadline: for all of it.

    Raises:
        DeadlineExceeded: it was not created in time. While the library loads its kernels, it waits for running kernels.
    """
    outcome: Future[int] = Future()

    def work() -> None:
        try:
            comm = start()
        except BaseException as error:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)
        else:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(comm)
            else:
                free(comm)
        with contextlib.suppress(Exception):  # the store may be closed by now
            store.set(done, b"", deadline)

    Daemon("xvcomm-join", work).start()
    try:
        store.wait([done], deadline)
    except BaseException as error:
        if not outcome.cancel() and outcome.exception() is None:
            free(outcome.result())
        if not isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the island's members did not join their library's communicator in time; it loads kernels, and so waits for "
            "those on the GPU, including messages that wait for a rank: call a collective such as barrier() before such messages"
        ) from error
    return outcome.result()
