"""Runs that go on: memory and disk are bounded, and what is on disk is read."""

import pytest

from tests.collectors.conftest import collect, python

pytestmark = pytest.mark.slow

STEPS = 12_000


def test_a_bounded_recording_of_many_steps(tmp_path):
    """12,000 steps write three times what is kept. 100 bytes a step that are never freed would be 1.05 MB."""
    collected = collect(tmp_path, python("many_steps.py"), "--keep", "1MB", "--segments", "run", STEPS=STEPS)
    early_kb, late_kb = map(int, collected.process.stdout.split()[:2])
    assert late_kb - early_kb < 1000
    segments = list((tmp_path / "run" / "attempt-000").glob("rank-*-*"))
    assert 800_000 < sum(path.stat().st_size for path in segments) <= 1_000_000
    steps = collected.trace.steps
    assert (int(steps[-1]), len(steps)) == (STEPS - 1, int(steps[-1]) - int(steps[0]) + 1)
    assert len(steps) < STEPS // 2
    assert collected.attempt["ranks"][0]["dropped"] == 0


def test_a_few_steps_of_many(tmp_path):
    """`--every 100 --for 3`: three in a row, and the rest says what they cost."""
    collected = collect(tmp_path, python("quick.py"), "--every", "100", "--for", "3", STEPS=420)
    steps = collected.trace.steps.tolist()
    assert steps == [first + number for first in (1, 101, 201, 301, 401) for number in range(3)]
    cost = collected.attempt["cost"]
    assert (cost["on_steps"], cost["off_steps"]) == (3 + 4 * 2, 97 * 4 - 4 + 16 - 1)
