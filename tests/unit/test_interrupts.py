"""Which frames of an interrupt's traceback are kept."""

import signal
import subprocess
import sys
import traceback
from functools import partial

import pytest

from xvcomm.system.interrupts import held_back, shorten
from xvcomm.types.deadline import Deadline, poll

SOON = Deadline.after(60)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def shown(call):
    """Names of the functions in the traceback."""
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    shorten(caught.value)
    return [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)][1:]


def test_only_the_called_function_of_xvcomm_is_shown():
    nested = partial(poll, partial(poll, partial(signal.raise_signal, signal.SIGINT), SOON), SOON)
    assert shown(nested)[-1] == "poll" and shown(nested).count("poll") == 1


def test_callbacks_of_the_program_are_shown():
    assert shown(lambda: poll(partial(poll, interrupt, SOON), SOON))[-3:] == ["<lambda>", "poll", "interrupt"]


def test_an_error_that_the_program_handles_is_shown():
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise ValueError("of the program")
        except ValueError:
            interrupt()
    shorten(caught.value)
    assert "of the program" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_xvcomm_handles_is_not_shown():
    with pytest.raises(ZeroDivisionError) as inner:
        poll(lambda: 1 // 0, SOON)
    error = KeyboardInterrupt()
    error.__context__ = inner.value.with_traceback(inner.value.__traceback__.tb_next)
    shorten(error)
    assert "ZeroDivisionError" not in "".join(traceback.format_exception(error))


def test_an_interrupt_is_delayed_until_the_block_ends():
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        interrupt()
        done.append(True)
    assert done == [True] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_signals_are_delayed_too():
    came = []

    def stumble(number, frame):
        came.append(number)
        raise ValueError(number)

    numbers = (signal.SIGUSR2, signal.SIGALRM)
    before = [signal.signal(number, stumble) for number in numbers]
    try:
        with pytest.raises(ValueError), held_back():
            for number in numbers:
                signal.raise_signal(number)
            assert came == []
        assert sorted(came) == sorted(numbers)
        assert all(signal.getsignal(number) is stumble for number in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_what_else_is_set_of_a_signal_stays():
    """faulthandler's handler in C still comes before Python's."""
    script = """if True:
        import faulthandler, signal
        from xvcomm.system.interrupts import held_back

        came = []
        signal.signal(signal.SIGUSR2, lambda *_: came.append("by Python"))
        faulthandler.register(signal.SIGUSR2, chain=True)
        with held_back():
            signal.raise_signal(signal.SIGUSR2)
            assert not came
        signal.raise_signal(signal.SIGUSR2)
        assert len(came) == 2, came
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr.count("most recent call first") == 2, done.stderr


def test_an_interrupt_that_is_ignored_stays_so():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
