"""Who waits for whom, what it costs and why: small jobs with answers computed by hand."""

import gzip
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from msgspec import structs

from judges.kinetosim import Job, Trouble
from tests.analysis.gpu.jobs import load_ranks, loaded, on_a_rank, said, waiting_events, waiting_job
from tests.kineto_files import GEMM, all_reduce, event, kernel, launch
from tracekit.analysis.gpu.pace import PACE, saved_by_rank

US = 1e-6


def test_breakdown_counts_ops_side_by_side_once(tmp_path):
    """Products 0-30 and 20-50, all-reduce 40-80, copy 75-100, nothing 100-110, product 110-120."""
    copy = event("gpu_memcpy", "Memcpy DtoD", 75, 25, pid=0, tid=9, device=0, stream=9, correlation=-1)
    events = [kernel(GEMM, 0, 30), kernel(GEMM, 20, 30, stream=8), all_reduce(40, 40), copy, kernel(GEMM, 110, 10)]
    (row,) = load_ranks(tmp_path, {0: events}).whatif().to_dict()["by_rank"]
    assert {name: round(value / US) for name, value in row.items() if name.endswith("_s")} == {
        "span_s": 120, "compute_s": 60, "communication_s": 40, "exposed_communication_s": 30, "memory_s": 25,
        "idle_s": 10, "wait_s": 0, "sole_delay_s": 0,
    }  # fmt: skip


@pytest.mark.parametrize("ahead_us", [0.0, 500.0])
def test_the_rank_that_comes_last_is_waited_for_whatever_its_clock_says(tmp_path, ahead_us):
    content = waiting_job(tmp_path, ahead_us).whatif().to_dict()
    assert [row["wait_s"] / US for row in content["by_rank"]] == pytest.approx([40, 0], abs=0.01)
    assert [row["sole_delay_s"] / US for row in content["by_rank"]] == pytest.approx([0, 40], abs=0.01)
    (waits,) = content["wait_for"]
    assert (waits["rank"], waits["for_rank"], waits["group"]) == (0, 1, "default_pg 0")
    first, second = content["clocks"]
    assert (second["ahead_s"] - first["ahead_s"]) / US == pytest.approx(ahead_us, abs=0.01)


def test_the_replay_reproduces_the_recording_and_prices_the_slow_rank(tmp_path):
    """Rank 1's product takes 70 us, rank 0's 30: at rank 0's pace the recording takes 60 us instead of 100."""
    job = waiting_job(tmp_path)
    report = job.whatif(fix=["rank=1 and kind=matrix-product"])
    assert report.step_time_s.recorded / US == pytest.approx(100)
    assert report.trust.replay_error == pytest.approx(0, abs=1e-9)
    prices = saved_by_rank(job.evidence.pace, (0, 1))
    assert prices[1] / US == pytest.approx(40)
    assert report.questions[0].saved_s / US == pytest.approx(40)


def test_who_is_late_most_often_need_not_be_to_blame(tmp_path):
    """Rank 0 is last in two of three collectives, by 1 us each; rank 1 once, by 50."""
    starts = {0: (101, 301, 500), 1: (100, 300, 550), 2: (100, 300, 500)}
    events = {rank: [all_reduce(at, end - at, ranks=(0, 1, 2)) for at, end in zip(times, (150, 350, 600), strict=True)]
              for rank, times in starts.items()}  # fmt: skip
    by_rank = load_ranks(tmp_path, events).whatif().to_dict()["by_rank"]
    assert [row["sole_delay_s"] / US for row in by_rank] == pytest.approx([2, 50, 0], abs=0.01)


def test_who_left_a_broadcast_before_the_others_came_met_nobody(tmp_path):
    broadcast = {"Collective name": "broadcast"}
    job = load_ranks(tmp_path, {0: [all_reduce(0, 5, **broadcast)], 1: [all_reduce(50, 5, **broadcast)]})
    assert job.comparable.matches.matched == 1
    assert "rendezvous" not in job.ops.ops.columns
    assert job.whatif().trust.replay_error == pytest.approx(0, abs=1e-9)


def edges(job):
    """(name before, name after, why) of the job's graph."""
    graph = job.graph.ops
    return {
        (graph.describe(before).split(" of ")[0], graph.describe(after).split(" of ")[0], why)
        for before, after, why in zip(graph.before.tolist(), graph.after.tolist(), graph.why.tolist(), strict=True)
    }


def test_events_that_nobody_recorded_are_inferred_and_said_to_be(tmp_path):
    """The collective waits for the product its thread launched before; what follows a stream's wait, for it."""
    events = [
        *waiting_events(30),
        event("cuda_runtime", "cudaStreamWaitEvent", 20, 1, correlation=3),
        launch(22, 4),
        kernel("optimizer_adam", 102, 8, correlation=4),
    ]
    job = load_ranks(tmp_path, {0: events})
    found = edges(job)
    assert (GEMM, all_reduce(0, 1)["name"], 4) in found
    assert (all_reduce(0, 1)["name"], "optimizer_adam", 4) in found
    left = job.evidence.unexplained
    assert (left.inferred, left.violations) == (2, 0)
    assert left.compute_gap_s <= 10 * US


def test_an_event_that_was_recorded_ties_what_precedes_it_to_what_follows_the_wait(tmp_path):
    """It is recorded between the launches of two kernels: the other stream waits for the first one alone."""
    events = [
        launch(0, 1), kernel(GEMM, 10, 100, correlation=1),
        event("cuda_runtime", "cudaEventRecord", 6, 1, correlation=5),
        launch(8, 3), kernel("copy_kernel", 110, 100, correlation=3),
        event("cuda_runtime", "cudaStreamWaitEvent", 14, 1, correlation=6),
        event("cuda_sync", "Stream Wait Event", 14, 0, pid=0, tid=20, stream=20, correlation=6, wait_on_stream=7,
              wait_on_cuda_event_record_corr_id=5),
        launch(16, 2), kernel("optimizer_adam", 112, 40, correlation=2, stream=20),
    ]  # fmt: skip
    graph = load_ranks(tmp_path, {0: events}).graph.ops.to_networkx()
    names = graph.nodes(data="name")
    waits = [(names[before], names[after]) for before, after, why in graph.edges(data="why") if why == "event"]
    assert waits == [(GEMM, "optimizer_adam")]


def test_an_inferred_event_that_the_times_contradict_is_left_out(tmp_path):
    """The all-reduce runs while the product launched before it still does."""
    events = [launch(0, 1), kernel(GEMM, 10, 60, correlation=1), launch(8, 2), all_reduce(20, 30, correlation=2)]
    assert all(why != 4 for *_, why in edges(load_ranks(tmp_path, {0: events})))


def step_behind_a_collective(at, ready):
    """A product, an all-reduce that ends at 900, a copy right behind it though launched at 22; the host waits."""
    number = int(at)
    events = [
        event("user_annotation", f"ProfilerStep#{number // 3000}", 0, 2900),
        launch(0, number + 1), kernel(GEMM, 10, ready - 10, correlation=number + 1),
        launch(12, number + 2), all_reduce(ready, 900 - ready, correlation=number + 2),
        launch(22, number + 3), kernel("copy_kernel", 902, 8, correlation=number + 3),
        event("cuda_runtime", "cudaDeviceSynchronize", 30, 890, correlation=number + 4),
    ]  # fmt: skip
    return [{**one, "ts": one["ts"] + at} for one in events]


def test_a_wait_that_no_call_tells_of_is_seen_in_all_steps_and_ranks_together(tmp_path):
    ranks = {rank: [one for n in range(3) for one in step_behind_a_collective(3000 * n, 400 + 200 * rank)]
             for rank in (0, 1)}  # fmt: skip
    assert (all_reduce(0, 1)["name"], "copy_kernel", 4) in edges(load_ranks(tmp_path, ranks))


def test_one_late_start_behind_something_else_may_be_chance(tmp_path):
    assert (all_reduce(0, 1)["name"], "copy_kernel", 4) not in edges(
        load_ranks(tmp_path, {0: step_behind_a_collective(0, 400)})
    )


def report_of(folder, late_us):
    """Of three steps in which the product of each rank takes so much more than 390 us."""
    ranks = {rank: [one for n in range(3) for one in step_behind_a_collective(3000 * n, 400 + late[n])]
             for rank, late in late_us.items()}  # fmt: skip
    return load_ranks(folder, ranks).whatif()


def test_a_rank_that_is_late_in_all_steps_is_named_with_price_and_cause(tmp_path):
    """Each of three steps waits for the GPU at its end, and gives 200 us back."""
    (found,) = on_a_rank(report_of(tmp_path, {0: (0, 0, 0), 1: (200, 200, 200)}))
    assert (found.kind, found.where.ranks) == ("bad-worker", (1,))
    assert found.saved_s / US == pytest.approx(600)
    assert "1.50 times as long" in found.effect


@pytest.mark.parametrize("late_us", [(0, 200, 0), (300, -150, 200), (100, -60, 250)])
def test_of_two_ranks_one_that_is_late_in_some_steps_only_is_not_named(tmp_path, late_us):
    """Between two ranks and few steps such differences are chance, whatever the last step costs."""
    assert report_of(tmp_path, {0: (0, 0, 0), 1: late_us}).verdict.culprit is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_bad_step_is_enough_only_where_others_show_that_it_is_none_of_theirs(tmp_path, ranks):
    """A pause of 2 ms in one of three steps: of two ranks, nobody says that it is unusual."""
    job = Job(ranks=ranks, layers=6, bucket=3, host_us=30.0, seed=3, troubles=(Trouble(1, pause_us=2000, only_step=1),))
    job.run().write(tmp_path)
    culprit = loaded(tmp_path).whatif().verdict.culprit
    assert (culprit and culprit.rank) == (None if ranks == 2 else 1)


def test_host_work_ends_where_it_calls_and_waiting_for_the_gpu_is_none(tmp_path):
    """The call that synchronises returns at 150, 10 us after the product: 10 us are host time, not 143."""
    events = [
        launch(2, 1),
        kernel(GEMM, 10, 130, correlation=1),
        event("cuda_runtime", "cudaStreamSynchronize", 7, 143, correlation=2),
        launch(170, 3),
        kernel(GEMM, 178, 20, correlation=3),
    ]
    ops = load_ranks(tmp_path, {0: events}).ops.ops
    host = ops.filter(pl.col("kind").is_in(["host", "synchronise"])).sort("start")
    assert host["name"].to_list() == [
        "cudaLaunchKernel",
        "cudaStreamSynchronize",
        "cudaStreamSynchronize",
        "cudaLaunchKernel",
    ]
    assert (host["duration"] / US).to_list() == pytest.approx([0, 5, 10, 20])


def test_a_thread_that_goes_on_after_another_one_called_waits_for_it(tmp_path):
    """The main thread calls at 0 and 50, that of the backward at 20 and 30 in between."""
    events = [
        launch(0, 1), kernel(GEMM, 10, 5, correlation=1),
        launch(20, 2, tid=200), kernel(GEMM, 30, 5, correlation=2),
        launch(30, 3, tid=200), kernel(GEMM, 40, 5, correlation=3),
        launch(50, 4), kernel(GEMM, 60, 5, correlation=4),
    ]  # fmt: skip
    ops = load_ranks(tmp_path, {0: events}).ops.ops.filter(kind="host")
    ops = ops.sort(pl.col("start") + pl.col("duration"))
    assert (ops["duration"] / US).to_list() == pytest.approx([0, 20, 10, 20])


def test_calls_that_peers_do_not_make_go_if_their_rank_waits_long_enough_in_them(tmp_path, monkeypatch):
    """Rank 1 waits from 5 until 30 us for its product."""
    events = [launch(0, 1), kernel(GEMM, 10, 20, correlation=1), all_reduce(70, 10, ranks=(0, 1, 2))]
    wait = event("cuda_runtime", "cudaStreamSynchronize", 5, 26, correlation=3)
    pace = load_ranks(tmp_path, {0: events, 1: [*events, wait], 2: events}).evidence.pace
    for least_us, kept in ((24.9, False), (25.1, True)):
        least = structs.replace(PACE, smallest_share=least_us * US / pace.recorded_s)
        monkeypatch.setattr("tracekit.analysis.gpu.pace.PACE", least)
        assert (pace.without_extra_waits(1) is None) is kept


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (Trouble(2, gpu=1.3), "bad-worker"),
        pytest.param(Trouble(2, host=1.5), "slow-host-code", marks=pytest.mark.slow),
        (Trouble(2, input_us=2000), "late-data-loading"),
        (Trouble(2, pause_us=2000), "slow-host-code"),
        (Trouble(2, extra_kernels=12), "data-skew"),
        pytest.param(Trouble(2, gc_us=2000), "python-gc", marks=pytest.mark.slow),
        (Trouble(2, syncs=5), "sync-calls"),
        (Trouble(2, link_us=800), "slow-nic"),
    ],
)
def test_what_was_done_to_a_rank_is_found_and_priced(tmp_path, trouble, kind):
    """The price is what the same job takes longer than without the trouble, to within a tenth."""
    job = Job(layers=6, bucket=2, host_us=30.0, seed=3, troubles=(trouble,))
    recording = job.run()
    recording.write(tmp_path)
    report = loaded(tmp_path).whatif()
    healthy = Job(layers=6, bucket=2, host_us=30.0, seed=3).run()
    found = on_a_rank(report)[0]
    assert (found.kind, found.where.ranks) == (kind, (2,))
    assert report.verdict.culprit.saved_s / US == pytest.approx(recording.took_us - healthy.took_us, rel=0.1)


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (Trouble(1, gpu=1.15), "bad-worker"),
        (Trouble(1, input_us=1500), "late-data-loading"),
        (Trouble(1, extra_kernels=16), "data-skew"),
        (Trouble(1, link_us=800), "slow-nic"),
        (Trouble(1), None),
    ],
)
def test_ranks_that_run_cuda_graphs_are_compared_and_priced(tmp_path, trouble, kind):
    """All kernels of a step have one launch, and the collectives among them say nothing but their names."""
    job = Job(ranks=2, layers=8, bucket=2, seed=1, cuda_graphs=True, troubles=(trouble,))
    recording = job.run()
    recording.write(tmp_path)
    lost_us = recording.took_us - replace(job, troubles=()).run().took_us
    report = loaded(tmp_path).whatif()
    found = on_a_rank(report)[:1]
    assert [(one.kind, one.where.ranks) for one in found] == ([] if kind is None else [(kind, (1,))])
    assert not found or report.verdict.culprit.saved_s / US == pytest.approx(lost_us, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("host_us", [12.0, 30.0])
def test_a_healthy_job_names_nobody(tmp_path, ranks, host_us):
    Job(ranks=ranks, layers=6, bucket=3, host_us=host_us, late_us=800.0, seed=5).run().write(tmp_path)
    assert loaded(tmp_path).whatif().verdict.culprit is None


def test_exposed_communication_is_priced_and_blamed_on_nobody(tmp_path):
    """Transfers of 3 ms instead of none, for all ranks: the price is what the job takes longer for them."""
    slow, free = (Job(ranks=4, layers=6, bucket=2, seed=3, transfer_us=us) for us in (3000.0, 0.0))
    slow.run().write(tmp_path)
    report = loaded(tmp_path).whatif()
    assert report.verdict.culprit is None
    exposed_s = report.verdict.exposed_communication_s
    assert exposed_s / US == pytest.approx(slow.run().took_us - free.run().took_us, rel=0.1)
    assert exposed_s > 0.5 * report.step_time_s.recorded
    (found,) = report.findings
    assert (found.kind, found.saved_s, found.where.ranks) == ("exposed-communication", pytest.approx(exposed_s), ())
    assert found.when == "over the recording"


def test_clocks_of_a_simulated_job_are_found(tmp_path):
    job = Job(ranks=4, layers=6, bucket=2, seed=9, clocks_us=300.0)
    recording = job.run()
    recording.write(tmp_path)
    ahead = loaded(tmp_path).comparable.clocks.ahead / US
    want = np.array(recording.ahead_us)
    assert ahead - ahead.mean() == pytest.approx(want - want.mean(), abs=2.0)


def late_into_the_recording(folder, ranks, late_us):
    """Of a job whose last rank launches the first of two all-reduces so much later; hosts wait for its end."""
    events = {}
    for rank in range(ranks):
        late = late_us if rank == ranks - 1 else 3.0 * rank
        first, second = 1000.0 + late_us, 3000.0 + late_us
        events[rank] = [
            launch(late, 1), all_reduce(20 + late, first - 20 - late, ranks=range(ranks), correlation=1),
            event("cuda_runtime", "cudaDeviceSynchronize", late + 8, first - late, correlation=3),
            launch(first + 100, 2),
            all_reduce(second - 100 + rank, 100 - rank, ranks=range(ranks), correlation=2),
        ]  # fmt: skip
    return load_ranks(folder, events).whatif()


def test_a_rank_that_comes_late_into_the_recording_is_named_and_nothing_else_is_blamed(tmp_path):
    (found,) = on_a_rank(late_into_the_recording(tmp_path, 4, 900.0))
    assert (found.kind, found.where.ranks) == ("late-start", (3,))
    assert found.saved_s / US == pytest.approx(900 - 3, abs=10)


@pytest.mark.parametrize(("ranks", "late_us"), [(2, 900.0), (4, 100.0)])
def test_of_two_ranks_or_by_little_coming_late_names_nobody(tmp_path, ranks, late_us):
    """Nobody says that it is unusual; 100 us are less than a twentieth of the recording."""
    assert late_into_the_recording(tmp_path, ranks, late_us).verdict.culprit is None


def test_a_file_that_is_cut_off_makes_nobody_slow(tmp_path):
    """What the other rank did afterwards has no peers."""
    Job(ranks=2, layers=4, bucket=2, seed=0).run().write(tmp_path)
    whole = gzip.decompress((tmp_path / "rank1_trace.json.gz").read_bytes())
    (tmp_path / "rank1_trace.json.gz").write_bytes(gzip.compress(whole[: len(whole) * 2 // 3])[:-8])
    report = loaded(tmp_path).whatif()
    assert report.verdict.culprit is None
    assert any("cut off" in doubt and "record it again" in doubt for doubt in said(report))


def test_steps_that_only_one_rank_recorded_make_nobody_slow(tmp_path):
    """Rank 1's profiler stopped a step earlier."""
    short, long = Job(ranks=2, layers=4, bucket=2, seed=0, steps=2), Job(ranks=2, layers=4, bucket=2, seed=0)
    document = long.run()
    end = max(event["ts"] for event in short.run().events[1])
    document.events[1][:] = [event for event in document.events[1] if event["ts"] + event["dur"] <= end]
    document.write(tmp_path)
    assert loaded(tmp_path).whatif().verdict.culprit is None


def test_ranks_without_a_collective_in_common_are_not_trusted(tmp_path):
    report = load_ranks(
        tmp_path, {rank: [launch(0, 1), kernel(GEMM, 10, 30, correlation=1)] for rank in (0, 1)}
    ).whatif()
    assert any("no collective" in doubt for doubt in said(report))
