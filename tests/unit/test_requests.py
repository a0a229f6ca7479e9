"""What other processes ask of this one: each of its jobs gets all requests, and answers those that concern it."""

import subprocess
import sys

TWO_JOBS = """
import os, threading, time
from xvcomm.system.requests import Requests, request

jobs = {b"first": Requests(), b"second": Requests()}
found = []

def ask(*answers):
    for answer in answers:
        found.extend(request([os.getpid()], b"what", 20, lambda data: data == answer))

def answer_until(thread):
    while thread.is_alive():
        for name, each in jobs.items():
            asked, signalled = each.look([b"what", b"else"])
            assert not signalled
            for kind, number in asked:
                assert kind == b"what"
                each.answer(number, name)
        time.sleep(0.001)

for names in ((b"first", b"second"), (b"second",)):
    asking = threading.Thread(target=ask, args=names)
    asking.start()
    answer_until(asking)
    if b"first" in jobs:
        jobs.pop(b"first").close()
    if os.fork() == 0:  # the child has no jobs
        child = Requests()
        os._exit(child.look([b"what"]) != ([], False))
    assert os.wait()[1] == 0
jobs[b"second"].close()
print(found)
"""


def test_two_jobs_of_a_process():
    """Also once the first one has ended, and in a forked child."""
    done = subprocess.run([sys.executable, "-c", TWO_JOBS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[b'first', b'second', b'second']\n", done.stdout + done.stderr
