"""Which attempts of a run are one job, and how their steps follow one another."""

from dataclasses import replace

import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tracekit.base.errors import TraceError
from tracekit.collectors.merge.merge import SEGMENTS, MergedAttempt, merge_run, segments_of_jobs, trace_of_segments
from tracekit.collectors.merge.placement import Placement
from tracekit.trace.facts import STEP_VALUES, step_values


def attempt(number, *, ranks=2, host="node-1", program=("train.py",), numbered_from=0, steps=4):
    """An attempt with four steps."""
    trace = data_parallel_job([[FORWARD, BACKWARD]] * ranks, steps=steps)
    moved = replace(
        trace,
        ops=trace.ops.with_columns(step=trace.ops["step"] + numbered_from),
        step_starts={step + numbered_from: 1000.0 * number + step for step in range(steps)},
        metadata={"attempt": number, "hosts": {str(rank): host for rank in range(ranks)}, "dropped_records": 1},
    )
    return MergedAttempt(moved, (), Placement(moved.layout, {}, "test"), tuple(program))


def test_only_attempts_alike_are_one_job():
    """Not with another layout, other hosts or another program."""
    for other in ({"ranks": 3}, {"host": "node-2"}, {"program": ("other.py",)}):
        before, after, changed = attempt(0), attempt(1), attempt(2, **other)
        assert segments_of_jobs([before, after, changed]) == [[before, after], [changed]], other


def test_steps_are_counted_on_unless_the_script_numbers_them():
    """Four steps from 0, four from 0 again with one number left free, then four that the script numbers from 100."""
    trace = trace_of_segments([attempt(0), attempt(1), attempt(2, numbered_from=100)])
    assert trace.steps.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 100, 101, 102, 103]
    told = ("attempt", "first_step", "last_step", "numbered_from")
    segments = [tuple(segment[name] for name in told) for segment in trace.metadata[SEGMENTS]]
    assert segments == [(0, 0, 3, 0), (1, 5, 8, 0), (2, 100, 103, 100)]
    assert (trace.step_starts[3], trace.step_starts[5]) == (3.0, 1000.0)
    assert trace.metadata["dropped_records"] == 3


def test_values_of_steps_keep_to_their_steps():
    """Four steps from 0, and from 0 again: the second step 1 is 6 now. Nothing was logged in the third attempt."""
    logged = [attempt(0), attempt(1), attempt(2)]
    for one, tokens in zip(logged, (10.0, 20.0), strict=False):
        one.trace.metadata[STEP_VALUES] = {"tokens": {"1": tokens}}
    assert step_values(trace_of_segments(logged).metadata) == {"tokens": {1: 10.0, 6: 20.0}}


def test_a_run_is_read_without_what_cannot_be_merged():
    """The first attempt died in its first step, the second was another program."""

    def merge(number):
        if number == 0:
            raise TraceError("no rank finished a recorded step")
        return attempt(number, program=("other.py",) if number == 1 else ("train.py",))

    trace = merge_run([0, 1, 2, 3], merge)
    assert trace.steps.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert trace.metadata["other_attempts"] == [0, 1]
    with pytest.raises(TraceError, match="finished"):
        merge_run([0], merge)
