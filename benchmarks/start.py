"""Start-up: how long many ranks take from their launch to the end of the first all_reduce, on one host and on several by label.

    python benchmarks/start.py --ranks 64 --hosts 8

starts, one after the other: as many processes that only import numpy and numba; the ranks on one host; the ranks on several
hosts. Prints seconds of wall and of CPU time, per phase for the slowest rank, and the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import subprocess
import sys
import time

from xvcomm.rendezvous.store import TcpServer

BARE = "import numba, numpy"
RANK = """
import json, os, time
begun = float(os.environ.pop("BEGUN"))
times = {"python": (time.time() - begun, time.process_time())}
import numpy, xvcomm, xvcomm.comm.communicator
times["imports"] = time.time() - begun, time.process_time()
with xvcomm.init(device="host", timeout=300) as comm:
    times["init"] = time.time() - begun, time.process_time()
    comm.all_reduce(numpy.ones(1000, numpy.float32))
    times["all_reduce"] = time.time() - begun, time.process_time()
times["close"] = time.time() - begun, time.process_time()
print(json.dumps(times))
"""


def cpu() -> float:
    """Seconds of CPU time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def launch(count: int, program: str, variables: list[dict[str, str]]) -> tuple[float, float, list[str]]:
    """Start `count` processes at once; seconds of wall and CPU time until all have ended, and their outputs."""
    before, begun = cpu(), time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, "BEGUN": str(begun), **each}, stdout=subprocess.PIPE, text=True
        )
        for each in variables[:count]
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("error: a process failed")
    return time.time() - begun, cpu() - before, outputs


def ranks(count: int, hosts: int) -> tuple[float, float]:
    """Start a job, and print its phases; wall and CPU time to the end of the first all_reduce of the slowest rank."""
    secret = secrets.token_hex(8)
    server = TcpServer("127.0.0.1", 0, secret)
    job = {"XVCOMM_STORE": f"{server.address}?hosted=launcher", "XVCOMM_SECRET": secret, "XVCOMM_SIZE": str(count)}
    each = [
        {**job, "XVCOMM_RANK": str(rank), "XVCOMM_HOST": str(rank * hosts // count) if hosts > 1 else ""}
        for rank in range(count)
    ]
    _, total, outputs = launch(count, RANK, each)
    server.close()
    found = [json.loads(output) for output in outputs]
    before = {"wall": 0.0, "cpu": 0.0}
    for phase in found[0]:
        wall = max(times[phase][0] for times in found)
        used = sum(times[phase][1] for times in found)
        print(
            f"  {phase:10} until {wall:6.2f} s (+{wall - before['wall']:6.2f} s), CPU of all ranks +{used - before['cpu']:6.2f} s"
        )
        before = {"wall": wall, "cpu": used}
    print(f"  CPU of all ranks to their end {total:.2f} s")
    return max(times["all_reduce"][0] for times in found), sum(times["all_reduce"][1] for times in found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=8)
    args = parser.parse_args()
    launch(1, RANK, [{}])  # so that kernels are compiled
    wall, used, _ = launch(args.ranks, BARE, [{}] * args.ranks)
    print(f"{args.ranks} x {BARE!r}: {wall:.2f} s, CPU {used:.2f} s")
    for hosts in (1, args.hosts):
        print(f"{args.ranks} ranks on {hosts} host{'s by label' if hosts > 1 else ''}:")
        end, spent = ranks(args.ranks, hosts)
        print(
            f"  first all_reduce after {end:.2f} s, {end / wall:.2f} x; CPU {spent:.2f} s, {spent / used:.2f} x the bare imports"
        )


if __name__ == "__main__":
    main()
