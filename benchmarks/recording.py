"""What the flight recorder costs an operation, and what metrics add to that: its begin and end in compiled code.

`python benchmarks/recording.py` prints nanoseconds. Both take turns in short rounds, of which the quickest counts, so that other
load on the machine matters little.
"""

from __future__ import annotations

import time

from xvcomm.config import Config
from xvcomm.jit.compile import kernel
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.counters import Counters
from xvcomm.trace.format import DONE, region_bytes
from xvcomm.trace.operation import NO_PEER
from xvcomm.trace.recorder import Recorder, note, note_end
from xvcomm.types.opcode import OpCode

CALLS, ROUNDS = 2_000, 3_000
_OP, _DTYPE, _NBYTES = int(OpCode.ALL_REDUCE), 4, 4096


def _calls(handle: int, call_site: int) -> None:
    for i in range(CALLS):
        note_end(handle, note(handle, 1, i, _OP, _DTYPE, _NBYTES, NO_PEER, -1, call_site), DONE)


def measure() -> dict[bool, float]:
    """Nanoseconds of an operation, without and with metrics."""
    calls = kernel("void(int64, int64)")(_calls)
    recorder, counters = Recorder(memoryview(bytearray(region_bytes(Config().trace_records)))), Counters()
    call_site, best = find_call_site(0), {False: float("inf"), True: float("inf")}
    for _ in range(ROUNDS):
        for counted in best:
            recorder.count(counters if counted else None)
            begin = time.perf_counter_ns()
            calls(recorder.handle, call_site)
            best[counted] = min(best[counted], (time.perf_counter_ns() - begin) / CALLS)
    return best


if __name__ == "__main__":
    without, counted = measure().values()
    print(f"An operation is recorded in {without:.1f} ns; metrics add {counted - without:.1f} ns.")
