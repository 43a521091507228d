"""Recordings in which something does not fit: what cannot be told of them is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.gpu.jobs import load_ranks, said
from tests.kineto_files import GEMM, all_reduce, event, kernel, launch

Event = dict[str, Any]


def steps(*, stacks: bool = False, begin: float = 0.0, host_us: float = 18) -> list[Event]:
    """Five steps of ten kernels and an all-reduce; `host_us`: what an operator takes, up to 18 behind the GPU."""
    events: list[Event] = []
    at, number = begin, 0
    for step in range(5):
        first = at
        for _ in range(10):
            number += 1
            late = max(host_us - 18, 0)
            events += [event("cpu_op", "aten::mm", at, host_us), launch(at + late + 10, number),
                       kernel(GEMM, at + late + 20, 25, correlation=number)]  # fmt: skip
            if stacks:
                events.append(event("python_function", "train.py(7): forward", at - 1, 25))
            at += 30 + late
        number += 1
        events += [launch(at, number, name="cudaLaunchKernelExC"), all_reduce(at + 20, 50, correlation=number)]
        at += 100
        events.append(event("user_annotation", f"ProfilerStep#{step}", first, at - first))
    return events


@pytest.mark.slow
def test_ranks_without_the_stacks_that_others_have_are_named(tmp_path: Path) -> None:
    mixed = load_ranks(tmp_path / "a", {0: steps(stacks=True), 1: steps()}).whatif()
    (note,) = [one for one in said(mixed) if "stacks" in one]
    assert note.startswith("rank 1 recorded without stacks, the others with")
    for alike in (True, False):
        report = load_ranks(tmp_path / str(alike), {0: steps(stacks=alike), 1: steps(stacks=alike)}).whatif()
        assert not [one for one in said(report) if "stacks" in one]


@pytest.mark.slow
def test_a_host_that_is_behind_is_doubted_where_it_alone_recorded_stacks(tmp_path: Path) -> None:
    def doubts(name: str, *, slow: bool, others: bool) -> list[str]:
        ranks = {0: steps(stacks=slow, host_us=60), **{rank: steps(stacks=others) for rank in (1, 2, 3)}}
        report = load_ranks(tmp_path / name, ranks).whatif()
        assert report.findings[0].where.ranks == (0,)
        return [one for one in report.trust.reasons if "recorded stacks" in one]

    (doubt,) = doubts("slow", slow=True, others=False)
    assert doubt.startswith("rank 0, whose host is behind, recorded stacks, ranks 1-3 did not")
    assert not doubts("others", slow=False, others=True)
    assert not doubts("all", slow=True, others=True)


@pytest.mark.parametrize("start", [500.0, -2_900.0])
def test_a_kernel_longer_than_the_recording_leaves_idle_time_unknown(start: float, tmp_path: Path) -> None:
    """3 ms on another stream, of 2 ms that were recorded of the host: a kernel that stays, or a damaged end."""
    longer = [*steps(), kernel("stays", start, 3_000, stream=9)]
    report = load_ranks(tmp_path / "longer", {0: longer}).whatif()
    assert not report.trust.trustworthy
    assert [one for one in report.trust.reasons if "1 kernel such as `stays`" in one]
    shorter = [*steps(), kernel("stays", 100, 1_000, stream=9)]
    assert load_ranks(tmp_path / "shorter", {0: shorter}).whatif().trust.trustworthy
