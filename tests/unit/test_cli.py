"""The commands' logic, in this process: lines, environments, plans, reports."""

import json
import os
import re
import tracemalloc
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import xvcomm
from xvcomm.cli import app
from xvcomm.cli.doctor import examine
from xvcomm.cli.output import LineAssembler, Outlet, RankStream, prefixes
from xvcomm.cli.plan import scale
from xvcomm.cli.run import rank_environments, rank_labels, resolve
from xvcomm.config import table
from xvcomm.engine.session.presence import NOWHERE
from xvcomm.errors import ArgumentError


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_they_arrive(step):
    text = b"one\n\ntwo\r\nbar 1%\rbar 50%\rbar 100%\n\x1b[31mred\x1b[0m\nlast"
    assembler = LineAssembler()
    lines = [line for i in range(0, len(text), step) for line in assembler.feed(text[i : i + step])]
    assert assembler.unfinished == b"last"
    assert lines + assembler.finish() == [b"one", b"", b"two", b"bar 100%", b"\x1b[31mred\x1b[0m", b"last"]
    assert assembler.finish() == []


def test_a_progress_bar_without_newlines_takes_no_memory():
    assembler = LineAssembler()
    tracemalloc.start()
    for i in range(10_000):
        assert assembler.feed(b"\rstep %d" % i) == []
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert assembler.unfinished == b"step 9999"
    assert grown < 10_000


def test_a_line_without_end_is_cut():
    assembler = LineAssembler()
    lines = assembler.feed(b"x" * 200_000)
    assert b"".join(lines + assembler.finish()) == b"x" * 200_000
    assert len(lines) == 3


def test_prefixes_are_aligned_and_coloured_only_if_asked():
    assert prefixes(["cuda", ""], colour=False) == [b"[0 cuda] ", b"[1]      "]
    first, second = prefixes(["a", "b"], colour=True)
    assert first.startswith(b"\x1b[") and first != second.replace(b"1 b", b"0 a")


def test_a_terminal_shows_the_unfinished_line_below_whole_ones():
    master, slave = os.openpty()
    try:
        outlet = Outlet(slave, {})
        bar, other = RankStream(outlet, b"[0] "), RankStream(outlet, b"[1] ")
        bar.feed(b"\r10%")
        outlet.redraw()
        other.feed(b"hello\n")
        outlet.redraw()
        bar.feed(b"\r100%\n")
        outlet.redraw()
        outlet.write_some()
        shown = b""
        while not shown.endswith(b"100%\r\n"):  # the terminal may hand it out in parts
            shown += os.read(master, 4096)
        assert shown == b"[0] 10%\r\x1b[K[1] hello\r\n[0] 10%\r\x1b[K[0] 100%\r\n"
    finally:
        os.close(master)
        os.close(slave)


def test_rank_labels():
    assert rank_labels(3, None) == ("", "", "")
    assert rank_labels(None, "cuda:1,rocm:2") == ("cuda", "rocm", "rocm")
    assert len(rank_labels(None, None)) == len(os.sched_getaffinity(0))
    with pytest.raises(ArgumentError, match="has 3 ranks"):
        rank_labels(2, "cuda:1,rocm:2")


def test_resolve(tmp_path):
    script = tmp_path / "a.py"
    script.touch()
    assert resolve([str(script), "x"], module=False)[1:] == ("-u", str(script), "x")
    assert resolve(["-m", "mod", "-v"], module=False)[1:] == ("-u", "-m", "mod", "-v")
    assert resolve(["mod"], module=True)[1:] == ("-u", "-m", "mod")
    assert resolve(["sh", "-c", "true"], module=False) == ("sh", "-c", "true")


def test_ranks_keep_what_the_user_set():
    envs = list(rank_environments({"OMP_NUM_THREADS": "3", "RANK": "9"}, ["a", ""], 0, 2))
    assert [e["RANK"] for e in envs] == ["0", "1"]
    assert envs[0]["OMP_NUM_THREADS"] == "3"
    assert envs[0]["XVCOMM_ISLAND"] == "a" and "XVCOMM_ISLAND" not in envs[1]


def test_scaling_islands_keeps_their_proportions():
    assert scale(("a", "b"), None) == ("a", "b")
    assert scale(("a", "a", "a", "b"), 8) == ("a",) * 6 + ("b",) * 2
    assert scale(("a",) * 99 + ("b",), 3) == ("a", "a", "b")
    assert len(scale(("a", "b", "c"), 10_000)) == 10_000
    with pytest.raises(ArgumentError, match="cannot form"):
        scale(("a", "b"), 1)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather"])
def test_plan_prints_steps_and_costs(op):
    result = CliRunner().invoke(app, ["plan", op, "--islands", "cuda:3,rocm:2", "--bytes", "1M", "--rank", "4"])
    assert result.exit_code == 0, result.output
    assert "5 ranks: cuda x 3, rocm x 2" in result.output
    assert "on rank 4" in result.output and "predicted:" in result.output


def test_plan_of_ten_thousand_ranks():
    result = CliRunner().invoke(app, ["plan", "all_reduce", "--ranks", "10000", "--steps", "2"])
    assert result.exit_code == 0, result.output
    assert "10000 ranks: cuda x 5000, rocm x 5000" in result.output and "more" in result.output


def test_plan_over_hosts():
    """Prints the hosts, counts their interfaces in, and refuses labels that do not name as many ranks."""
    arguments = ["plan", "all_reduce", "--islands", "cuda:2,rocm:2", "--bytes", "64M", "--hosts"]
    times = []
    for hosts in ("a:4", "a:2,b:2"):
        result = CliRunner().invoke(app, [*arguments, hosts, "--wire", "10"])
        assert result.exit_code == 0, result.output
        assert ("hosts: a x 2, b x 2" in result.output) == (hosts == "a:2,b:2")
        times.append(float(re.search(r"predicted: ([\d.]+) us", result.output)[1]))
    assert times[1] > 3 * times[0]
    result = CliRunner().invoke(app, [*arguments, "a:3"])
    assert isinstance(result.exception, ArgumentError) and "has 3 ranks" in str(result.exception)


def test_doctor_reports_as_json():
    result = CliRunner().invoke(app, ["doctor", "--json"], env={"XVCOMM_SECRET": "hush"})
    report = json.loads(result.output)
    assert result.exit_code == 0
    assert {"host"} <= {b["name"] for b in report["backends"] if b["usable"]}
    assert report["shared_memory"]["bytes"] >= report["shared_memory"]["free"] > 0
    assert "hush" not in result.output
    assert {v["name"]: v["value"] for v in report["variables"]}["XVCOMM_SECRET"] == "(set)"


def test_doctor_says_what_a_usable_backend_lacks(monkeypatch):
    def lacks(self):
        return "no fortune", "marry"

    monkeypatch.setattr("xvcomm.backends.host.HostBackend.lacks", lacks)
    (host,) = [b for b in examine({}).backends if b["name"] == "host"]
    assert host["usable"] and (host["lacks"], host["remedy"]) == ("no fortune", "marry")
    output = CliRunner().invoke(app, ["doctor"]).output
    assert "no fortune" in output and "marry" in output


def test_doctor_prints_the_verdict_first_and_only_settings_that_are_set():
    env = dict.fromkeys((name for name, _, _ in table()), "") | {"XVCOMM_TIMEOUT": "77"}
    result = CliRunner().invoke(app, ["doctor"], env=env)
    assert result.exit_code == 0
    assert result.output.startswith("Jobs on host memory can run here.")
    for title in ("Machine", "Shared memory", "Limits", "Backends", "Transports", "Settings"):
        assert title in result.output
    assert "77" in result.output and "XVCOMM_TI" in result.output
    assert "XVCOMM_RING" not in result.output and "--all" in result.output
    output = CliRunner().invoke(app, ["doctor", "--all"], env=env | {"COLUMNS": "200"}).output
    assert all(name in output for name, _, _ in table()) and "--all" not in output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"xvcomm {xvcomm.__version__}\n")


def test_doctor_reports_how_deaths_are_detected(monkeypatch):
    assert examine({}).shared_memory["deaths_noticed_by"].startswith("process descriptors")

    def forbid(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.pidfd_open", forbid)
    told = examine({}).shared_memory["deaths_noticed_by"]
    assert told.startswith("locks on /dev/shm") and "pidfd_open: Operation not permitted" in told
    monkeypatch.setattr("xvcomm.engine.session.presence.Presence.take", lambda _: SimpleNamespace(byte=NOWHERE))
    assert any("noticed only at a deadline" in p.what and "seccomp" in p.remedy for p in examine({}).problems)


def test_doctor_fails_where_jobs_cannot_run(tmp_path):
    report = examine({"XVCOMM_SHM_DIR": str(tmp_path / "nowhere")})
    assert any(p.fatal and "nowhere" in p.what for p in report.problems)
    report = examine({"XVCOMM_TIMEOUT": "soon"})
    assert any(p.fatal and "XVCOMM_TIMEOUT" in p.what for p in report.problems)


def test_every_command_is_listed_and_no_other_one_found():
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in ("run", "doctor", "bench", "plan", "certify"))
    wrong = CliRunner().invoke(app, ["pln"])
    assert wrong.exit_code == 2 and "No such command 'pln'" in wrong.output
