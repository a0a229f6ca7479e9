"""Random programs with one fault each: survivors get the right error in time, correct data, and leave nothing behind.

A run is determined by its seed. To repeat one:

    pytest "tests/faults/test_faults_campaign.py::test_run[17]"

Seeds from 10,000 on are over several hosts: labels, and two network namespaces where a link is cut or loses packets.
"""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from campaign import AMPLE, CUTS, EMULATED, HOSTS, STEPS, Ending, Run, Stumble, play
from emulated import EmulatedHosts

from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, MismatchError, PeerLost, ResourceError
from xvcomm.testing.hosts import NAMES, Hosts
from xvcomm.testing.processes import RankFailure
from xvcomm.testing.world import World
from xvcomm.types.topology import parse_islands
from xvcomm.wire.rails import SILENT_SECONDS

USUAL, ALL = 60, 1000
SOON = 60.0
"""Seconds; about two are expected on an idle machine."""
ROOM = 64 << 10
"""Kilobytes of /dev/shm that a rank fills, Docker's default size."""

MINE = {
    "exception": Stumble, "signal": Stumble, "leave": ClosedError, "abort": Aborted, "mismatch": MismatchError,
    "stop": DeadlineExceeded, "missing": DeadlineExceeded, "no descriptors": (ResourceError, Aborted),
}  # fmt: skip
"""Errors of the victim, if it lives. Of several asynchronous operations, only the one that failed names the
missing resource.
"""
OTHERS = {
    "kill": PeerLost, "kill later": PeerLost, "exception": PeerLost, "leave": PeerLost, "signal": (PeerLost, Aborted),
    "abort": Aborted, "mismatch": MismatchError, "stop": DeadlineExceeded, "missing": DeadlineExceeded,
    "no descriptors": Aborted,
}  # fmt: skip
"""Errors of the other ranks, which name the victim."""


def settings(run, tmp_path, small_folder):
    """Variables of the ranks; the folder of shared memory."""
    folder = "/dev/shm"
    if run.fault in ("full shm", "tiny shm"):
        folder = str(small_folder(4 * run.room + 4 if run.fault == "tiny shm" else ROOM))
    env = {"XVCOMM_SHM_DIR": folder}
    if run.fault.startswith("cut off"):
        env["XVCOMM_PEER_TIMEOUT"] = "1"
    if run.store == "rank 0" and run.fault in CUTS:
        env["XVCOMM_STORE"] = "tcp://10.77.0.1:29711"
    elif run.store == "rank 0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["XVCOMM_STORE"] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    elif run.store == "file":
        (tmp_path / "store").mkdir(mode=0o700)
        env["XVCOMM_STORE"] = f"file://{tmp_path / 'store'}"
    return env, folder


@contextlib.contextmanager
def networks(run):
    """The network namespace of each host whose links a run cuts, and further variables of the ranks."""
    if run.fault not in CUTS:
        yield {}, {}
        return
    try:
        hosts = EmulatedHosts(seed=run.seed) if run.fault in EMULATED else Hosts()
    except ResourceError as error:
        pytest.skip(str(error))
    with hosts:
        controls = [str(hosts.control(link)) for link in range(2)] if run.fault in EMULATED else []
        namespaces = {name: hosts.namespace(side) for side, name in enumerate(NAMES)}
        yield namespaces, {"LINKS": os.pathsep.join(controls)}


def outcomes_of(run, env, folder):
    """Result or error of each rank."""
    try:
        with (
            networks(run) as (namespaces, more),
            World(islands=run.topology, hosts=run.hosts, namespaces=namespaces, env=env | more, timeout=AMPLE) as world,
        ):
            for rank in range(run.size):
                world.submit(rank, play, run.seed, folder)
            if run.fault == "stop":
                others = [rank for rank in range(run.size) if rank != run.victim]
                outcomes = world.collect(*others)
                world.kill(run.victim, signal.SIGCONT)
                return [*outcomes[: run.victim], *world.collect(run.victim), *outcomes[run.victim :]]
            return world.collect()
    except RankFailure as failure:
        assert run.fault == "tiny shm", failure
        return [Ending(error, getattr(error, "peer", None), 0.0, 0.0) for error in failure.outcomes]


def check(run, outcomes, folder):
    """Check that every live rank ended as the fault requires, and named the victim."""
    endings = dict(enumerate(outcomes))
    if run.fault.startswith("kill"):
        assert isinstance(endings.pop(run.victim), EOFError)
    for rank, ending in endings.items():
        assert isinstance(ending, Ending), f"rank {rank}: {ending!r}"
        assert ending.seconds < run.timeout + patience(run), f"rank {rank}: {ending}"
        assert ending.leaving < patience(run), f"rank {rank}: {ending}"
        assert not ending.left, f"rank {rank}: {ending}"
    if run.fault in ("none", "fork", "cut link", "cut one way", "lost packets"):
        assert not any(ending.error for ending in endings.values())
    elif run.fault.startswith("cut off"):
        check_cut_off(run, endings)
    elif run.fault.endswith("shm"):
        check_without_room(endings, folder)
    elif run.fault != "no descriptors" or any(ending.error for ending in endings.values()):
        for rank, ending in endings.items():
            assert explained(rank, endings, run), f"rank {rank}: {ending}"


def patience(run):
    """Seconds for a rank to end: more where it waits for a stopped rank of another host to have what was sent."""
    return SOON + (SILENT_SECONDS if run.hosts and run.fault == "stop" else 0.0)


def explained(rank, endings, run):
    """Whether a rank raised what the fault requires and named the victim.

    Ranks outside of a subgroup, and members that come later, learn of its failure only from members that leave or do not come,
    as do hosts to which the store tells nothing, or of a loss later than the rings: their error may name such a rank, if the
    chain of named ranks leads to the victim.
    """
    error, mine = endings[rank].error, rank == run.victim
    wanted = (MINE if mine else OTHERS)[run.fault]
    if run.fault == "mismatch":
        named = f"rank {run.victim} on " in str(error)
    else:
        named = mine or endings[rank].peer == run.victim
    if isinstance(error, wanted) and named:
        return True
    late = run.fault in ("stop", "missing")
    told = any(isinstance(e.error, DeadlineExceeded) and awaited(run, str(e.error)) for e in endings.values())
    if late and told and isinstance(error, (DeadlineExceeded, PeerLost) if run.parts else DeadlineExceeded):
        return True
    # Without a ring between them, a deaf host learns of it by its own deadline alone.
    known = (PeerLost, wanted) if late else (PeerLost, DeadlineExceeded) if run.deaf else PeerLost
    follows = isinstance(error, known) and (late or not mine)
    by_rumour = run.parts or run.deaf
    return by_rumour and follows and run.victim in chain(rank, endings)


def awaited(run, text):
    """Whether an error names the victim, possibly with other ranks.

    A rank that waits for an asynchronous message looks like one that computes: its newest record is what it began afterwards.
    If the store does not answer, the other ranks cannot know whether rank 0 or the launcher serves it.
    """
    names = text.partition("was waiting for ")[2].partition(";")[0]
    silent = run.store == "rank 0" and run.victim == 0 and "the process that serves it (rank 0, or" in text
    return silent or (any(step.__name__ == "_messages" for step, _ in run.program) and f"rank {run.victim} on" in names)


def chain(rank, endings):
    """The ranks that an error names: its peer, the peer of that rank's error, and so on."""
    found = []
    while (ending := endings.get(rank)) and ending.peer is not None and ending.peer not in found:
        rank = ending.peer
        found.append(rank)
    return found


def check_cut_off(run, endings):
    """Check that every rank lost one of the other host. One that hears it needs no more of it in the last step than it hears."""
    places = parse_islands(run.hosts)
    hears = NAMES[run.victim % 2] if run.fault == "cut off one way" and run.step == STEPS - 1 else None
    for rank, ending in endings.items():
        if places[rank] == hears and ending.error is None:
            continue
        apart = any(places[peer] != places[rank] for peer in chain(rank, endings))
        storeless = places[rank] != places[0] and "which served the job's store" in str(ending.error)
        assert isinstance(ending.error, PeerLost) and (apart or storeless), f"rank {rank}: {ending}"


def check_without_room(endings, folder):
    """Check that all ranks completed, or that one lacked a resource and the others got its error, or PeerLost."""
    failed = [
        rank for rank, ending in endings.items()
        # What was in the air after the operation that failed raises Aborted that names this rank.
        if isinstance(ending.error, ResourceError) or (isinstance(ending.error, Aborted) and ending.peer == rank)
    ]  # fmt: skip
    assert failed or not any(ending.error for ending in endings.values()), f"no rank says what it lacked: {endings}"
    for rank, ending in endings.items():
        if isinstance(ending.error, PeerLost):
            assert set(chain(rank, endings)) & set(failed), f"rank {rank}: {ending}"
        elif failed:
            assert isinstance(ending.error, (ResourceError, Aborted)), f"rank {rank}: {ending}"
            assert f"{folder} is full" in str(ending.error), f"rank {rank}: {ending}"


def seeds(first):
    """Seeds from `first` on, of which those that run only in `make test-slow` are marked."""
    return [first + n if n < USUAL else pytest.param(first + n, marks=pytest.mark.slow) for n in range(ALL)]


@pytest.mark.parametrize("seed", seeds(0) + seeds(HOSTS))
def test_run(seed, tmp_path, small_folder):
    run = Run.of(seed)
    env, folder = settings(run, tmp_path, small_folder)
    outcomes = outcomes_of(run, env, folder)
    if run.fault == "full shm":
        (Path(folder) / "of others").unlink(missing_ok=True)
    told = [f"rank {rank}: {str(o.error) if isinstance(o, Ending) else o!r}" for rank, o in enumerate(outcomes)]
    print(run, *told, f"again: pytest '{os.path.relpath(__file__)}::test_run[{seed}]'", sep="\n")
    check(run, outcomes, folder)
