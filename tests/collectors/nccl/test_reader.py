"""Ring files: what the launcher saves while they are written, and what is refused."""

import resource
import socket

import numpy as np
import pytest

from tests.collectors.nccl.handmade import HandmadeRing
from tracekit.base.errors import FormatError
from tracekit.collectors.nccl import rings
from tracekit.collectors.nccl.launching import Drain
from tracekit.collectors.nccl.rings import operations


def test_a_drained_ring_loses_nothing(load):
    """A lane of 16 slots, emptied every five operations."""
    loaded = load(TRACEKIT_NCCL_SLOTS=16)
    drain = Drain(loaded.directory)
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(50):
        loaded.nccl.collective(context, sequence)
        if sequence % 5 == 4:
            assert drain.update() == 10
    assert drain.update() == 0
    loaded.nccl.collective(context, 50)  # still in the ring only
    assert operations(loaded.ring)["sequence"].to_list() == list(range(51))
    assert loaded.ring.overwritten == 0


def test_a_drain_that_comes_late_leaves_a_gap_that_is_counted(load):
    """What was overwritten before it came, and no slot twice."""
    loaded = load(TRACEKIT_NCCL_SLOTS=16)
    drain = Drain(loaded.directory)
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(30):
        loaded.nccl.collective(context, sequence)
        if sequence in (3, 20):
            drain.update()
    assert operations(loaded.ring)["sequence"].to_list() == [*range(4), *range(13, 21), *range(22, 30)]
    assert loaded.ring.overwritten == 2 * 10


def test_a_full_disk_leaves_no_half_slot(load):
    """What could not be saved is saved when there is room again."""
    loaded = load(TRACEKIT_NCCL_SLOTS=64)
    drain = Drain(loaded.directory)
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(10):
        loaded.nccl.collective(context, sequence)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert drain.update() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert loaded.path.with_suffix(".slots").stat().st_size == 0
    assert drain.update() == 20
    assert operations(loaded.ring)["sequence"].to_list() == list(range(10))


def test_rings_of_other_hosts_and_unfinished_ones_are_left_alone(tmp_path):
    """Another launcher drains those; a ring whose process is still making it waits."""
    HandmadeRing("elsewhere", 1).write(tmp_path / "attempt-000")
    (tmp_path / "attempt-000" / f"nccl-{socket.gethostname()}-2.ring").write_bytes(bytes(50_000))
    assert Drain(tmp_path).update() == 0
    assert not list(tmp_path.glob("*/*.slots"))


def test_a_torn_tail_of_saved_slots_is_cut_off(load):
    """The launcher died while it wrote."""
    loaded = load(TRACEKIT_NCCL_SLOTS=16)
    context = loaded.nccl.init(1, 2, 0)
    loaded.nccl.collective(context, 0)
    Drain(loaded.directory).update()
    log = loaded.path.with_suffix(".slots")
    log.write_bytes(log.read_bytes()[:-1])
    assert operations(loaded.ring)["sequence"].to_list() == [0]  # its stop is read from the ring


def test_a_damaged_header_is_one_error(tmp_path):
    """It names the file."""
    path = HandmadeRing("a", 1).write(tmp_path)
    whole = path.read_bytes()
    for damage, message in (
        ({"magic": 0}, "not a ring of NCCL events this tracekit reads"),
        ({"version": 1}, "not a ring of NCCL events this tracekit reads"),
        ({"slots_per_lane": 1 << 20}, "1048576 slots per lane do not fit into the file"),
        ({"slots_per_lane": 24}, "24 slots per lane do not fit"),
        ({"slots_per_lane": 0}, "0 slots per lane do not fit"),
    ):
        content = bytearray(whole)
        header = np.frombuffer(content, rings._HEADER, 1)
        for field, value in damage.items():
            header[field] = value
        path.write_bytes(content)
        with pytest.raises(FormatError, match=message) as raised:
            rings.read_ring(path)
        assert str(path) in str(raised.value)


def test_another_file_is_no_ring(tmp_path):
    """Too short, or not called as one."""
    path = tmp_path / "nccl-a-1.ring"
    path.write_bytes(b"short")
    with pytest.raises(FormatError, match="5 bytes; a ring of NCCL events has at least 40960"):
        rings.read_ring(path)
    with pytest.raises(FormatError, match="not the name of a ring; expected nccl-HOST-PID"):
        rings.read_ring(tmp_path / "rank-000000.facts")
