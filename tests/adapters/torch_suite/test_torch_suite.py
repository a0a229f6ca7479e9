"""Torch's own tests on the backend, for all that pass with Gloo: see `passes_with_gloo.json`, by `make torch-suite`.

One process of `run.py` per backend runs the selected tests; each is reported here by name. Only with two ranks, to
finish in minutes: `make torch-suite` also runs four.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RANKS = "2"
SECONDS = 600
# Suites that ask for gloo by name, or whose tests each start ranks: they run in gloo's place only, to save time.
SHIPPED = ("Distributed", "DdpComparison", "DdpUnderDistAutograd", "Rpc", "TensorPipeAgentRpc", "DistAutograd")
REFERENCE = json.loads((HERE / "passes_with_gloo.json").read_text())
NAMES: list[str] = REFERENCE[RANKS]
OWN = [name for name in NAMES if not name.startswith(tuple(f"{suite}Test." for suite in SHIPPED))]
IN_GLOOS_PLACE = [name for name in NAMES if name not in REFERENCE["excluded"]]
TESTS = [("xvcomm-as-gloo", name) for name in IN_GLOOS_PLACE] + [("xvcomm", name) for name in OWN]
Outcomes = dict[str, dict[str, str]]
pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's fixtures import it")


@pytest.fixture(scope="module")
def outcomes_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """Outcomes of this session's tests with a backend; the first call runs them all."""
    chosen = [item.callspec.params for item in request.session.items
              if item.path == Path(__file__) and "outcomes_of" in item.fixturenames]  # fmt: skip

    @functools.cache
    def run(backend: str) -> Outcomes:
        out = tmp_path_factory.mktemp("torch_suite") / f"{backend}.json"
        line = [sys.executable, str(HERE / "run.py"), "--backend", backend, "--ranks", RANKS, "--out", str(out)]
        line += ["--budget", str(SECONDS - 60)]
        line += [word for test in chosen if test["backend"] == backend for word in ("-k", test["name"])]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
        assert out.exists(), f"the runner ended before the first test:\n{done.stdout[-3000:]}"
        outcomes: Outcomes = json.loads(out.read_text())["outcomes"]
        return outcomes

    return run


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("backend", "name"), TESTS)
def test_passes_as_with_gloo(backend: str, name: str, outcomes_of: Callable[[str], Outcomes]) -> None:
    outcomes = outcomes_of(backend)
    assert name in outcomes, "this release of torch has no such test: run `make torch-suite`"
    assert outcomes[name]["state"] == "passed", f"{outcomes[name]['state']}: {outcomes[name]['reason']}"
    ends = {other: found for other, found in outcomes.items() if other.startswith(("setUpClass", "tearDownClass"))}
    assert not ends, "ranks did not start or end as they should"


@pytest.mark.parametrize(
    ("backend", "state", "code"),
    [
        ("xvcomm-as-gloo", "passed", 0),
        ("xvcomm-as-gloo", "failed", 1),
        ("xvcomm-as-gloo", "not run", 1),
        ("xvcomm-as-gloo", "not applicable", 1),
        ("xvcomm-as-gloo", "excluded", 0),
        ("xvcomm", "not applicable", 0),
        ("xvcomm", "failed", 1),
    ],
)
def test_comparison_finds_tests_that_pass_with_gloo_only(backend: str, state: str, code: int, tmp_path: Path) -> None:
    files = {"gloo": "passed", backend: state}
    for name, ended in files.items():
        outcome = {"state": ended, "seconds": 0.1, "reason": "because"}
        run = {"backend": name, "ranks": 2, "date": "2000-01-01", "versions": {}, "outcomes": {"Case.test": outcome}}
        (tmp_path / name).write_text(json.dumps(run))
    line = [sys.executable, str(HERE / "run.py"), "--compare", *(str(tmp_path / name) for name in files)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert (f"Case.test: {state}: because" in done.stdout) == bool(code)
