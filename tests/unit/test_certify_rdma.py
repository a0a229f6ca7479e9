"""The report of `xvcomm certify --rdma`: what fails it, what is a note, and which ranks are tried."""

import json

import pytest

from xvcomm.cli.certify import rdma_report
from xvcomm.cli.certify.contract import NOT_ALL, PROVEN, WRONG
from xvcomm.cli.certify.rdma_report import HOST, NIC, DevicePair, Direction, Report, Side
from xvcomm.cli.certify.rdma_trial import Place, ways

REASON = "neither as a dma-buf: no; nor by its address: no"


def report(device="host", slots=HOST, grades=(), warnings=(), lost=None, **pair):
    """Of one direction in which all went well, but for what is given."""
    found = DevicePair(
        "rxe0 port 1", "rxe0 port 1", "10.0.0.1", "10.0.0.2", 2, 60, **{"carried": 1.0, "plain": 1e8, **pair}
    )
    sides = Side("n0", 0, device, slots), Side("n1", 1, device, slots)
    direction = Direction(*sides, ["10.0.0.1 to 10.0.0.2, number 1000"], 300, 0, 1e8, 1.0, lost or {}, [found])
    return Report("2026", {"xvcomm": "1"}, ["n0", "n1"], [direction], list(grades), list(warnings))


def test_nothing_wrong():
    assert report().code == PROVEN and not list(report().findings())
    assert report(device="rocm", slots=NIC).code == PROVEN


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"lost": {"10.0.0.1 to 10.0.0.2, number 1000": 2}}, "a connection was lost, 2 times: 10.0.0.1 to 10.0.0.2"),
        ({"trouble": "RETRY_EXC_ERR", "plain": None}, "no plain WRITEs: RETRY_EXC_ERR"),
        ({"wrong": 1}, "1 of 60 messages wrong"),
        ({"carried": 0.4}, "only 40% of the bytes"),
    ],
)
def test_what_fails(what, told):
    """Each is a finding with a remedy, in the text and in JSON."""
    made = report(**what)
    (finding,) = made.findings()
    assert made.code == WRONG and finding.wrong and told in finding.what and "docs/rdma.md" in finding.remedy
    assert json.loads(json.dumps(made.plain()))["findings"][0]["what"] == finding.what


def test_no_rail():
    made = report()
    made.directions[0].rails, made.directions[0].pairs, made.directions[0].by_rdma = [], [], 0.0
    assert made.code == WRONG and [finding.what for finding in made.findings()] == [
        "n0 (rank 0) to n1 (rank 1): no rail of RDMA has come up"
    ]


def test_rings_of_gpus_in_host_memory():
    """Nothing is wrong, but Device-Direct is not proven: the notes say at which grade it stopped, and why."""
    grades = [
        {
            "side": f"n{rank} (rank {rank})",
            "device": "rxe0",
            "direction": direction,
            "grade": "exported",
            "reason": REASON,
        }
        for rank in range(2)
        for direction in ("writes", "reads")
    ]
    made = report(device="rocm", grades=grades)
    assert made.code == NOT_ALL and "no Device-Direct" in made.verdict
    assert [finding.what for finding in made.findings()] == [
        f"n0 (rank 0): no Device-Direct where devices do reads: rxe0 came as far as exported: {REASON}",
        f"n1 (rank 1): no Device-Direct where devices do writes: rxe0 came as far as exported: {REASON}",
    ]


def test_a_warning_is_a_note(tmp_path, capsys):
    made = report(warnings=["n0 (rank 0): xvcomm: no RDMA over rxe1, but TCP: it is down"])
    assert made.code == PROVEN
    rdma_report.write(made, tmp_path)
    for text in (capsys.readouterr().out, (tmp_path / "certify-rdma.txt").read_text()):
        assert "no RDMA over rxe1" in text and "What to do:" in text and text.rstrip().endswith("Passed.")


def test_ranks_that_are_tried():
    """Each rank that uses other devices than those before it on its host, with the same of the other host."""
    uses = {0: ("a", "x"), 1: ("a", "y"), 2: ("b", "x"), 3: ("b", "x"), 5: ("b", "y")}
    places = {rank: Place(host, host, "host", devices) for rank, (host, devices) in uses.items()}
    assert ways(places) == [(0, 2), (1, 5), (2, 0), (5, 1)]
    del places[5]
    assert ways(places) == [(0, 2), (1, 2), (2, 0), (2, 1)]
    assert ways({0: places[0], 1: places[1]}) == []
