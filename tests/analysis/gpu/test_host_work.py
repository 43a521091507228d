"""What the ops of a host consist of."""

from __future__ import annotations

import polars as pl

from tracekit.analysis.gpu.op_trace import _made_room, with_work
from tracekit.trace.op import HOST_SCHEMA, WHAT_SCHEMA

WHATS = pl.DataFrame(
    [("operator", "aten::mm", "", True, True), ("loader", "next", "train.py(3): load", False, False),
     ("operator", "aten::add", "", True, False)],
    WHAT_SCHEMA, orient="row",
)  # fmt: skip


def ops_of(*rows):
    """Host ops: rank, thread, begin and end, seconds."""
    columns = {"rank": pl.Int32, "thread": pl.Int64, "start": pl.Float64, "end": pl.Float64}
    frame = pl.DataFrame(rows, columns, orient="row")
    return frame.with_columns(duration=pl.col("end") - pl.col("start"), kind=pl.lit("host")).drop("end")


def divided(ops, *pieces):
    """The kind of each op, and its parts by name: seconds, pieces. `pieces`: rank, thread, begin, end, row of WHATS."""
    rows = [(rank, thread, begin, end - begin, what) for rank, thread, begin, end, what in pieces]
    host, whats = with_work(ops, pl.DataFrame(rows, HOST_SCHEMA, orient="row"), WHATS)
    names = [" ".join(row).strip() for row in whats.select("reason", "name").iter_rows()]
    return host["kind"].to_list(), [
        None
        if did is None
        else {names[one]: (round(spent, 9), many) for one, spent, many in zip(did, did_s, did_n, strict=True)}
        for did, did_s, did_n in host.select("did", "did_s", "did_n").iter_rows()
    ]


def test_an_op_is_divided_among_the_pieces_of_its_thread_and_the_rest_is_unnamed():
    ops = ops_of((0, 0, 1.0, 5.0), (0, 0, 5.0, 6.0), (0, 1, 1.0, 5.0), (1, 0, 1.0, 2.0))
    kinds, parts = divided(
        ops,
        (0, 0, 0.0, 1.0, 2),  # ends as the op begins
        (0, 0, 0.5, 2.0, 0),  # 1 s of it is in the op
        (0, 0, 2.0, 2.5, 2),
        (0, 0, 3.0, 3.5, 0),
        (0, 0, 4.5, 5.5, 2),  # half in this op, half in the next
        (1, 0, 1.0, 2.0, 0),
    )
    assert parts == [
        {"operator aten::mm": (1.5, 2), "operator aten::add": (1.0, 2), "python": (1.5, 1)},
        {"operator aten::add": (0.5, 1), "python": (0.5, 1)},
        {"python": (4.0, 1)},
        {"operator aten::mm": (1.0, 1)},
    ]
    assert kinds == ["host"] * 4


def test_an_op_that_mostly_loads_data_is_input_and_one_without_duration_consists_of_nothing():
    kinds, parts = divided(ops_of((0, 0, 0.0, 1.0), (0, 0, 1.0, 1.0), (0, 0, 1.0, 2.0)), (0, 0, 0.0, 1.4, 1))
    assert kinds == ["input", "host", "host"]
    assert parts == [{"loader next": (1.0, 1)}, None, {"loader next": (0.4, 1), "python": (0.6, 1)}]


def test_what_takes_little_of_all_time_goes_with_the_rest_of_its_reason():
    _, (parts,) = divided(ops_of((0, 0, 0.0, 10_000.0)), (0, 0, 0.0, 9_000.0, 0), (0, 0, 9_000.0, 9_001.0, 2))
    assert parts == {"operator aten::mm": (9_000.0, 1), "operator": (1.0, 1), "python": (999.0, 1)}


def test_a_launch_that_lasts_until_an_op_ends_waits_for_room_in_the_queue() -> None:
    """A launch each microsecond, ops of 10 us: the 601st returns as op 80 ends, with 520 of at most 541 queued."""
    us, count = 1e-6, 601
    start = [number * us for number in range(count)]
    calls = pl.DataFrame({"start": start, "duration": [us / 2] * (count - 1) + [210.5 * us]})
    gpu = pl.DataFrame(
        {"launch": list(range(count)), "start": [10 * number * us for number in range(count)], "stream": 7}
    ).with_columns(duration=pl.lit(10 * us))
    assert _made_room(calls, gpu).tolist() == [-1] * (count - 1) + [80]
    short = calls.with_columns(duration=pl.lit(us / 2))
    assert _made_room(short, gpu).tolist() == [-1] * count
    assert _made_room(calls.head(400), gpu.head(400)).tolist() == [-1] * 400
