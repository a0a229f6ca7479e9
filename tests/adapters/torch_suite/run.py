"""Runs torch's own shipped tests of process groups, and this folder's on torch's fixtures, with one backend.

    python tests/adapters/torch_suite/run.py --backend gloo|xvcomm|xvcomm-as-gloo --ranks 2|4 [-k SUBSTRING] [--out FILE]
    python tests/adapters/torch_suite/run.py --compare gloo.json xvcomm.json

`xvcomm` is the backend of that name; `xvcomm-as-gloo` also replaces gloo, so that tests written for
gloo only run too; `gloo` is the reference. Ranks are processes of this host without GPUs. Exits with code 1 if a test
failed or was not run, or if two files differ.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from results import EXCLUDED, FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, Outcome, Run, differences, gained, page

BACKENDS = ("gloo", "xvcomm", "xvcomm-as-gloo")
CASES = ("functional", "mesh", "dtensor", "fsdp", "pipelining", "checkpoint")
MODULES = ("shipped", *(f"cases_{name}" for name in CASES))
ROOT = Path(__file__).resolve().parents[3]
SECONDS_PER_TEST = 60
OUTPUT_KEPT = 20_000
Error = tuple[type[BaseException], BaseException, TracebackType]


def prepare(backend: str, ranks: int, scratch: str) -> None:
    """Set the variables that torch's test modules read on import, and install xvcomm as requested."""
    os.environ |= {
        "BACKEND": "xvcomm" if backend == "xvcomm" else "gloo",
        "WORLD_SIZE": str(ranks),
        "INIT_METHOD": f"file://{scratch}/init",  # of the one test that starts a second default group
        "TEMP_DIR": scratch,
        "MASTER_ADDR": "127.0.0.1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_PER_TEST),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0" if backend == "gloo" else "1",
        "XVCOMM_DEVICE": "host",
    }
    import torch

    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork")
    if backend != "gloo":
        load_kernels()
    if backend == "xvcomm-as-gloo":
        from xvcomm.adapters.torch.replace import install

        install("gloo")
    from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE, DistTestCases

    TIMEOUT_OVERRIDE.clear()
    if backend == "xvcomm":
        for feature in ("ddp", "subgroup", "plugin"):
            DistTestCases.backend_feature[feature].add(backend)
    import exclusions

    exclusions.open_gates()
    if backend != "gloo":
        exclusions.expect_no_profiler_events()


def load_kernels() -> None:
    """Import and load in this process what every rank needs; ranks are forks of it."""
    import xvcomm
    import xvcomm.adapters.torch.creation
    import xvcomm.backends.host.collective
    import xvcomm.testing.common_reducers

    with xvcomm.init(rank=0, size=1):
        pass


def tests() -> Iterator[tuple[type[unittest.TestCase], str]]:
    """Every test of every class, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(name) for name in MODULES]
    for module in modules:
        for case in module.CLASSES:
            for name in unittest.TestLoader().getTestCaseNames(case):
                yield case, name


class Recorder(unittest.TestResult):
    """Records unittest's results as outcomes, and prints a line for each test as it ends."""

    def __init__(self, run: Run, report: TextIO, output: int, out: Path | None, budget: float) -> None:
        super().__init__()
        self.run, self.report, self.output, self.out = run, report, output, out
        self.deadline = time.monotonic() + budget
        self.began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        os.ftruncate(self.output, 0)
        self.began = time.monotonic()
        self._record(test, FAILED, "ended from outside")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = label(test)
        found = self.run.outcomes[name]
        found = Outcome(found.state, round(time.monotonic() - self.began, 2), found.reason)
        self.run.outcomes[name] = found
        last = found.reason.splitlines()[-1] if found.reason else ""
        print(f"{found.state:14} {found.seconds:6.2f} {name} {last[:200]}", file=self.report, flush=True)
        if self.out:
            self.run.write(self.out)
        if time.monotonic() > self.deadline:
            self.stop()

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._record(test, PASSED)

    def addError(self, test: Any, err: Error) -> None:
        super().addError(test, err)
        self._fail(test, err)

    def addFailure(self, test: Any, err: Error) -> None:
        super().addFailure(test, err)
        self._fail(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Error | None) -> None:
        super().addSubTest(test, subtest, err)
        if err:
            self._fail(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._record(test, NOT_APPLICABLE, reason)

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._record(test, FAILED, "passed, and torch expects it to fail")

    def _fail(self, test: Any, err: Error) -> None:
        size = os.fstat(self.output).st_size
        tail = os.pread(self.output, OUTPUT_KEPT, max(0, size - OUTPUT_KEPT)).decode(errors="replace")
        self._record(test, FAILED, f"{tail}\n{essence(str(err[1]) or err[0].__name__)}")

    def _record(self, test: Any, state: str, reason: str = "") -> None:
        self.run.outcomes[label(test)] = Outcome(state, 0.0, reason)


def label(test: Any) -> str:
    """`Class.test`; for an error outside tests, its description."""
    return ".".join(test.id().split(".")[-2:]) if isinstance(test, unittest.TestCase) else str(test)


def essence(text: str) -> str:
    """An error of ranks on one line: the traceback lines that name an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line.split(" ")[0] or line.startswith(("Process ", "Exception:"))]
    return " | ".join(dict.fromkeys(named or lines[-1:]))[:1000]


def run(arguments: argparse.Namespace) -> Run:
    """Run the selected tests, and print and record their outcomes."""
    with tempfile.TemporaryDirectory() as scratch:
        prepare(arguments.backend, arguments.ranks, scratch)
        suite, found = choose(arguments)
        if arguments.list:
            for name, outcome in found.outcomes.items():
                print(name, "" if outcome.state == NOT_RUN else f"({outcome.reason})")
            return found
        with tempfile.TemporaryFile() as output:
            report = os.fdopen(os.dup(1), "w")
            if not arguments.verbose:  # what ranks print stays beside the outcome of a test that failed
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            gc.freeze()  # or each rank would look through all modules, and so copy their pages
            suite.run(Recorder(found, report, output.fileno(), arguments.out, arguments.budget))
    if arguments.out:
        found.write(arguments.out)
    counts = ", ".join(f"{number} {state}" for state, number in found.counts().items())
    print(f"{arguments.backend}, {arguments.ranks} ranks: {counts}", file=report)
    return found


def choose(arguments: argparse.Namespace) -> tuple[unittest.TestSuite, Run]:
    """The tests to run, and a run that records why the others do not apply."""
    import exclusions

    shard, shards = (int(part) for part in arguments.shard.split("/"))
    wanted = arguments.k or [""]
    chosen = [(case, name) for case, name in tests() if any(part in f"{case.__name__}.{name}" for part in wanted)]
    versions = {name: version(name) for name in ("torch", "xvcomm")} | {"python": sys.version.split()[0]}
    found = Run(arguments.backend, arguments.ranks, date.today().isoformat(), versions)
    suite = unittest.TestSuite()
    for case, name in chosen[shard::shards]:
        outcome = exclusions.before_running(case, name, arguments.backend, arguments.ranks)
        found.outcomes[f"{case.__name__}.{name}"] = outcome
        if outcome.state == NOT_RUN:
            suite.addTest(case(name))
    return suite, found


def compare(reference: Run, other: Run) -> int:
    """Print how `other` differs from `reference`; returns 1 if a test that passed there did not pass here."""
    for name in gained(reference, other):
        print(f"passes with {other.backend} alone: {name}")
    lines = differences(reference, other)
    print("\n".join(lines), end="\n" if lines else "")
    passed, ran = reference.counts()[PASSED], f"{other.backend} on {other.ranks} ranks"
    print(f"of {passed} tests that pass with {reference.backend}, {len(lines)} do not with {ran}")
    return bool(lines)


def publish(runs: list[Run]) -> None:
    """Write the tables of docs/torch-suite.md, and the list of tests that pass with gloo."""
    document = ROOT / "docs" / "torch-suite.md"
    begin, end = "<!-- runs: written by `make torch-suite` -->", "<!-- runs: end -->"
    head, _, rest = document.read_text().partition(begin)
    document.write_text(f"{head}{begin}\n{page(runs)}\n{end}{rest.partition(end)[2]}")
    passed: dict[str, Any] = {"torch": runs[0].versions["torch"]}
    for run in runs:
        if run.backend == "gloo":
            passed[str(run.ranks)] = [name for name, outcome in run.outcomes.items() if outcome.state == PASSED]
    stands_in = (run for run in runs if run.backend == "xvcomm-as-gloo")
    passed["excluded"] = sorted({name for run in stands_in for name, o in run.outcomes.items() if o.state == EXCLUDED})
    (Path(__file__).parent / "passes_with_gloo.json").write_text(json.dumps(passed, indent=1) + "\n")


def main() -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("-k", action="append", metavar="SUBSTRING", help="only tests whose Class.test holds it")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th test from the I-th, counted from 0")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="then start no test")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the outcomes, after every test")
    parser.add_argument("--list", action="store_true", help="print the tests and why they do not apply, run none")
    parser.add_argument("--verbose", action="store_true", help="let ranks print")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("REFERENCE", "OTHER"))
    parser.add_argument("--publish", nargs="+", type=Path, metavar="FILE.json", help="write docs/torch-suite.md")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*map(Run.read, arguments.compare))
    if arguments.publish:
        publish([Run.read(file) for file in arguments.publish])
        return 0
    if not arguments.backend:
        parser.error("say --backend, --compare or --publish")
    counts = run(arguments).counts()
    return bool(not arguments.list and counts[FAILED] + counts[NOT_RUN])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unittest takes any other exception for a test's
    try:
        code = main()
    finally:
        for rank in multiprocessing.active_children():
            rank.kill()
    sys.exit(code)
