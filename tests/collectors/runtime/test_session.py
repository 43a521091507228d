"""What hooks share: whether anything is recorded."""

import pytest

from tests.collectors.runtime.test_clipping import Loop


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
