"""Stacks that several ranks ask a rank for at the same time."""

import threading
import time

from xvcomm.system import stacks
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals
from xvcomm.testing.world import World
from xvcomm.trace.format import STACK_NANOSECONDS
from xvcomm.types.deadline import Deadline


def earlier(goes_on):
    goes_on.wait()


def later(is_over):
    is_over.wait()


def set_when(event, signals, what, ranks):
    """Another thread waits, so that the stack is short."""

    def wait():
        signals.hear(what, ranks)
        event.set()

    threading.Thread(target=wait).start()
    return event


def ask_at_the_same_time(comm):
    """Rank 0 asks rank 1 of another host for its stack, twice; the second time rank 2 of that host is about to ask, too."""
    signals, explaining = Signals(comm), context(comm).session.explaining
    if comm.rank == 1:
        earlier(set_when(threading.Event(), signals, "go on", [0]))
        signals.tell("went on")
        later(set_when(threading.Event(), signals, "over", [0, 2]))
        return None
    if comm.rank == 2:
        request = stacks.request

        def slowly(pid):
            signals.tell("about to ask")
            time.sleep(0.5)
            return request(pid)

        stacks.request = slowly
        signals.hear("went on", [1])
        time.sleep(2 * STACK_NANOSECONDS / 1e9)
        explaining.explain(Deadline.after(5))
        stacks.request = request
        signals.tell("over")
        return None
    while "earlier (" not in explaining.explain(Deadline.after(5)).text:
        time.sleep(2 * STACK_NANOSECONDS / 1e9)  # on a busy machine a stack may come too late to be told
    signals.tell("go on")
    signals.hear("about to ask", [2])
    text = explaining.explain(Deadline.after(5)).text
    signals.tell("over")
    return text


def test_a_stack_is_not_older_than_the_question():
    """Also where another rank has begun to ask for it, and the stack of the last time is still in its file."""
    with World(3, hosts="a,b,b") as world:
        text = world.run(ask_at_the_same_time)[0]
    assert "earlier (" not in text, text
