"""What hooks share: whether anything is recorded, and in which step."""

import math

import pytest

from tests.collectors.record.test_clipping import Loop
from tracekit.collectors.record.wire_format import IDLE, Category


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_a_recorder_that_is_off_has_its_hooks_taken_out_at_the_next_step(loop):
    """The disk is full in step 1: steps from the next one on cost what an idle session costs, and are still counted."""
    loop.step()
    loop.backward()
    assert loop.session.recording
    loop.sink.off = "OSError: No space left on device"
    loop.step()
    loop.step()
    loop.step()
    assert not loop.session.recording
    assert loop.session.step == 4
    assert loop.optimizers_ms == [(0, 5), (25, 30)]


def logged(loop):
    """Step and name of each value."""
    names = {number: name for name, number in loop.sink.names.items()}
    return [(record[3], names[record[2]]) for record in loop.sink.records if record[0] == Category.VALUE]


def test_a_value_is_of_the_step_whose_optimizer_has_run_until_the_next_op(loop):
    loop.backward()
    loop.step()
    loop.session.log({"tokens": 8, "loss": None})
    loop.backward()
    loop.session.log({"tokens": None, "loss": -0.5})  # of a policy, say: a loss can be below 0
    assert logged(loop) == [(0, "tokens"), (1, "loss")]


def test_a_value_may_be_of_the_step_that_has_ended(loop):
    """Before the first step has ended, it is of that."""
    loop.session.log({"loss": 0.5}, ended=True)
    for _ in range(2):
        loop.backward()
        loop.step()
    loop.backward()
    loop.session.log({"loss": 0.5}, ended=True)
    assert (loop.session.step, logged(loop)) == (2, [(0, "loss"), (1, "loss")])


def test_nothing_is_kept_of_steps_that_are_not_recorded(loop):
    loop.session.schedule = IDLE
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.session.log({"tokens": 8})
    assert loop.session.step == 2
    assert logged(loop) == [(0, "tokens")]


def test_what_is_no_number_is_reported_once_and_later_ones_are_kept(loop, monkeypatch):
    """Whatever raises when it is looked at, too. `is_cpu` is False of a tensor on a GPU, which is not even read."""

    class OnGpu:
        is_cpu = False

        def item(self):
            raise AssertionError("the host waits for the GPU")

    class Rude:
        @property
        def is_cpu(self):
            raise RuntimeError("no")

    said = []
    monkeypatch.setattr("tracekit.collectors.record.session.warn", said.append)
    loop.sink.first_of_all_ranks = lambda _: True
    for value in (OnGpu(), Rude(), math.nan, "7", 10**400, 10**5000, -1, -math.inf):
        loop.session.log({"tokens": value})
    loop.session.log({"tokens": 7, "loss": 2.0})
    assert logged(loop) == [(0, "tokens"), (0, "loss")]
    (line,) = said
    assert "tracekit.log(tokens=...) in step 0: TypeError: a OnGpu; expected a number in the memory of the host" in line
    assert not loop.session.failures
