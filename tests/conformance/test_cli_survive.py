"""`xvcomm run --survive`: ranks go on when others fail, and those that fail are started again."""

import os
import textwrap
import time

import pytest
from launching import ENDED, ENV, finish

GO_ON = """
import numpy, xvcomm
comm = xvcomm.init()
comm.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.barrier()
except xvcomm.PeerLost:
    comm = comm.shrink()
time.sleep(3.5)  # longer than ranks have where one ends all
print(int(comm.all_reduce(numpy.ones(1))[0]), "of", comm.size, flush=True)
comm.close()
"""


def test_others_go_on(script):
    """With --survive a rank that fails ends no other one."""
    env = {**ENV, "XVCOMM_DEVICE": "host"}
    code, out, err = finish("-n", "3", "--no-prefix", "--survive", script(GO_ON), env=env)
    assert code == 0 and out.splitlines() == ["2 of 2"] * 2, err
    assert "rank 1 was killed by SIGKILL" in err and "the others go on" in err


def test_none_goes_on(script, tmp_path):
    """With --survive the command fails if all ranks do, with the first one's exit code."""
    program = script(ENDED + "if rank == 1:\n    await_ranks(0)\nsys.exit(3 + rank)")
    code, _, err = finish("-n", "2", "--survive", program, str(tmp_path))
    assert code == 3 and "failed because rank 0 ended with exit code 3" in err


def test_survive_on_several_hosts(script):
    code, _, err = finish("--nnodes", "2", "--node-rank", "0", "--master", "localhost", "--survive", script(""))
    assert code and "--survive works on one host only" in err


COME_BACK = """
import numpy, xvcomm
again = bool(os.environ.get("XVCOMM_REJOIN"))
comm = xvcomm.init()
if again:
    print("again", rank, flush=True)
while comm.size < 3 or not again:
    try:
        if rank == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.size == 3 and comm.all_reduce(numpy.ones(1) * again)[0]:
            break
        if comm.size < 3 and comm.broadcast_object(comm.join_requests() if comm.rank == 0 else None, 0):
            comm = comm.grow()
            break
    except xvcomm.PeerLost:
        comm = comm.shrink()
print(int(comm.all_reduce(numpy.ones(1))[0]), "of", comm.size, flush=True)
comm.close()
"""


def test_a_killed_rank_comes_back(script):
    """With --max-restarts it is started again, and joins the others."""
    env = {**ENV, "XVCOMM_DEVICE": "host"}
    options = "-n", "3", "--no-prefix", "--survive", "--max-restarts", "1"
    code, out, err = finish(*options, script(COME_BACK), env=env)
    assert code == 0 and sorted(out.splitlines()) == ["3 of 3"] * 3 + ["again 1"], out + err
    assert "rank 1 was killed by SIGKILL; the others go on, and it is started again" in err


def test_restarts_end(script, tmp_path):
    """A rank that fails each time is started again so often as was said, and none when all others have ended."""
    text = """
        print(rank, flush=True)
        begun = f"{sys.argv[1]}/begun"
        if rank == 1:
            open(begun, "a").write("1")
            sys.exit(3)
        while not os.path.exists(begun) or len(open(begun).read()) < 3:
            time.sleep(0.02)
        await_ranks(1)
    """
    options = "-n", "2", "--no-prefix", "--survive", "--max-restarts", "2"
    code, out, err = finish(*options, script(ENDED + textwrap.dedent(text)), str(tmp_path))
    assert code == 0 and sorted(out.split()) == ["0", "1", "1", "1"]
    assert err.count("it is started again") == 2 and err.count("the others go on") == 3
    for file in tmp_path.glob("pid.*"):
        file.unlink()
    program = script(ENDED + "print(rank, flush=True)\nif rank == 1:\n    await_ranks(0)\n    sys.exit(3)")
    code, out, err = finish(*options, program, str(tmp_path))
    assert code == 0 and sorted(out.split()) == ["0", "1"] and "started again" not in err


AGAIN = "again = bool(os.environ.get('XVCOMM_REJOIN'))\n"
RESTARTS = "--no-prefix", "--survive", "--max-restarts", "1"


def test_the_first_failure_is_reported(script):
    """And not that of the process that took the rank's place, which had no job to join any more."""
    text = """
        if again:
            open(f"{sys.argv[1]}/{rank}", "w").close()
            time.sleep(60)
        if rank == 1:
            while not os.path.exists(f"{sys.argv[1]}/0"):
                time.sleep(0.02)
        sys.exit(f"a bug in rank {rank}")
    """
    program = script(AGAIN + textwrap.dedent(text))
    code, _, err = finish("-n", "2", *RESTARTS, program, os.path.dirname(program))
    assert code == 1 and "failed because rank 0 ended with exit code 1; its last lines:\na bug in rank 0" in err
    assert err.count("it is started again") == 1 and "no rank is left for those to join" in err


def test_a_restarted_rank_ends_with_the_others(script, tmp_path):
    """Those that it was to join end before it has joined them."""
    text = """
        if again:
            open(f"{sys.argv[1]}/again", "w").close()
            time.sleep(300)
        if rank == 1:
            sys.exit(3)
        while not os.path.exists(f"{sys.argv[1]}/again"):
            time.sleep(0.02)
    """
    program = script(AGAIN + textwrap.dedent(text))
    begun = time.monotonic()
    code, _, err = finish("-n", "2", *RESTARTS, program, str(tmp_path))
    assert code == 0 and time.monotonic() - begun < 100
    assert "it is started again" in err and "no rank is left for those to join" in err


OUTLIVE = """
import xvcomm
again = bool(os.environ.get("XVCOMM_REJOIN"))
comm = xvcomm.init()
if rank == 1 and not again:
    os.kill(os.getpid(), signal.SIGKILL)
while not again and comm.size == 1 or not again and len(comm.job_ranks) == 2 and comm.rank == 0:
    try:
        comm.barrier()
        if comm.size == 1 and comm.join_requests():
            comm = comm.grow()
            comm.barrier()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
    except xvcomm.PeerLost:
        comm = comm.shrink()
if again:
    comm.barrier()
time.sleep(5)
print("lives", rank, flush=True)
"""


def test_a_restarted_rank_that_has_joined_goes_on(script):
    """It is one of the job, also when all others have ended."""
    _, out, err = finish("-n", "2", *RESTARTS, script(OUTLIVE), env={**ENV, "XVCOMM_DEVICE": "host"})
    assert "lives 1" in out, out + err


def test_a_rank_that_cannot_be_started_again(script, tmp_path):
    """The others go on without it."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n[ $RANK = 1 ] && rm {program} && exit 3\nsleep 2\necho done\n")
    program.chmod(0o700)
    code, out, err = finish("-n", "2", *RESTARTS, str(program))
    assert (code, out) == (0, "done\n") and "the others go on without it" in err


def test_a_launcher_in_a_restarted_rank(script):
    """Its ranks begin a job of their own."""
    program = script("print(os.environ.get('XVCOMM_REJOIN'))")
    assert finish("-n", "1", "--no-prefix", program, env={**ENV, "XVCOMM_REJOIN": "1"})[1] == "None\n"


TOO_EARLY = """
import numpy, xvcomm
if rank == int(sys.argv[1]) and not os.environ.get("XVCOMM_REJOIN"):
    sys.exit("cannot begin")
with xvcomm.init() as comm:
    print(int(comm.all_reduce(numpy.ones(1))[0]), "of", comm.size)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_before_it_joins(script, victim):
    """The others wait for it to begin, so the process in its place begins the job with them."""
    env = {**ENV, "XVCOMM_DEVICE": "host"}
    code, out, err = finish("-n", "2", *RESTARTS, script(TOO_EARLY), str(victim), env=env)
    assert code == 0 and out.splitlines() == ["2 of 2"] * 2, out + err


def test_restarts_without_survivors(script):
    code, _, err = finish("-n", "2", "--max-restarts", "1", script(""))
    assert code and "--max-restarts needs --survive" in err
