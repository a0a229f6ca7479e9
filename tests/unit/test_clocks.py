"""The clocks of other hosts, by answers that took different times."""

from xvcomm.engine.session.clocks import SAMPLES, Clocks
from xvcomm.trace.format import Answer, Life


def answer(round_trip: int, late: int, ahead: int = 1000) -> Answer:
    """One of a host whose clock is ahead, as it is measured when the way back took longer than the way there."""
    return Answer(Life.RUNNING, ahead - late, round_trip, ())


def test_the_quickest_answer_counts() -> None:
    clocks = Clocks()
    assert clocks.ahead("a") == 0
    for round_trip, late in ((900, 400), (20, 3), (500, 200)):
        clocks.note("a", answer(round_trip, late))
    assert clocks.ahead("a") == 997 and clocks.ahead("b") == 0


def test_old_answers_do_not_count() -> None:
    """Clocks drift, and are set."""
    clocks = Clocks()
    clocks.note("a", answer(1, 0))
    for _ in range(SAMPLES):
        clocks.note("a", answer(30, 5, ahead=-7000))
    assert clocks.ahead("a") == -7005
