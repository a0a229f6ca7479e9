"""`xvcomm run --nnodes` with plain scripts as ranks: two launchers on this machine, each as on a host of its own."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from launching import ENDED

from xvcomm.testing.signals import await_that

ENV = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {
    "XVCOMM_SECRET": "s",
    "XVCOMM_TIMEOUT": "60",
}
HEAD = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
SEEN = "pathlib.Path(sys.argv[1], f'pid.{rank}').write_text(str(os.getpid()))\n"


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def node(port, tmp_path):
    """Starts a launcher; all that still run at the end are killed."""
    script = tmp_path / "rank.py"
    started = []

    def start(number, text, *options, env=None, count=2):
        script.write_text(HEAD + text)
        place = ("--nnodes", str(count), "--node-rank", str(number), "--master", f"127.0.0.1:{port}")
        command = [sys.executable, "-m", "xvcomm", "run", *place, *options, str(script), str(tmp_path)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=ENV | (env or {}), text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(*launchers):
    """Exit codes, and what was written to stderr."""
    errors = [launcher.communicate(timeout=200)[1] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], errors


def pids(folder, count):
    await_that(lambda: len([p for p in folder.glob("pid.*") if p.read_text()]) == count)
    return [int(path.read_text()) for path in folder.glob("pid.*")]


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_are_numbered_by_node(node):
    """Different numbers of ranks on the nodes, and islands given for the whole job."""
    text = "import json; print(json.dumps(dict(os.environ)))"
    islands = ("--islands", "x:1,y:1,z:1", "--no-prefix")
    launchers = [node(0, text, "-n", "1", *islands), node(1, text, "--nproc-per-node", "2", *islands)]
    outputs = [launcher.communicate(timeout=200) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    envs = [sorted(map(json.loads, out.splitlines()), key=lambda env: env["RANK"]) for out, _ in outputs]
    first, second, third = [*envs[0], *envs[1]]
    assert (len(envs[0]), len(envs[1])) == (1, 2)
    for env, numbers in ((first, "00x10"), (second, "10y21"), (third, "21z21")):
        names = ("XVCOMM_RANK", "XVCOMM_LOCAL_RANK", "XVCOMM_ISLAND", "XVCOMM_LOCAL_SIZE", "GROUP_RANK")
        assert "".join(env[name] for name in names) == numbers
        assert env["RANK"] == env["XVCOMM_RANK"] and env["LOCAL_RANK"] == env["XVCOMM_LOCAL_RANK"]
    for name in ("XVCOMM_STORE", "XVCOMM_SECRET", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "XVCOMM_SIZE"):
        assert first[name] == second[name] == third[name]
    assert first["WORLD_SIZE"] == "3"


def test_a_dead_rank_ends_the_ranks_of_all_nodes(node, tmp_path):
    """Both launchers name it, although a rank of the other node that met the consequence ended first."""
    text = ENDED + (
        "await_ranks(0, 1, 2, ended=False)\n"
        "if rank == 0: await_ranks(1); print('the cause', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 1: sys.stderr.write('xvcomm.errors.PeerLost: rank 0 was lost\\n'); sys.exit(4)\n"
        "time.sleep(60)"
    )
    launchers = [node(0, text, "-n", "1"), node(1, text, "-n", "2")]
    codes, errors = ends(*launchers)
    assert codes == [128 + signal.SIGKILL] * 2, errors
    for error in errors:
        assert (
            f"failed because rank 0 on {socket.gethostname()} was killed by SIGKILL; its last lines:\nthe cause"
            in error
        )
    assert all(map(ended, pids(tmp_path, 3)))


def test_ctrl_c_on_one_node_ends_all(node, tmp_path):
    launchers = [node(number, SEEN + "time.sleep(60)", "-n", "1") for number in range(2)]
    ranks = pids(tmp_path, 2)
    launchers[1].send_signal(signal.SIGINT)
    codes, errors = ends(*launchers)
    assert codes == [130, 130] and all("ended by SIGINT" in error for error in errors), errors
    assert all(map(ended, ranks))


def test_a_node_waits_for_the_others(node, tmp_path):
    """A node whose ranks have ended hears of failures as long as others run, and can be interrupted."""
    text = SEEN + "if rank == 0: sys.exit()\ntime.sleep(0.7)\nsys.exit(5)"
    codes, errors = ends(*(node(number, text, "-n", "1") for number in range(2)))
    assert codes == [5, 5] and all("rank 1 on" in error for error in errors), errors


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher_ends_the_ranks_of_all_nodes(node, tmp_path, killed):
    launchers = [node(number, SEEN + "time.sleep(60)", "-n", "1") for number in range(2)]
    ranks = pids(tmp_path, 2)
    launchers[killed].kill()
    codes, errors = ends(*launchers)
    assert codes[1 - killed] == 1
    assert f"failed because the launcher of node {killed} on {socket.gethostname()} was lost" in errors[1 - killed]
    await_that(lambda: all(map(ended, ranks)))


def test_a_missing_node_is_named(node):
    codes, errors = ends(node(0, "", "-n", "1", env={"XVCOMM_TIMEOUT": "1"}))
    assert codes == [2] and "node 1 of 2 did not join in time" in errors[0]


def test_a_wrong_master(node):
    """Nothing listens there; or it is not the host of node 0."""
    codes, errors = ends(node(1, "", "-n", "1", env={"XVCOMM_TIMEOUT": "1"}))
    assert codes == [2] and "node 1 cannot reach node 0, --master 127.0.0.1:" in errors[0]


def test_a_port_in_use(node, port):
    with socket.create_server(("127.0.0.1", port)):
        codes, errors = ends(node(0, "", "-n", "1"))
    assert codes == [2] and f"port {port} of 127.0.0.1 is in use by another job or program" in errors[0]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"env": {"XVCOMM_SECRET": "other"}}, "has a different secret: set XVCOMM_SECRET"),
        ({"count": 3}, "give all of them the same --nnodes"),
    ],
)
def test_nodes_that_disagree(node, second, words):
    waiting = node(0, "", "-n", "1", env={"XVCOMM_TIMEOUT": "5"})
    codes, errors = ends(node(1, "", "-n", "1", **second))
    assert codes == [2] and words in errors[0], errors
    assert ends(waiting)[0] == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nnodes", "2", "--master", "h"), "--nnodes 2 needs --node-rank"),
        (("--nnodes", "2", "--node-rank", "1"), "--nnodes 2 needs --master"),
        (("--nnodes", "2", "--node-rank", "2", "--master", "h"), "--node-rank 2 does not fit --nnodes 2"),
        (("--nnodes", "2", "--node-rank", "0", "--master", "h:x"), "--master h:x: expected HOST or HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--master", "127.0.0.1"), "set XVCOMM_SECRET"),
    ],
)
def test_wrong_options(options, words):
    env = {name: value for name, value in ENV.items() if name != "XVCOMM_SECRET"}
    done = subprocess.run(
        [sys.executable, "-m", "xvcomm", "run", *options, "true"], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
