"""A job on a GPU that is played, under `tracekit collect`: real processes, real hooks, a library that plays NVML."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectors.conftest import environment
from tests.handmade import run
from tracekit.trace.facts import SAMPLED, step_values
from tracekit.trace.model import OpKind

MS = 1e-3
#: What `fake_gpu.py` launches, by its own clock, and how much faster that is than the host's.
KERNELS_S = {
    OpKind.FORWARD_COMPUTE: 9 * MS,
    OpKind.LOSS: 3 * MS,
    OpKind.BACKWARD_COMPUTE: 18 * MS,
    OpKind.OPTIMIZER: 6 * MS,
}
DRIFT = 0.002
#: A mark is passed a microsecond after it; its time is a float32 of milliseconds since the job began.
MARK_S = 20e-6
HERE = Path(__file__).parent


@pytest.fixture
def job(runs):
    return runs["gpu"]


def clock_error_s(collected):
    """By how much a duration may be off whose ends the GPU's clock gave, as the trace says."""
    clocks = collected.trace.metadata["device_clock"]["ranks"].values()
    return 2 * max(clock["uncertainty_ns"] for clock in clocks) / 1e9 + MARK_S


def shortest(collected, kind):
    """The shortest op of a kind, and what its kernels take: they fill it, unless the host kept the GPU waiting.

    `fake_gpu.py` has a clock that runs faster than the host's. How exactly the host can read it depends on how busy the
    host is; each end of an op is as exact as the trace says that it is.
    """
    found = collected.trace.ops.filter(collected.trace.ops["kind"] == str(kind))["duration"].min()
    return found, pytest.approx(KERNELS_S[kind] / (1 + DRIFT), abs=clock_error_s(collected))


def test_ops_last_as_long_as_their_kernels_whenever_they_were_launched(job):
    """Not as long as the host took to launch them; a busy host can only leave gaps in some of them."""
    assert job.exit_codes == [0]
    for kind in KERNELS_S:
        found, expected = shortest(job, kind)
        assert found == expected, kind


def test_microbatches_and_steps_are_those_of_the_loop(job):
    """The host launches steps ahead of the GPU; none is lost at the end."""
    trace = job.trace
    assert list(trace.steps) == list(range(1, 40))
    forwards = trace.ops.filter(trace.ops["kind"] == str(OpKind.FORWARD_COMPUTE))
    assert forwards.height == 2 * 39
    assert set(forwards["microbatch"]) == {0, 1}


def test_values_are_those_of_the_step_that_the_host_is_in(job):
    """Bit by bit: what the GPU's clock makes of times does not touch them."""
    values = step_values(job.trace.metadata)
    assert values["tokens"] == {step: 100 + step for step in range(1, 40)}
    assert values["loss"] == {step: 1 / (1 + step) for step in range(1, 40)}


def test_the_metadata_says_which_clock_was_used_and_how_well_it_was_known(job):
    clock = job.trace.metadata["device_clock"]
    assert clock["source"] == "cuda-events"
    assert clock["left_out_rank_steps"] == 0
    fit = clock["ranks"]["0"]
    assert set(fit) >= {"offset_ns", "drift", "uncertainty_ns"}
    assert fit["uncertainty_ns"] > 0
    assert fit["readings"] >= 2


def test_each_collection_of_garbage_keeps_the_gpu_waiting_or_is_counted_as_hidden(job):
    """Both take 10 ms. The GPU has nothing to do during the second, behind the optimizer of step 7. It has work during
    the first, behind step 5, unless the host is so busy that it comes late.
    """
    pauses = job.trace.ops.filter(job.trace.ops["kind"] == str(OpKind.GC))
    assert pauses["step"].to_list()[-1] == 8
    assert pauses.height + job.trace.metadata["device_clock"]["hidden"].get("gc", 0) == 2
    assert pauses["duration"].to_list()[-1] >= 10 * MS - clock_error_s(job)


def test_the_metadata_names_the_gpu_and_how_it_fared(job):
    gpu = job.trace.metadata["gpus"]["0"]
    assert gpu["model"] == "Fake H200"
    assert gpu["uuid"] == "GPU-5a3f0c1e-0000-4000-8000-000000000007"
    assert gpu["pci_bus_id"] == "00000000:1B:00.0"
    assert gpu["driver"] == "580.00.01"
    assert gpu["cuda"] == "13.0-fake"
    assert gpu["host"] == job.trace.metadata["hosts"]["0"]
    assert gpu["samples"] >= 1
    assert gpu["sm_mhz"]["max"] == 1980
    assert gpu["power_w"]["median"] == pytest.approx(654.321)
    (clock,) = job.trace.metadata[SAMPLED]["DCGM_FI_DEV_SM_CLOCK"].values()
    assert (clock["ranks"], max(clock["value"])) == ([0], 1980)


def test_info_names_the_gpus_in_a_line(job):
    shown = run("store", "list", job.attempt["out"]).out
    assert "1 x Fake H200 on 1 host(s)" in " ".join(shown.split())


def test_throttled_gpus_are_named_with_their_reasons():
    from tracekit.dashboards.terminal.info import _gpus

    hot = {"model": "H200", "host": "b", "throttled": 0.25, "reasons": {"hw-thermal-slowdown": 0.25}}
    gpus = {"0": {"model": "H200", "host": "a", "throttled": 0.0, "reasons": {}}, "1": hot}
    assert _gpus(gpus) == "2 x H200 on 2 host(s); throttled: rank 1 25% of samples (hw-thermal-slowdown)"
    assert _gpus(["something", "else"]) == '["something", "else"]'


def test_no_hook_fails_so_nobody_waited_for_the_device(job):
    """Every call that waits raises on the played GPU, also in a hook."""
    assert job.attempt["ranks"][0]["failures"] == {}
    assert "CUDA events failed" not in job.complained


@pytest.mark.slow
def test_without_the_library_there_are_facts_and_no_word(runs):
    ran = runs["gpu-without-nvml"]
    gpu = ran.trace.metadata["gpus"]["0"]
    assert (gpu["model"], gpu["samples"], gpu["sm_mhz"]) == ("Fake H200", 0, None)
    assert "driver" not in gpu
    assert "nvidia-ml" not in ran.complained


@pytest.mark.slow
def test_ranks_of_a_data_parallel_job_have_a_clock_each(runs):
    """Buckets are marked in the reducer's thread and end in gloo's; the layout is found as without a GPU."""
    ran = runs["gpus"]
    assert ran.exit_codes == [0, 0], ran.complained
    trace = ran.trace
    assert (trace.layout.dp, len(trace.steps)) == (2, 23)
    assert set(trace.metadata["device_clock"]["ranks"]) == {"0", "1"}
    assert [rank["failures"] for rank in ran.attempt["ranks"]] == [{}, {}]
    reductions = trace.ops.filter(trace.ops["kind"] == str(OpKind.ALL_REDUCE))
    assert reductions.group_by("rank", "step").len().height == 2 * 23
    found, expected = shortest(ran, OpKind.BACKWARD_COMPUTE)
    assert found == expected


@pytest.mark.slow
def test_a_gpu_that_fails_costs_the_steps_behind_it_and_one_warning(runs):
    ran = runs["gpu-fails"]
    assert ran.exit_codes == [0]
    assert "trained" in ran.said
    assert ran.complained.count("CUDA events failed (CudaError: an illegal memory access") == 1
    trace = ran.trace
    assert 8 <= trace.steps[-1] < 20
    assert trace.metadata["device_clock"]["left_out_rank_steps"] >= 10
    found, expected = shortest(ran, OpKind.BACKWARD_COMPUTE)
    assert found == expected


@pytest.mark.slow
def test_a_step_in_which_a_graph_is_captured_is_left_out(runs):
    ran = runs["gpu-captures"]
    assert 13 not in ran.trace.steps
    assert {12, 14, 27} <= set(ran.trace.steps)
    assert ran.complained.count("tracekit: rank") == 0


SAMPLER = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from tests.collectors.fake_cuda import FakeCuda
FakeCuda().pretend(torch)
from functools import partial
from tracekit.collectors.record import machine_state
machine_state.SAMPLE_LIMIT = 8
told = []
prepare = partial(machine_state.gpu_reader, machine_state.device_facts(0), told.append)
state = machine_state.Sampler(Path(sys.argv[1]), 0.0, prepare)
state.begin()
state._thread.join()
print(told[0]["driver"])
"""


@pytest.mark.slow
def test_throttling_is_kept_with_its_reasons(tmp_path, nvml):
    """Eight samples of the played GPU: two throttled by heat, which its hardware did, idle is no throttling."""
    from tracekit.collectors.merge.run_facts import read_samples, summarize_gpu

    path = tmp_path / "rank-000003.gpu"
    command = [sys.executable, "-c", SAMPLER, str(path), str(HERE.parents[1])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment(LD_LIBRARY_PATH=nvml)
    )
    assert done.stdout == "580.00.01\n"
    with path.open("ab") as file:
        file.write(b"[12")  # torn by a kill
    summary = summarize_gpu({"host": "a"}, read_samples(tmp_path, 3, ".gpu"))
    assert (summary["host"], summary["samples"], summary["throttled"]) == ("a", 8, 0.25)
    assert summary["sm_mhz"] == {"min": 1200, "median": 1980, "max": 1980}
    assert (summary["temperature_c"]["min"], summary["temperature_c"]["max"]) == (61, 88)
    assert summary["reasons"] == {"hw-slowdown": 0.25, "hw-thermal-slowdown": 0.25}


def test_a_series_is_kept_over_time_and_thinned():
    from tracekit.collectors.merge.run_facts import thinned

    samples = [[at * 10**9, 1000 + at, 40, None, 0] for at in range(10)] + [[10**10, None, 40, None, 0]]
    begun_ns = 1_700_000_000 * 10**9
    times = [1_700_000_000.0 + at for at in range(10)]
    assert thinned(samples, 1, begun_ns, 100) == (times, [*range(1000, 1010)])
    assert thinned(samples, 1, begun_ns, 4) == (times[::3], [1000, 1003, 1006, 1009])


def test_nothing_of_a_gpu_is_known_without_samples():
    from tracekit.collectors.merge.run_facts import summarize_gpu

    summary = summarize_gpu({}, [])
    assert (summary["throttled"], summary["power_w"], summary["reasons"]) == (None, None, {})
