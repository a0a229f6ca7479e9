"""Questions to processes that do not answer."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """if True:
    import faulthandler, os, signal, threading
    from types import SimpleNamespace

    from xvcomm.trace.format import Question, Topic
    from xvcomm.types.deadline import Deadline
    from xvcomm.wire.questions import Questions

    faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"))
    me, over = threading.get_ident(), threading.Event()

    def pester():
        while not over.is_set():
            signal.pthread_kill(me, signal.SIGUSR1)

    threading.Thread(target=pester).start()
    questions = Questions(SimpleNamespace(ask=lambda *_: None))
    for _ in range(20):
        assert questions.ask([0], Question(Topic.RECORDS, 1), Deadline.after(0.001)) == {}
    over.set()
"""


def test_signals_keep_nobody_waiting() -> None:
    """Stacks of processes are written on a signal, also while they ask others."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
