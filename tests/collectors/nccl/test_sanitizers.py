"""The plugin under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, driven from many threads."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.collectors.nccl.conftest import SOURCES
from tracekit.collectors.nccl.rings import operations, read_ring, ring_files

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).with_name("harness.c")
#: A small lane overflows many times over in a run, a large one never does.
LANES = {"overflowing": 16, "roomy": 1 << 14}


def run(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_no_sanitizer_finds_anything(tmp_path, sanitizer, lane):
    """Eight threads, a mask that changes, communicators that come and go, a reader: no race, no stray access."""
    program = tmp_path / "harness"
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    flags += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    subprocess.run(["cc", *flags, "-I", SOURCES, "-o", program, HARNESS, "-pthread"], check=True, capture_output=True)
    variables = {"TRACEKIT_COLLECT_DIR": tmp_path, "TRACEKIT_NCCL_SLOTS": LANES[lane]}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    done = run([program], environment)
    if "unexpected memory mapping" in done.stderr:  # an address space that is laid out more randomly than it knows
        done = run(["setarch", "--addr-no-randomize", program], environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    (path,) = ring_files(tmp_path / "attempt-000")
    ring = read_ring(path)
    assert ring.dropped == 0
    assert (ring.overwritten > 0) == (lane == "overflowing")
    if lane == "roomy":
        rows = operations(ring)
        assert 0 < rows.height <= 4 * 2000
        assert rows["channels_timed"].unique().to_list() == [2]
        assert rows.select("gpu_start_ns", "gpu_end_ns").unique().rows() == [(1000, 2000)]
