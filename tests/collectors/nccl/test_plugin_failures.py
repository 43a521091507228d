"""What the plugin does where it cannot work as it should: no folder, no room, a forked process."""

import resource
import subprocess
from pathlib import Path

import pytest

from tests.collectors.nccl.conftest import SOURCES
from tests.collectors.nccl.harness import COLL, KERNEL_CH, P2P, in_process
from tracekit.collectors.nccl.rings import operations, read_ring, ring_files

HERE = Path(__file__).parent
DEFAULT = COLL | P2P | KERNEL_CH


def test_without_a_folder_nccl_goes_on_without_events(load, monkeypatch):
    """No folder, or none that can be written: init succeeds, the mask is empty, calls do nothing."""
    for folder in (None, "/proc/nowhere"):
        loaded = load()
        if folder is None:
            monkeypatch.delenv("TRACEKIT_COLLECT_DIR")
        else:
            monkeypatch.setenv("TRACEKIT_COLLECT_DIR", folder)
        context = loaded.nccl.init(1, 2, 0)
        assert (context, loaded.nccl.mask.value) == (None, 0)
        handle = loaded.nccl.start(context, COLL, func="AllReduce")
        assert handle is None
        loaded.nccl.stop(handle)
        loaded.nccl.set_step(1, DEFAULT)
        loaded.nccl.finalize(context)
        assert loaded.nccl.mask.value == 0


def test_a_folder_that_is_a_link_is_not_followed(load, tmp_path):
    loaded, elsewhere = load(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (loaded.directory / "attempt-000").symlink_to(elsewhere)
    assert (loaded.nccl.init(1, 2, 0), loaded.nccl.mask.value) == (None, 0)
    assert list(elsewhere.iterdir()) == []


def limited(size, call):
    """The result of a call while no file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nccl_without_events(load):
    """Room is reserved before anything is written: no page can be missing later."""
    loaded = load()
    context = limited(20_000, lambda: loaded.nccl.init(1, 2, 0))
    assert (context, loaded.nccl.mask.value) == (None, 0)
    assert list((loaded.directory / "attempt-000").iterdir()) == []


def test_a_ring_takes_room_for_the_threads_that_report(load):
    """Here one of 32."""
    loaded = load(TRACEKIT_NCCL_SLOTS=4096)
    context = loaded.nccl.init(1, 2, 0)
    before = loaded.path.stat().st_blocks * 512
    loaded.nccl.collective(context, 0)
    assert before < 64 * 1024
    assert loaded.path.stat().st_blocks * 512 - before == pytest.approx(4096 * 64, abs=16 * 1024)


def test_a_disk_that_fills_up_costs_the_events_of_new_threads(tmp_path):
    """A lane takes its room with its first event; who has room writes on."""
    program = tmp_path / "full_disk"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-I", SOURCES]
    subprocess.run(["cc", *flags, "-o", program, HERE / "full_disk.c", "-pthread"], check=True, capture_output=True)
    subprocess.run([program], env={"TRACEKIT_COLLECT_DIR": str(tmp_path)}, check=True)
    (path,) = ring_files(tmp_path / "attempt-000")
    assert operations(read_ring(path))["sequence"].to_list() == [0, 2]
    assert read_ring(path).dropped == 1


def test_a_forked_child_writes_a_ring_of_its_own(plugin, tmp_path):
    """Lanes and file belong to the parent."""
    code = (
        "one = nccl(6)\n"
        "one.collective(one.init(1, 2, 0), 0)\n"
        "child = os.fork()\n"
        "context = one.init(2, 2, 1) if not child else 1\n"
        "one.collective(context, 5)\n"
        "if not child: os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "print(json.dumps([os.getpid(), child]))\n"
    )
    ((parent, child),) = in_process(plugin, tmp_path, code, TRACEKIT_NCCL_SLOTS=64)
    rings = {ring.process: ring for ring in map(read_ring, ring_files(tmp_path / "attempt-000"))}
    assert operations(rings[parent])["sequence"].to_list() == [0, 5]
    assert operations(rings[child])["sequence"].to_list() == [5]
