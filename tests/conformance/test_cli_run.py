"""`xvcomm run` with plain scripts as ranks: exit codes, output, signals, order of failures, cleanup."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ENDED, ENV, PID, finish, start


def wait_for(condition, what):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_pids(folder, count):
    wait_for(lambda: len([file for file in folder.glob("pid.*") if file.read_text()]) == count, "ranks did not start")
    return [int(path.read_text()) for path in folder.glob("pid.*")]


def test_each_rank_gets_its_environment(script):
    text = "import json; print(json.dumps({k: v for k, v in os.environ.items()}))"
    code, out, _ = finish("--islands", "cuda:1,rocm:2", "--no-prefix", script(text))
    assert code == 0
    envs = sorted((json.loads(line) for line in out.splitlines()), key=lambda e: e["RANK"])
    assert [e["XVCOMM_RANK"] for e in envs] == [e["LOCAL_RANK"] for e in envs] == ["0", "1", "2"]
    assert [e["XVCOMM_ISLAND"] for e in envs] == ["cuda", "rocm", "rocm"]
    for name in ("XVCOMM_SIZE", "XVCOMM_LOCAL_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert {e[name] for e in envs} == {"3"}
    for name in ("XVCOMM_SECRET", "XVCOMM_JOB", "XVCOMM_STORE", "MASTER_PORT"):
        assert len({e[name] for e in envs}) == 1
    assert len(envs[0]["XVCOMM_SECRET"]) >= 32
    assert int(envs[0]["OMP_NUM_THREADS"]) >= 1


def test_the_users_thread_count_is_kept(script):
    process = start(
        "-n", "1", "--no-prefix", script("print(os.environ['OMP_NUM_THREADS'])"), env={**ENV, "OMP_NUM_THREADS": "7"}
    )
    assert process.communicate(timeout=60)[0] == "7\n"


def test_prefixes_name_rank_and_island(script):
    code, out, err = finish(
        "--islands",
        "cuda:1,rocm:1",
        "--",
        script("print('out', sys.argv[1:]); print('err', file=sys.stderr)"),
        "-n",
        "5",
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[0 cuda] out ['-n', '5']", "[1 rocm] out ['-n', '5']"]
    assert sorted(err.splitlines()) == ["[0 cuda] err", "[1 rocm] err"]


def test_markup_is_left_alone_and_bytes_survive(script):
    code, out, _ = finish("-n", "1", script("sys.stdout.buffer.write(b'[red]x[/] \\xc3\\xa4\\n')"))
    assert (code, out) == (0, "[0] [red]x[/] ä\n")


def test_progress_bars_keep_their_last_state_and_partial_lines_are_printed(script):
    text = "sys.stdout.write('\\r1%\\r50%\\r100%\\nwindows\\r\\nno newline')"
    assert finish("-n", "1", script(text))[1] == "[0] 100%\n[0] windows\n[0] no newline\n"


def test_no_output_is_lost(script):
    text = "for i in range(20000): print(i, 'x' * 50)\nprint('last', file=sys.stderr)\nif rank == 1: os._exit(5)"
    code, out, err = finish("-n", "3", script(text))
    assert code == 5
    for rank in range(3):
        mine = [line.split()[1] for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [str(i) for i in range(20000)]
        assert f"[{rank}] last" in err


def test_colours_on_a_terminal_only(script):
    path = script("print('hello')")
    master, slave = pty.openpty()
    process = start("-n", "1", path, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    try:
        while data := os.read(master, 1 << 16):
            seen += data
    except OSError:  # the other side is closed
        pass
    os.close(master)
    assert process.wait(120) == 0
    assert b"\x1b[" in seen and b"hello" in seen
    assert "\x1b" not in finish("-n", "1", path)[1]


def test_modules_and_programs(tmp_path):
    (tmp_path / "thing.py").write_text("import sys; print('module', sys.argv[1:])")
    assert finish("-n", "1", "-m", "thing", "-x", cwd=tmp_path)[1] == "[0] module ['-x']\n"
    assert finish("-n", "1", "--", "-m", "thing", cwd=tmp_path)[1] == "[0] module []\n"
    assert finish("-n", "1", "--", "sh", "-c", "echo $RANK")[1] == "[0] 0\n"


def test_a_program_that_cannot_be_started_fails_immediately():
    for args, words in (
        (["-n", "2", "nowhere.py"], "no such script: nowhere.py"),
        (["-n", "2", "--", "no-such-program"], "no such program"),
        (["-n", "3", "--islands", "cuda:2", "x.py"], "does not agree with --islands"),
        (["--islands", "cuda:x", "x.py"], "expected label:count"),
    ):
        code, out, err = finish(*args)
        assert code == 2 and not out
        assert words in err and "Traceback" not in err


def test_the_exit_code_and_the_error_of_the_first_failure_come_last(script, tmp_path):
    text = """
await_ranks(0, 1, 2, ended=False)
if rank == 1:
    raise ValueError('the cause')
await_ranks(1)
raise RuntimeError('a consequence')
"""
    code, _, err = finish("-n", "3", script(ENDED + text), str(tmp_path))
    assert code == 1
    assert "rank 1 ended with exit code 1; the others have" in err
    last = err.rpartition("its last lines:")[2]
    assert "ValueError: the cause" in last and "consequence" not in last
    assert err.count("a consequence'") == 2  # the others had time to say what they met


def test_a_rank_that_only_lost_a_peer_is_not_named_as_the_cause(script, tmp_path):
    text = """
if rank == 0:
    await_ranks(1)
    sys.exit('the cause')
await_ranks(0, ended=False)
sys.stderr.write('xvcomm.errors.PeerLost: rank 0 left\\n')
sys.exit(4)
"""
    code, _, err = finish("-n", "2", script(ENDED + text), str(tmp_path))
    assert code == 1
    assert "failed because rank 0 ended with exit code 1" in err
    assert err.rstrip().endswith("the cause")


def test_a_killed_rank_gives_128_plus_signal_and_ends_the_others(script, tmp_path):
    text = "await_ranks(0, 1, 2, ended=False)\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(300)"
    begin = time.monotonic()
    code, _, err = finish("-n", "3", script(ENDED + text), str(tmp_path))
    assert code == 128 + signal.SIGKILL
    assert "failed because rank 1 was killed by SIGKILL" in err
    assert time.monotonic() - begin < 100
    assert not any(alive(pid) for pid in read_pids(tmp_path, 3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank(script, tmp_path, number):
    text = (
        PID
        + """
def leave(number, frame):
    print('got', number)
    sys.exit(0)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
os.mknod(f'{sys.argv[1]}/ready.{rank}')
time.sleep(60)
"""
    )
    process = start("-n", "2", script(text), str(tmp_path))
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "ranks did not start")
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert sorted(out.splitlines()) == [f"[{r}] got {int(number)}" for r in range(2)]
    assert number.name in err


def test_ctrl_c_ends_ranks_that_ignore_it(script, tmp_path):
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PID + "time.sleep(300)"
    process = start("-n", "2", script(text), str(tmp_path))
    pids = read_pids(tmp_path, 2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 130
    assert time.monotonic() - begin > 1
    assert not any(alive(pid) for pid in pids)
    process.communicate()


# A file object would be closed by its destructor, in which an exception of a signal handler is lost.
WAITING = """
import numpy, xvcomm
os.mknod(f'{sys.argv[1]}/begun.{rank}')
comm = xvcomm.init()
x = numpy.zeros(4)
os.mknod(f'{sys.argv[1]}/ready.{rank}')
comm.recv(x, 1 - rank)
"""


def interrupted_at(process, ready):
    """What each of two ranks writes to stderr if it is interrupted once `ready()` is true."""
    wait_for(ready, "ranks did not start")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    return [[line for line in err.splitlines() if line.startswith(f"[{rank}]")] for rank in range(2)]


def test_ctrl_c_shows_the_programs_line_and_the_operation(script, tmp_path):
    process = start("-n", "2", script(WAITING), str(tmp_path))
    for lines in interrupted_at(process, lambda: len(list(tmp_path.glob("ready.*"))) == 2):
        assert len(lines) <= 8 and lines[-1].endswith("KeyboardInterrupt")
        text = "\n".join(lines)
        assert "comm.recv(x, 1 - rank)" in text and ", in recv" in text
        assert "transfers.py" not in text and "device.py" not in text


def test_ctrl_c_while_kernels_are_compiled_does_not_show_the_compiler(script, tmp_path):
    cache = tmp_path / "kernels"
    env = {**ENV, "XVCOMM_KERNEL_CACHE": str(cache)}
    process = start("-n", "2", "--grace", "50", script(WAITING), str(tmp_path), env=env)
    begun = [cache / "lock", *(tmp_path / f"begun.{rank}" for rank in range(2))]
    for lines in interrupted_at(process, lambda: all(file.exists() for file in begun)):
        text = "\n".join(lines)
        assert len(lines) <= 12 and "comm = xvcomm.init()" in text
        assert "numba" not in text and "another exception" not in text and "_Missing" not in text


def test_killing_the_launcher_ends_the_ranks(script, tmp_path):
    process = start("-n", "2", script(PID + "time.sleep(60)"), str(tmp_path))
    pids = read_pids(tmp_path, 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in pids), "ranks outlived the launcher")


def test_children_of_ranks_are_ended_too(script, tmp_path):
    text = (
        PID
        + "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen(f'{sys.argv[1]}/child', 'w').write(str(child.pid))"
    )
    code, _, _ = finish("-n", "1", script(text), str(tmp_path))
    assert code == 0
    assert not alive(int((tmp_path / "child").read_text()))


def test_a_closed_pipe_ends_the_job(script, tmp_path):
    process = start("-n", "1", script(PID + "while True: print('x' * 1000)"), str(tmp_path))
    pids = read_pids(tmp_path, 1)
    process.stdout.close()
    assert process.wait(120) == 128 + signal.SIGPIPE
    assert not any(alive(pid) for pid in pids)
    process.stderr.close()


def test_ctrl_c_works_while_the_output_is_not_read(script, tmp_path):
    process = start("-n", "1", script(PID + "while True: print('x' * 1000)"), str(tmp_path))
    pids = read_pids(tmp_path, 1)
    time.sleep(0.5)  # by now every pipe is full
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert not any(alive(pid) for pid in pids)
    process.communicate()


def test_rank_0_reads_standard_input(script):
    process = start("-n", "2", script("print(sys.stdin.read() or 'nothing')"), stdin=subprocess.PIPE)
    out, _ = process.communicate("typed", timeout=60)
    assert sorted(out.splitlines()) == ["[0] typed", "[1] nothing"]


def test_leftover_shared_memory_is_removed(script, tmp_path):
    text = """
name = f"{os.environ['XVCOMM_SHM_DIR']}/xvcomm-{os.environ['XVCOMM_JOB']}-{rank}"
open(name, 'w').write('left')
open(os.environ['XVCOMM_SHM_DIR'] + '/xvcomm-another-job', 'w')
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, _ = finish("-n", "2", script(text), env={**ENV, "XVCOMM_SHM_DIR": str(tmp_path)})
    assert code == 137
    assert [p.name for p in tmp_path.glob("xvcomm-*")] == ["xvcomm-another-job"]


WITHOUT_IPV4 = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 0x49))  # SIOCSIFFLAGS: up
    address = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, bytes(4))
    fcntl.ioctl(probe, 0x8916, address)  # SIOCSIFADDR: none
    try:
        probe.bind(("127.0.0.1", 0))
    except OSError:
        os.execv(sys.argv[1], sys.argv[1:])
sys.exit(77)
"""


def test_a_host_without_ipv4(tmp_path: Path) -> None:
    """In a separate network namespace, if the system allows users to create one."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, numpy, xvcomm\n"
        "with xvcomm.init() as comm:\n"
        "    x = numpy.ones(4)\n"
        "    comm.all_reduce(x)\n"
        "    assert x[0] == 2\n"
        "    print('done', os.environ['MASTER_ADDR'])\n"
    )
    inside = [sys.executable, "-c", WITHOUT_IPV4, sys.executable, "-m", "xvcomm", "run", "-n", "2", str(script)]
    try:
        done = subprocess.run(["unshare", "-rn", *inside], capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare:" in done.stderr or "PermissionError" in done.stderr.partition("xvcomm")[0]:
        pytest.skip("no network namespace without IPv4 can be made here")
    assert done.returncode == 0 and done.stdout.count("done ::1") == 2, done.stdout + done.stderr
