"""The ring of a rank: bounded, whole records only, and still there when the process is not."""

import itertools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collectors.conftest import environment
from tests.properties import examples
from tracekit.collectors.record.recorder import PLACES, Recorder, Ring, RingStore, open_ring, ring_bytes
from tracekit.collectors.record.wire_format import ENV_RINGS, RECORD, Category, RuntimeOptions
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.launchers import write_left_over
from tracekit.collectors.run_directory.segments import RECORD_DTYPE


def record(step: int) -> tuple[int, ...]:
    """A data-load of that step."""
    return (Category.DATA_LOAD, 0, 0, step, -1, -1, -1, 0, 1, 0)


def steps(content: bytes) -> list[int]:
    """The steps of records."""
    return np.frombuffer(content, RECORD_DTYPE)["step"].tolist()


def ring_of(capacity):
    """A ring in memory of this process."""
    return Ring(-1, 0, ring_bytes(capacity), capacity)


@examples(25)
@given(actions=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_a_ring_is_a_bounded_queue(actions):
    """Whatever the order of adding and draining: oldest first, none twice, none lost but those counted."""
    ring = ring_of(7)
    model, dropped, numbers = [], 0, itertools.count()
    for add, count in actions:
        if add:
            for _ in range(count):
                number = next(numbers)
                ring.add(record(number))
                if len(model) < 7:
                    model.append(number)
                else:
                    dropped += 1
        else:
            taken = steps(ring.take(count))
            assert taken == model[: len(taken)]
            assert taken or not model
            ring.drain(len(taken))
            model = model[len(taken) :]
    assert ring.dropped == dropped


#: The smallest and the largest number of each field.
RANGES = [
    *((0, 2**bits - 1) for bits in (8, 8, 16)),
    *[(-(2**31), 2**31 - 1)] * 4,
    *[(-(2**63), 2**63 - 1)] * 3,
]
#: Most fit, and some do not by one.
FIELDS = st.tuples(*(st.one_of(st.integers(a, b), st.sampled_from([a - 1, a, b, b + 1])) for a, b in RANGES))


@examples(50)
@given(st.lists(FIELDS, max_size=20))
def test_a_ring_keeps_what_fits_its_fields_and_counts_the_rest(records):
    ring = ring_of(100)
    for one in records:
        ring.add(one)
    kept = [one[:-1] for one in RECORD.iter_unpack(taken(ring)) if any(one[:-1])]
    fit = [
        one for one in records if all(least <= value <= most for value, (least, most) in zip(one, RANGES, strict=True))
    ]
    assert (kept, ring.dropped) == ([one for one in fit if any(one)], len(records) - len(fit))


def test_a_record_of_anything_else_is_dropped():
    ring = ring_of(4)
    ring.add((6, 0, 0, 1.5, -1, -1, -1, 0, 1, 0))
    ring.add(record(7))
    assert ring.dropped == 1
    assert [one[0:4] for one in RECORD.iter_unpack(taken(ring)) if one[0]] == [record(7)[:4]]


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="Bad file descriptor"):
        Ring(99_999, 0, 8192, 4)


def test_a_number_too_large_for_its_field_costs_that_record(tmp_path):
    """It is dropped and counted; the ring goes on behind it."""
    (tmp_path / "attempt-000").mkdir()
    recorder = Recorder(tmp_path / "attempt-000", 0, 0, RuntimeOptions())
    recorder.fact("process", {"rank": 0, "world_size": 1, "host": "a", "time_ns": 0, "monotonic_ns": 0})
    for step in (1, 2**40, 3):
        recorder.add(record(step))
    recorder.start()
    recorder.close({})
    assert recorder.dropped == 1
    assert read_attempt(tmp_path, 0).ranks[0].records["step"].tolist() == [1, 3]


def test_threads_lose_nothing():
    """Four threads add while a fifth drains: each record once, those of a thread in their order."""
    ring = ring_of(1000)
    threads = [
        threading.Thread(target=lambda base=base: [ring.add(record(base + at)) for at in range(5000)])
        for base in (10_000, 20_000, 30_000, 40_000)
    ]
    for thread in threads:
        thread.start()
    drained = []
    while True:
        running = any(thread.is_alive() for thread in threads)
        taken = steps(ring.take(300))
        ring.drain(len(taken))
        drained += taken
        if not running and not taken:
            break
    assert len(drained) + ring.dropped == 20_000
    for base in (10_000, 20_000, 30_000, 40_000):
        own = [step for step in drained if base <= step < base + 10_000]
        assert own == sorted(set(own))


WORKER = """
import os, sys
from tracekit.collectors.record.recorder import Recorder
from tracekit.collectors.record.recorder import open_ring
rank = int(sys.argv[1])
ring = open_ring(rank, 2, 10)
for step in range(14):
    ring.add((6, 0, 0, 100 * rank + step, -1, -1, -1, 0, 1, 0))
    if step == 6:
        ring.drain(len(ring.take(5)) // {size})
os.kill(os.getpid(), 9)
"""


def test_the_launcher_finds_what_a_killed_rank_had_not_written(tmp_path):
    """Two processes of which nothing is left: what they had drained is not found again, and becomes a segment."""
    store = RingStore(10)
    try:
        for rank in (0, 1):
            code = WORKER.format(size=RECORD.size)
            variables = environment(**{ENV_RINGS: store.path})
            assert subprocess.run([sys.executable, "-c", code, str(rank)], env=variables).returncode == -9
        left = list(store.left_over())
    finally:
        store.close()
    assert [(one.rank, one.attempt, steps(one.records)) for one in left] == [
        (rank, 2, [100 * rank + step for step in range(5, 14)]) for rank in (0, 1)
    ]
    (tmp_path / "attempt-002").mkdir()
    process = {"world_size": 2, "host": "a", "time_ns": 0, "monotonic_ns": 0}
    fact = json.dumps({"kind": "process", "value": process})
    (tmp_path / "attempt-002" / "rank-000001.facts").write_text(f"{fact}\n")
    write_left_over(tmp_path, left[1])
    write_left_over(tmp_path, left[1])
    recording = read_attempt(tmp_path, 2)
    assert recording.ranks[1].records["step"].tolist() == list(range(105, 114))


def test_without_the_launchers_memory_a_rank_uses_its_own(tmp_path, monkeypatch):
    """No launcher, another launcher's memory, no place left: recording goes on, nothing outlives the process."""
    monkeypatch.delenv(ENV_RINGS, raising=False)
    assert filled(open_ring(0, 0, 4)) == [0, 1, 2, 3]
    other = tmp_path / "other"
    other.write_bytes(b"x")
    for path in (tmp_path / "missing", other):
        monkeypatch.setenv(ENV_RINGS, str(path))
        assert filled(open_ring(0, 0, 4)) == [0, 1, 2, 3]
    assert other.read_bytes() == b"x"
    store = RingStore(4)
    monkeypatch.setenv(ENV_RINGS, store.path)
    opened = [open_ring(rank, 0, 4) for rank in range(PLACES + 1)]
    for ring in opened:
        assert filled(ring) == [0, 1, 2, 3]
    assert [one.rank for one in store.left_over()] == list(range(PLACES))
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(int(store.path.rsplit("/", 1)[-1]))


def filled(ring: Ring) -> list[int]:
    """What a ring of four keeps of six records."""
    for step in range(6):
        ring.add(record(step))
    assert ring.dropped == 2
    return steps(ring.take(10))


def taken(ring: Ring) -> bytes:
    """All that is in the ring."""
    content = b""
    while batch := ring.take(1000):
        ring.drain(len(batch) // RECORD.size)
        content += batch
    return content
