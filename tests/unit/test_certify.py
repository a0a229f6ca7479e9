"""Parts of `xvcomm certify` without ranks: who is sampled, what differs, verdicts, pages."""

from __future__ import annotations

import msgspec
import pytest

from xvcomm.cli.certify import faults, training
from xvcomm.cli.certify.charts import chart
from xvcomm.cli.certify.children import Outcome
from xvcomm.cli.certify.contract import FAILED, PASSED, SKIPPED, UNFINISHED, Finding, Plot, Report, Result, Table
from xvcomm.cli.certify.facts import compare
from xvcomm.cli.certify.fault_trials import LOST
from xvcomm.cli.certify.job import GROUP, MOST_PAIRS, Facts, Job, children, sample
from xvcomm.cli.certify.operations import determined
from xvcomm.cli.certify.page import page
from xvcomm.types.dtype import BY_NAME

FACTS = Facts(
    hostname="n0", host="n0", kind="host", device="x86_64", gpu="", island="host", rehearsal=False, asynchronous=False,
    native="host", versions={"xvcomm": "1", "python": "3.11"}, pid=1, graphs=False, torch="", memory=True, rdma=False,
)  # fmt: skip


def job_of(hosts, each, islands=("cuda", "rocm")):
    """Facts of a job of hosts with so many ranks, whose islands take turns by host."""
    return [
        msgspec.structs.replace(
            FACTS, hostname=f"n{host}", host=f"n{host}", gpu=f"{local}", island=islands[host % len(islands)]
        )
        for host in range(hosts)
        for local in range(each)
    ]


def result_of(**changes):
    made = Result("operations", "Collectives", done=3, planned=3)
    for name, value in changes.items():
        setattr(made, name, value)
    made.settle()
    return made


def report_of(*states):
    return Report("now", "xvcomm certify", {}, [Result(f"s{i}", "t", state=state) for i, state in enumerate(states)])


@pytest.mark.parametrize(("hosts", "each"), [(1, 2), (2, 8), (3, 7), (250, 8)])
def test_every_rank_is_in_one_group(hosts, each):
    """Groups part the job, over hosts and islands, and are no larger than twice the usual size."""
    facts = job_of(hosts, each)
    job = Job.of(facts, quick=False)
    groups = {tuple(job.group_of(rank)) for rank in range(job.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(job.size))
    assert all(rank in job.group_of(rank) for rank in range(job.size))
    assert all(len(group) < 2 * GROUP for group in groups)
    if job.size > 2 * GROUP:
        assert all(len({facts[rank].host for rank in group}) > GROUP // 2 for group in groups)


def test_what_goes_by_pairs_does_not_grow_with_the_job():
    facts = job_of(250, 8)
    job = Job.of(facts, quick=False)
    assert len(job.pairs) == MOST_PAIRS and job.every_pair == 2000 * 1999 // 2
    assert len(job.hosts) == len(job.children) == 4
    assert {facts[rank].island for rank in job.children} == {"cuda", "rocm"}


def test_each_kind_of_hop_is_sampled():
    facts = job_of(2, 2, ("cuda",)) + job_of(1, 2, ("rocm",))
    hops = {pair.hop.partition(",")[0] for pair in sample(facts)}
    assert hops == {"in an island", "between hosts", "at a border"}
    assert children(facts)[0] == 0


def test_versions_that_differ_are_named():
    """By vendor and library; Python's may differ."""
    every = {rank: msgspec.structs.replace(FACTS, kind="rocm", native="rccl 2.28.9") for rank in range(3)}
    every[2] = msgspec.structs.replace(every[2], native="rccl 2.26.5", versions={"xvcomm": "1", "python": "3.12"})
    every[3] = msgspec.structs.replace(FACTS, kind="cuda", native="nccl 2.27.0")
    library, python = compare(every)
    assert library.what == "several versions of rocm: native library: rccl 2.28.9 on ranks 0, 1; rccl 2.26.5 on rank 2"
    assert library.wrong and "XVCOMM_ISLAND" in library.remedy
    assert "python" in python.what and not python.wrong


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, PASSED),
        ({"done": 2}, UNFINISHED),
        ({"done": 0, "planned": 0}, SKIPPED),
        ({"findings": [Finding("wrong", "remedy")]}, FAILED),
        ({"findings": [Finding("note", "", wrong=False)]}, PASSED),
        ({"done": 2, "findings": [Finding("wrong", "remedy")]}, FAILED),
    ],
)
def test_states(changes, state):
    assert result_of(**changes).state == state


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ((PASSED, PASSED), 0),
        ((PASSED, SKIPPED), 2),
        ((PASSED, UNFINISHED), 2),
        ((SKIPPED, FAILED), 1),
        ((), 2),
    ],
)
def test_codes(states, code):
    assert report_of(*states).code == code


def fault(name, wrong=""):
    return {"name": name, "seconds": 0.1, "wrong": wrong}


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([Outcome(0, 0, [fault(LOST)], ""), Outcome(5, -9, [], "")], ""),
        ([Outcome(0, 0, [fault(LOST, "Aborted")], ""), Outcome(5, -9, [], "")], f"{LOST}, rank 0: Aborted"),
        ([Outcome(0, None, [{"name": LOST, "begun": True}], ""), Outcome(5, -9, [], "")], f"in time, at: {LOST}"),
        ([Outcome(0, 1, [], "no such device"), Outcome(5, 1, [], "")], "no such device"),
        ([Outcome(0, 0, [fault(LOST) | {"seconds": 60.0}], ""), Outcome(5, -9, [], "")], "after 60.0 s"),
    ],
)
def test_faults_are_judged(outcomes, told):
    result = Result("faults", "Faults")
    faults.judge(outcomes, result)
    result.settle()
    assert result.state == (FAILED if told else PASSED)
    assert not told or told in result.findings[0].what


def test_losses_that_differ_are_named():
    entry = {"name": "DDP", "losses": [1.0, 0.5], "alone": [1.0, 0.4], "apart": 0.25, "tolerance": 1e-5}
    result = Result("training", "Training")
    training.judge(
        [Outcome(0, 0, [entry, entry | {"name": "pipeline", "apart": 0.0}], ""), Outcome(1, 0, [], "")], result
    )
    result.settle()
    assert result.state == FAILED
    assert [finding.what for finding in result.findings] == [
        "DDP: the losses differ from those of one process by 2.5e-01 of their size"
    ]


def test_the_page_escapes_what_it_shows():
    report = report_of(FAILED)
    report.results[0].findings = [Finding("<b>1 < 2</b>", "a & b")]
    report.results[0].tables = [Table("t", ["<x>"], [["WRONG: 1 of 2"]])]
    report.results[0].plots = [Plot("send <1>", "GB/s", {"xvcomm": [(8, 0.1), (1024, 2.0)], "gloo": [(8, 0.0)]})]
    text = page(report)
    assert "&lt;b&gt;1 &lt; 2&lt;/b&gt;" in text and "a &amp; b" in text and "<x>" not in text
    assert "<td class='bad'>WRONG" in text and text.count("<polyline") == 2


def test_a_plot_of_nothing_is_left_out():
    assert chart(Plot("t", "GB/s", {"xvcomm": [(0, 1.0)]})) == ""


@pytest.mark.parametrize(
    ("dtype", "how", "size", "host_only", "answer"),
    [
        ("float32", "sum", 31, False, True),
        ("float8_e5m2", "sum", 4, False, True),
        ("float8_e5m2", "sum", 5, False, False),
        ("float8_e5m2", "sum", 5, True, True),
        ("float8_e5m2", "avg", 3, False, False),
        ("float8_e5m2", "avg", 4, False, True),
        ("bfloat16", "avg", 11, False, True),
        ("bfloat16", "avg", 12, False, False),
        ("float8_e4m3fn", "prod", 8, True, True),
        ("float8_e4m3fn", "prod", 9, True, False),
        ("float8_e5m2", "max", 31, False, True),
    ],
)
def test_bits_that_depend_on_rounding_are_left_out(dtype, how, size, host_only, answer):
    assert determined(BY_NAME[dtype], how, size, host_only) is answer
