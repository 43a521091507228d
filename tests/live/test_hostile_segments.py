"""One rank of a running job writes nonsense: it is said in one line, and windows of the others keep coming."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.writtenrun import WrittenRun
from tests.cases import case
from tests.live.beside import Beside
from tracekit.collectors.record.wire_format import LEFT_OVER_SEGMENT, Category, segment_stem
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.segments import RECORD_DTYPE

HOUR_NS = 3600 * 1_000_000_000


def test_a_rank_whose_place_is_garbage_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    for number, (fact, said) in enumerate((
        (("group", 7), "the fact 'group' is 7: expected `object`, got `int`; copy it again"),
        (("mesh", "x"), "the fact 'mesh' is \"x\": expected `object`, got `str`; copy it again"),
        (("mesh", {"names": ["dp"], "ranks": [[0, 1], [2]]}), "expected `ranks` as lists of equal lengths"),
        (("pipeline", [[]]), "the fact 'pipeline' is [[]]: expected `object`, got `array`; copy it again"),
        (("megatron", {}), "object missing required field `ranks`"),
    )):  # fmt: skip
        written = WrittenRun(tmp_path / str(number), 4, per_host=2)
        follower = followed(written)
        written.tell(1, [fact])
        written.run(range(1, 11))
        with case(fact):
            (line,) = lines(follower)
            path = written.attempt_directory / "rank-000001.facts"
            assert line.startswith(f"rank 1 is left out from step 1 on: {path}: line 9: ")
            assert said in line
            assert {rank: one.whole for rank, one in follower.good.items()} == {0: 10, 2: 10, 3: 10}


def test_a_fact_that_nothing_hangs_on_is_skipped_and_its_rank_stays(tmp_path: Path) -> None:
    for number, (fact, said) in enumerate((
        (("dropped", "many"), "the fact 'dropped' is \"many\": expected `int`, got `str`"),
        (("dropped", -5e300), "the fact 'dropped' is -5e+300: expected `int`, got `float`"),
        (("summary", [1]), "the fact 'summary' is [1]: expected `object`, got `array`"),
        (("device-clock", None), "the fact 'device-clock' is null: expected `array`, got `null`"),
        (("torch", 3), "the fact 'torch' is 3: expected `object`, got `int`"),
    )):  # fmt: skip
        written = WrittenRun(tmp_path / str(number), 4, per_host=2)
        written.tell(1, [fact, fact])
        follower = followed(written)
        path = written.attempt_directory / "rank-000001.facts"
        with case(fact):
            assert lines(follower) == [f"rank 1: {path}: line 9: {said}; copy it again; facts like this are skipped"]
            assert sorted(follower.good) == [0, 1, 2, 3]


def test_the_end_of_a_segment_that_shows_after_what_the_launcher_saved_is_no_garbage(written: WrittenRun) -> None:
    """A shared folder shows files in any order; the launcher saves what a killed rank may have written by itself."""
    written.run(range(1, 6))
    follower, own = followed(written), written.segment(1)
    assert lines(follower) == []
    header, before = own.read_bytes()[:32], own.stat().st_size
    written.run([6])
    end = own.read_bytes()[before:]
    own.write_bytes(own.read_bytes()[:before])
    number, suffix = LEFT_OVER_SEGMENT, own.suffix
    (own.parent / f"{segment_stem(1, number)}{suffix}").write_bytes(header + end)
    assert lines(follower) == []
    with own.open("ab") as file:
        file.write(end)
    assert lines(follower) == []
    assert follower.ranks[1].whole == 6
    records = follower.ranks[1].take(6)
    assert len(np.unique(records["number"])) == len(records)


def followed(written: WrittenRun) -> AttemptFollower:
    return AttemptFollower(0, written.attempt_directory, 1)


def lines(follower: AttemptFollower) -> list[str]:
    """What the next look finds."""
    return [notice.line for notice in (*follower.update(0.0), *follower.leave_out_strangers())]


def copy_last(run: WrittenRun, rank: int, *changes: Callable[[np.ndarray], None]) -> None:
    """Append the last record of a rank once more, numbered on and changed."""
    record = np.frombuffer(run.segment(rank).read_bytes()[32:], RECORD_DTYPE)[-1:].copy()
    record["number"] += 1
    for change in changes:
        change(record)
    run._written[rank] += 1
    run.write(rank, record.tobytes())


def put(field: str, value: int) -> Callable[[np.ndarray], None]:
    def change(records: np.ndarray) -> None:
        records[field] = value

    return change


GARBAGE: list[tuple[str, Callable[[np.ndarray], None], str]] = [
    ("step", put("step", 2**31 - 1), "garbage: its step went from 10 to 2147483647"),
    ("near-step", put("step", 4000), "garbage: its step went from 10 to 4000"),
    ("step-below", put("step", -(2**31)), "garbage: a record of step -2147483648 follows one of step 10"),
    ("number", put("number", 2**62), "garbage: record 4611686018427387904 follows record 70"),
    ("number-back", put("number", 3), "garbage: record 3 follows record 70"),
    ("end", put("end_ns", 2**63 - 1), "s before an earlier record, or its clock stepped back"),
    ("start", put("start_ns", -(2**63)), "s before its process began, or its clock stepped back"),
]


def test_a_record_that_cannot_be_leaves_its_rank_out(tmp_path: Path) -> None:
    """Whether it is read together with what comes behind it, or before."""
    for (name, change, said), seen_by_itself in itertools.product(GARBAGE, (True, False)):
        written = WrittenRun(tmp_path / f"{name}-{seen_by_itself}", 4, per_host=2)
        follower = followed(written)
        written.run(range(1, 11))
        told = [] if seen_by_itself else lines(follower)
        copy_last(written, 1, put("category", Category.COMPUTE), change)
        told += lines(follower) if seen_by_itself else []
        written.run(range(11, 21))
        with case((name, seen_by_itself)):
            (line,) = [*told, *lines(follower)]
            assert line.startswith("rank 1 is left out from step 1 on: ")
            assert said in line
            assert {rank: one.whole for rank, one in follower.good.items()} == {0: 20, 2: 20, 3: 20}


def test_windows_go_on_behind_a_whole_step_of_an_absurd_number(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 10))
    copy_last(written, 1, put("step", 2**31 - 1))
    beside.look()  # 9 steps, and one that nobody else has
    assert beside.said == []
    written.run(range(10, 21))
    beside.look(6)
    assert beside.said[0] == (
        "rank 1 is left out from step 1 on: garbage: its step went from 9 to 2147483647, and then to 10 in the next"
        " records; the others go on"
    )
    assert beside.windows() == [(1, 20)]


def test_steps_that_the_script_numbers_anew_are_believed_where_the_ranks_agree(written: WrittenRun) -> None:
    follower = followed(written)
    written.run(range(1, 11))
    assert lines(follower) == []
    written.run(range(500_000, 540_000, 4000))
    assert lines(follower) == []
    assert {one.whole for one in follower.good.values()} == {536_000}


def test_a_rank_alone_is_believed_once_it_goes_on_behind_the_jump(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "run", 1)
    follower = followed(written)
    written.run(range(1, 11))
    written.run(range(5000, 5009))
    assert (lines(follower), follower.ranks[0].whole) == ([], 10)
    written.run(range(5009, 5010))
    assert (lines(follower), follower.ranks[0].whole) == ([], 5009)


def test_of_two_ranks_the_one_that_counts_ranks_nobody_sees_is_left_out(tmp_path: Path) -> None:
    for world_size in (3, 1_048_576):
        written = WrittenRun(tmp_path / str(world_size), 2)
        facts = written.attempt_directory / "rank-000001.facts"
        facts.write_text(facts.read_text().replace('"world_size": 2', f'"world_size": {world_size}'))
        follower = followed(written)
        assert lines(follower) == [
            f"rank 1 is left out: it saw {world_size} ranks, the others 2: segments of two jobs in one folder"
        ]
        assert (list(follower.good), follower.world_size) == ([0], 2)


def test_a_rank_that_is_none_of_its_own_count_is_left_out(written: WrittenRun) -> None:
    facts = written.attempt_directory / "rank-000003.facts"
    facts.write_text(facts.read_text().replace('"world_size": 4', '"world_size": 3'))
    follower = followed(written)
    (line,) = lines(follower)
    assert "expected a `world_size` above its rank 3" in line
    assert list(follower.good) == [0, 1, 2]


def test_a_clock_that_steps_between_two_steps_is_said(tmp_path: Path) -> None:
    for way, by_ns in (("back", -HOUR_NS), ("forward", HOUR_NS)):
        written = WrittenRun(tmp_path / way, 4, per_host=2)
        follower = followed(written)
        written.run(range(1, 15))
        before = written.segment(1).stat().st_size
        written.run(range(15, 31))
        content = written.segment(1).read_bytes()
        records = np.frombuffer(content[before:], RECORD_DTYPE).copy()
        for field in ("start_ns", "end_ns"):
            records[field] += by_ns
        written.segment(1).write_bytes(content[:before] + records.tobytes())
        assert lines(follower) == [
            f"rank 1 is left out from step 1 on: between steps 14 and 15 its clock stepped {way} by 3.6e+03 s"
        ]
        assert sorted(follower.good) == [0, 2, 3]


def test_zeros_of_a_shared_folder_are_read_again(written: WrittenRun) -> None:
    """Bytes that another host has written show as zeros until they arrive."""
    follower = followed(written)
    written.run(range(1, 11))
    path = written.segment(1)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes(len(whole) - 1000))
    assert (lines(follower), follower.ranks[1].whole) == ([], 2)
    path.write_bytes(whole)
    assert (lines(follower), follower.ranks[1].whole) == ([], 10)
