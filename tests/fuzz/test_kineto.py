"""Whatever a trace of torch.profiler holds, reading it ends in a report or in one error of ours."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.doors import ends_well
from tests.kineto_files import all_reduce, document, event, kernel, launch
from tests.properties import examples
from tracekit.sources.load import load

SAMPLE = Path(__file__).resolve().parents[2] / "sample_traces" / "gpu_slow_input" / "rank0_trace.json.gz"
times = st.floats(-1e6, 1e16) | st.integers(0, 10**6)
numbers = st.integers(-(2**70), 2**70) | st.sampled_from([-1, 0, 1, 7, 4294967295])
anything = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.just([1, {"a": 2}])
events = st.one_of(
    st.builds(kernel, st.sampled_from(["gemm", "ncclDevKernel_AllReduce_RING(int)", ""]), times, times),
    st.builds(launch, times, st.integers(-1, 5)),
    st.builds(all_reduce, times, times, elements=st.integers(0, 3)),
    st.builds(event, st.sampled_from(["cpu_op", "user_annotation", "cuda_sync", "cuda_runtime"]),
              st.sampled_from(["ProfilerStep#1", "cudaStreamSynchronize", "cudaStreamWaitEvent", "record_param_comms"]),
              times, times),
    st.dictionaries(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]), anything),
)  # fmt: skip


def read(files):
    """A whole report of these files' bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(files):
            (Path(folder) / f"rank{number}.json").write_bytes(content)
        job = ends_well(lambda: load(*sorted(Path(folder).iterdir())))
        if job is not None:
            report = ends_well(job.whatif)
            if report is not None:
                json.loads(report.to_json())


@examples(20)
@given(st.lists(st.lists(st.tuples(events, numbers), max_size=12), min_size=1, max_size=3))
def test_any_events(ranks):
    files = []
    for rank, found in enumerate(ranks):
        for one, correlation in found:
            if isinstance(one.get("args"), dict) and correlation % 3 == 0:
                one["args"]["correlation"] = correlation
        files.append(json.dumps(document([one for one, _ in found], rank, len(ranks))).encode())
    read(files)


@examples(20)
@given(
    st.binary(max_size=300)
    | st.text(max_size=300).map(lambda text: ('{"traceEvents": [' + text).encode("utf-8", "replace"))
)
def test_any_bytes(content):
    read([content])


@examples(40)
@given(st.integers(0, 6000), st.integers(0, 255), st.booleans())
def test_any_byte_of_a_real_file_damaged(at, byte, cut):
    content = bytearray(SAMPLE.read_bytes())
    content[at % len(content)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.json.gz"
        path.write_bytes(content[: at % len(content)] if cut else content)
        job = ends_well(lambda: load(path))
        if job is not None:
            ends_well(job.whatif)
