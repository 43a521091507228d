"""Logs of the NCCL Inspector, written by hand as its documents show them."""

import json

import polars as pl
import pytest

import tracekit
from tests.cases import case
from tests.handmade import read_any
from tracekit.base.errors import FormatError
from tracekit.collectors.importers.nccl_inspector import _read_file

BEGIN_US = 1_752_867_229_000_000


def line(rank, function, sequence, exec_us, *, start_us=None, ranks=2, identity="0xabc", size=4096, body=None):
    """A self-contained line, as the formats before 4.3 have it; verbose where a start is given."""
    told = {
        "coll": function,
        "coll_algo": "RING",
        "coll_sn": sequence,
        "coll_msg_size_bytes": size,
        "coll_exec_time_us": exec_us,
        "coll_algobw_gbs": 1.5,
    }
    if start_us is not None:
        kernels = [{"channel_id": channel, "kernel_start_ts": BEGIN_US + start_us + channel} for channel in range(2)]
        told["event_trace_ts"] = {"coll_start_ts": BEGIN_US + start_us - 9, "kernel_events": kernels}
    return {
        "header": {"id": identity, "comm_name": "dp", "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.2", "hostname": f"host{rank}", "pid": 50 + rank},
        **(body or {"coll_perf": told}),
    }


def write(folder, rank, lines, *, end="\n"):
    folder.mkdir(exist_ok=True)
    path = folder / f"host{rank}-pid{50 + rank}.log"
    path.write_text("\n".join(json.dumps(one) for one in lines) + end)
    return path


def ops(trace):
    """(step, rank, kind, start us, duration us)."""
    rows = trace.ops.sort("step", "rank", "start").select("step", "rank", "kind", "start", "duration").iter_rows()
    return [(step, rank, kind, round(start * 1e6, 3), round(long * 1e6, 3)) for step, rank, kind, start, long in rows]


def test_a_verbose_log_tells_when_each_rank_arrived(tmp_path):
    """Rank 1 leaves the first collective at 100 us like rank 0, but comes 30 us later to the second. Its host's clock
    is a second ahead, which does not matter.
    """
    for rank, late in ((0, 0), (1, 30)):
        ahead = 1_000_000 * rank
        lines = [
            line(rank, "AllReduce", 4, 60, start_us=ahead + 40),
            line(rank, "AllReduce", 5, 100 - late, start_us=ahead + 300 + late),
        ]
        write(tmp_path / "logs", rank, lines)
    trace = read_any(tmp_path / "logs")
    assert ops(trace) == [
        (5, 0, "host-delay", 0, 200),
        (5, 0, "all-reduce", 200, 100),
        (5, 1, "host-delay", 0, 230),
        (5, 1, "all-reduce", 230, 70),
    ]
    assert (trace.layout.dp, trace.layout.world_size) == (2, 2)
    assert trace.step_starts[5] == pytest.approx((BEGIN_US + 1_000_100) / 1e6)
    assert trace.metadata["collective"] == {"function": "AllReduce", "bytes": 4096}
    assert trace.metadata["hosts"] == {"0": "host0", "1": "host1"}


def test_a_terse_log_tells_how_much_later_than_the_first(tmp_path):
    """They end together, so the shortest kernel came last."""
    for rank, exec_us in ((0, 100), (1, 70), (2, 95)):
        write(tmp_path / "logs", rank, [line(rank, "AllGather", 0, exec_us, ranks=3)])
    trace = read_any(tmp_path / "logs")
    assert [row for row in ops(trace) if row[2] == "host-delay"] == [
        (0, 0, "host-delay", 0, 0),
        (0, 1, "host-delay", 0, 30),
        (0, 2, "host-delay", 0, 5),
    ]
    assert {start + long for *_, kind, start, long in ops(trace) if kind == "all-reduce"} == {100}
    assert trace.metadata["arrivals"].startswith("behind the first rank only")
    assert trace.step_starts == {}


def test_the_rank_the_others_wait_for_is_found(tmp_path):
    """Rank 2 of 4 comes 5 ms late to every collective, the others by chance up to half a millisecond."""
    for rank in range(4):
        lines = []
        for sequence in range(30):
            late = 5000 if rank == 2 else 37 * (7 * sequence + 11 * rank) % 500
            begin = 20_000 * sequence + late
            lines.append(line(rank, "ReduceScatter", sequence, 10_000 - late, start_us=begin, ranks=4))
        write(tmp_path / "logs", rank, lines)
    report = tracekit.load(tmp_path / "logs").whatif()
    assert report.table("by_worker").sort("slowdown", descending=True).row(0, named=True)["rank"] == 2
    assert report.slowdown > 1.1


def test_the_class_that_runs_longest_is_taken_and_the_rest_counted(tmp_path):
    """Another size, another communicator, a transfer, a repeated line."""
    for rank in range(2):
        transfer = {"p2p_perf": {"p2p": "Send", "p2p_sn": 1}}
        lines = [
            line(rank, "AllReduce", 0, 50, size=16),
            line(rank, "AllReduce", 1, 60),
            line(rank, "AllReduce", 2, 70),
            line(rank, "AllReduce", 2, 70),
            line(rank, "Broadcast", 0, 80, size=8),
            line(rank, "AllReduce", 0, 90, identity="0xdef"),
            line(rank, "AllReduce", 0, 0, body=transfer),
        ]
        write(tmp_path / "logs", rank, lines)
    trace = read_any(tmp_path / "logs", name="nccl-inspector")
    assert trace.steps.tolist() == [1, 2]
    counted = {(one["function"], one["bytes"]): one["count"] for one in trace.metadata["other_collectives"]}
    assert counted == {("AllReduce", 16): 2, ("Broadcast", 8): 2}
    (other,) = trace.metadata["other_communicators"]
    assert (other["communicator"], other["count"], other["seconds"]) == ("0xdef", 2, pytest.approx(180e-6))
    assert trace.metadata["other_lines"] == {"p2p_perf": 2}
    assert trace.metadata["repeated"] == 2


def test_a_collective_some_rank_did_not_report_is_left_out(tmp_path):
    """Rank 1's ring overflowed: sequence 1 is gone, and with it the arrival of both at sequence 2."""
    for rank in range(2):
        kept = [line(rank, "AllReduce", number, 60, start_us=200 * number) for number in range(5)]
        if rank:
            del kept[1]
        stats = line(rank, "", 0, 0, body={"dump_stats": {"coll_dropped_total": rank}})
        write(tmp_path / "logs", rank, [stats, *kept])
    trace = read_any(tmp_path / "logs")
    assert trace.steps.tolist() == [3, 4]
    assert trace.metadata["dropped_by_the_inspector"] == 1


def test_a_header_holds_for_the_lines_behind_it(tmp_path):
    """Format 4.3 writes it once per dump."""
    for rank in range(2):
        marker = line(rank, "", 0, 0, body={"dump_stats": {"coll_records": 2}})
        own = [line(rank, "AllReduce", number, 50 + number) for number in range(2)]
        write(tmp_path / "logs", rank, [marker, *({"coll_perf": one["coll_perf"]} for one in own)])
    trace = read_any(tmp_path / "logs")
    assert trace.steps.tolist() == [0, 1]
    assert trace.ops["rank"].unique().sort().to_list() == [0, 1]


def test_one_file_is_one_rank(tmp_path):
    """Nothing to wait for, but the job's size is known and so is what is missing."""
    trace = read_any(write(tmp_path / "logs", 1, [line(1, "AllReduce", 0, 50, ranks=8)]))
    assert trace.layout.dp == 8
    assert trace.coverage().workers_traced == 1


def test_a_torn_last_line_is_counted(tmp_path):
    """The process was killed while it wrote."""
    path = write(tmp_path / "logs", 0, [line(0, "AllReduce", 0, 50)], end='\n{"header": {"id": "0xa')
    trace = read_any(path)
    assert trace.metadata["torn_lines"] == 1
    assert trace.ops.filter(pl.col("kind") == "all-reduce").height == 1


def test_a_bad_line_is_named(tmp_path):
    """File, line and what was expected."""
    for bad, message in (
        ("{nonsense\n", "line 2: not JSON"),
        ("[1, 2]\n", "line 2: damaged"),
        ("{}\n", "line 2: damaged"),
        (json.dumps({"coll_perf": {"coll": "AllReduce"}}) + "\n", "line 2: damaged (KeyError('coll_sn'))"),
        (json.dumps(line(7, "AllReduce", 0, 1)) + "\n", "line 2: damaged (ValueError('rank 7 of 2"),
        (json.dumps(line(0, "AllReduce", -1, 1)) + "\n", "line 2: damaged (ValueError('rank 0 of 2, coll_sn -1"),
        (json.dumps(line(0, "AllReduce", 0, 1e999)) + "\n", "line 2: damaged (ValueError("),
        (json.dumps(line(float("inf"), "AllReduce", 0, 1)) + "\n", "line 2: damaged (OverflowError("),
        (json.dumps(line(0, "AllReduce", 0, 1, ranks=1e308)) + "\n", "line 2: damaged (ValueError('n_ranks 1e+308"),
        (json.dumps(line(0, "AllReduce", 0, 1, ranks=10**30)) + "\n", "line 2: damaged (ValueError('n_ranks 1e+30"),
        (
            json.dumps(line(0, "AllReduce", 0, 1, size=10**30)) + "\n",
            "line 2: damaged (ValueError('n_ranks 2, coll_msg",
        ),
        ("[" * 100_000 + "\n", "line 2: not JSON (maximum recursion depth"),
    ):
        path = write(tmp_path / "logs", 0, [line(0, "AllReduce", 0, 50)], end="\n" + bad)
        with case(bad[:200]):
            with pytest.raises(FormatError) as raised:
                read_any(path)
            assert str(raised.value).startswith(f"{path}, {message}")
            assert len(str(raised.value)) < 400 + len(str(path))


def test_a_communicator_that_no_text_can_hold_is_read(tmp_path):
    """Half a character in its name becomes an escape."""
    trace = read_any(write(tmp_path / "logs", 0, [line(0, "AllReduce", 0, 50, ranks=1, identity="\ud800")]))
    assert trace.metadata["communicator"]["id"] == "\\ud800"


def test_logs_without_a_usable_collective_are_one_error(tmp_path):
    """Transfers alone; ranks that share no collective; a layout nobody needs."""
    transfers = write(tmp_path / "one", 0, [line(0, "", 0, 0, body={"p2p_perf": {}})])
    with pytest.raises(FormatError, match="has no collectives of the NCCL Inspector; expected lines with `coll_perf`"):
        read_any(transfers)
    for rank in range(2):
        write(tmp_path / "two", rank, [line(rank, "AllReduce", rank, 50)])
    with pytest.raises(FormatError, match="no collective that all 2 ranks reported; raise NCCL_INSPECTOR_DUMP_COLL"):
        read_any(tmp_path / "two")
    with pytest.raises(FormatError, match="leave out --layout"):
        read_any(tmp_path / "two", name="nccl-inspector", layout=tmp_path / "meta.yaml")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    """A folder stands for any error of the file system."""
    with pytest.raises(FormatError, match="cannot be read: Is a directory"):
        _read_file(tmp_path, None)


def test_other_logs_are_not_taken_for_it(tmp_path):
    """Nor a folder of them."""
    (tmp_path / "train.log").write_text('{"loss": 1.5}\n')
    with pytest.raises(FormatError, match="a text file, not a trace"):
        read_any(tmp_path / "train.log")
