"""The compiled plugin, driven through its tables of functions as NCCL drives it."""

import os
import subprocess
import threading
from ctypes import CFUNCTYPE, c_char_p, c_int, c_ulong, cast, create_string_buffer
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collectors.nccl.harness import (
    COLL,
    COLL_API,
    GROUP,
    GROUP_API,
    KERNEL_CH,
    KERNEL_CH_STOP,
    P2P,
    PROXY_OP,
    PROXY_STEP,
    VERSIONS,
)
from tests.properties import examples
from tracekit.collectors.nccl.launching import find_plugin
from tracekit.collectors.nccl.rings import (
    HEADER_BYTES,
    SLOT,
    START,
    STATE,
    STOP,
    Communicator,
    channels,
    count_proxy_steps,
    operations,
)
from tracekit.collectors.nccl.rings import PROXY_OP as OP_SLOT
from tracekit.collectors.nccl.rings import PROXY_STEP as STEP_SLOT

HERE = Path(__file__).parent
DEFAULT = COLL | P2P | KERNEL_CH


def test_the_installed_library_needs_libc_alone_shows_five_names_and_stays_loaded():
    """NCCL closes it behind its last communicator; code that runs then must still be there."""
    plugin = find_plugin()
    dynamic = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert all(name.startswith(("libc.", "ld-")) for name in needed)  # the loader serves thread-local variables
    assert "NODELETE" in dynamic
    symbols = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == [
        *(f"ncclProfiler_v{version}" for version in VERSIONS),
        "tracekit_nccl_set_step",
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_collective_is_read_back_as_nccl_told_it(load, version):
    """Every field, whatever version of the tables NCCL took."""
    loaded = load(version)
    nccl = loaded.nccl
    context = nccl.init(0xFEEDFACECAFEBEEF, 8, 3, nodes=2, name="dp")
    assert nccl.mask.value == DEFAULT
    nccl.set_step(41, DEFAULT)
    handle = nccl.start(
        context,
        COLL,
        seqNumber=2**40 + 1,
        func="ReduceScatter",
        sendBuff=1,
        recvBuff=2,
        count=2**35,
        root=5,
        datatype="ncclBfloat16",
        nChannels=2,
        nWarps=17,
        algo="NVLS_TREE",
        proto="LL128",
    )
    nccl.stop(handle)
    nccl.channel(context, handle, 6, 1_700_000_000_000_000_500, 1_700_000_000_000_009_000)
    nccl.channel(context, handle, 7, 1_700_000_000_000_000_400, 1_700_000_000_000_008_000)
    nccl.finalize(context)
    ring = loaded.ring
    assert ring.communicators == (Communicator(0xFEEDFACECAFEBEEF, 8, 3),)
    assert (ring.process, ring.overwritten, ring.dropped) == (os.getpid(), 0, 0)
    (row,) = operations(ring).drop("handle", "enqueue_ns").iter_rows(named=True)
    assert row == {
        "number": 1,
        "communicator_id": 0xFEEDFACECAFEBEEF,
        "communicator_ranks": 8,
        "communicator_rank": 3,
        "function": "ReduceScatter",
        "sequence": 2**40 + 1,
        "step": 41,
        "peer": 5,
        "count": 2**35,
        "data_type": "ncclBfloat16",
        "bytes": 2**36,
        "algorithm": "NVLS_TREE",
        "protocol": "LL128",
        "channels": 2,
        "gpu_start_ns": 1_700_000_000_000_000_400,
        "gpu_end_ns": 1_700_000_000_000_009_000,
        "channels_timed": 2,
    }
    assert channels(ring)["channel"].to_list() == [6, 7]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_transfer_is_read_back_as_nccl_told_it(load, version):
    """A send with its peer; without channels it has no GPU times."""
    loaded = load(version)
    context = loaded.nccl.init(9, 4, 0)
    handle = loaded.nccl.start(context, P2P, func="Send", buff=7, datatype="ncclInt8", count=12, peer=3, nChannels=4)
    loaded.nccl.stop(handle)
    (row,) = operations(loaded.ring).iter_rows(named=True)
    assert (row["number"], row["function"], row["peer"], row["bytes"], row["channels"]) == (2, "Send", 3, 12, 4)
    assert row["gpu_start_ns"] is row["gpu_end_ns"] is None


@pytest.mark.parametrize("version", VERSIONS)
def test_proxy_steps_are_recorded_when_asked_for(load, version):
    """Asked for alone, they bring the operations they belong to. Another process's pointers are not taken for ours."""
    loaded = load(version, TRACEKIT_NCCL_MASK="0x10")
    nccl = loaded.nccl
    context = nccl.init(9, 4, 0)
    assert nccl.mask.value == COLL | P2P | PROXY_OP | PROXY_STEP
    handle = nccl.collective(context, 0)
    ours = nccl.start(
        context, PROXY_OP, parent=handle, pid=os.getpid(), channelId=5, peer=2, nSteps=8, chunkSize=4096, isSend=1
    )
    theirs = nccl.start(context, PROXY_OP, parent=handle, pid=1, channelId=6, peer=1, nSteps=8, chunkSize=1, isSend=0)
    steps = [
        nccl.start(context, PROXY_STEP, parent=parent, step=number) for number, parent in enumerate((ours, theirs))
    ]
    nccl.state(steps[0], 9, transSize=4096)
    nccl.stop(steps[0])
    slots = loaded.ring.slots
    ops = slots[slots["number"] == OP_SLOT][["handle", "first", "channel", "peer", "flags"]].tolist()
    assert [op[1:] for op in ops] == [(handle, 5, 2, 1), (0, 6, 1, 0)]
    transfers = slots[slots["number"] == STEP_SLOT][["handle", "action", "first", "second"]]
    (first, *_), (second, *_) = begun = transfers[transfers["action"] == START].tolist()
    assert begun == [(first, START, ops[0][0], 0), (second, START, ops[1][0], 1)]
    assert transfers[transfers["action"] != START][["handle", "action", "first"]].tolist() == [
        (first, STATE, 4096),
        (first, STOP, 0),
    ]
    assert count_proxy_steps(loaded.ring) == 2


names = st.sampled_from(["AllReduce", "AllGather", "Broadcast", "Reduce", "a name much longer than the room for names"])
calls = st.lists(
    st.tuples(
        names,
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**48),
        st.integers(-1, 2**31 - 1),
        st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 2**40)), max_size=4),
    ),
    min_size=1,
    max_size=20,
)


def test_whatever_nccl_tells_is_read_back_exactly(load):
    """Any names, sequences, sizes and times, channels ending in reverse."""
    loaded = load(5, TRACEKIT_NCCL_SLOTS=1 << 16)
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)

    @examples(20)
    @given(calls)
    def check(told):
        before = {handle for handle, *_ in operations(loaded.ring).select("handle").rows()}
        handles = []
        for function, sequence, count, root, times in told:
            handle = nccl.start(context, COLL, seqNumber=sequence, func=function, count=count, root=root)
            parts = [nccl.start(context, KERNEL_CH, parent=handle, channelId=0, pTimer=begin) for begin, _ in times]
            for part, (begin, length) in reversed(list(zip(parts, times, strict=True))):
                nccl.state(part, KERNEL_CH_STOP, pTimer=begin + length)
            handles.append(handle)
        found = operations(loaded.ring).filter(~pl.col("handle").is_in(list(before)))
        rows = {row.pop("handle"): row for row in found.iter_rows(named=True)}
        for handle, (function, sequence, count, root, times) in zip(handles, told, strict=True):
            row = rows.pop(handle)
            told_of = (row["function"], row["sequence"], row["count"], row["peer"], row["channels_timed"])
            assert told_of == (function[:23], sequence, count, root, len(times))
            assert row["gpu_start_ns"] == min((begin for begin, _ in times), default=None)
            assert row["gpu_end_ns"] == max((begin + length for begin, length in times), default=None)
        assert not rows

    check()


def test_threads_write_beside_each_other(load):
    """A thread that enqueues and a thread that ends what the other began, four pairs at once: nothing is lost."""
    loaded = load(6, TRACEKIT_NCCL_SLOTS=4096)
    nccl = loaded.nccl
    contexts = [nccl.init(number, 2, 0) for number in range(4)]
    handles = [[] for _ in contexts]

    def enqueue(pair):
        for sequence in range(200):
            handles[pair].append((sequence, nccl.collective(contexts[pair], sequence)))

    def finish(pair):
        done = 0
        while done < 200:
            while len(handles[pair]) > done:
                sequence, handle = handles[pair][done]
                nccl.channel(contexts[pair], handle, 0, sequence * 10 + pair + 1, sequence * 10 + pair + 6)
                done += 1

    threads = [threading.Thread(target=work, args=(pair,)) for pair in range(4) for work in (enqueue, finish)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = operations(loaded.ring)
    assert (loaded.ring.overwritten, loaded.ring.dropped) == (0, 0)
    assert rows.height == 800
    expected = rows["sequence"] * 10 + rows["communicator_id"].cast(pl.Int64) + 1
    assert rows["gpu_start_ns"].equals(expected, check_names=False)
    assert rows["gpu_end_ns"].equals(expected + 5, check_names=False)


def test_stops_may_come_in_any_order_twice_or_never(load):
    """Handles are numbers: what was never started here does no harm either."""
    loaded = load()
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    first, second = (nccl.start(context, COLL, seqNumber=number, func="AllReduce") for number in range(2))
    parts = [nccl.start(context, KERNEL_CH, parent=first, channelId=number, pTimer=100 + number) for number in (0, 1)]
    nccl.stop(parts[1])
    nccl.state(parts[1], KERNEL_CH_STOP, pTimer=220)
    nccl.stop(second)
    nccl.stop(first)
    nccl.stop(first)
    nccl.stop(0)
    nccl.stop(2**63 + 12345)
    nccl.table.recordEventState(parts[0], KERNEL_CH_STOP, None)
    rows = operations(loaded.ring).select("sequence", "gpu_start_ns", "gpu_end_ns").rows()
    assert rows == [(0, 100, None), (1, None, None)]
    nccl.state(parts[0], KERNEL_CH_STOP, pTimer=210)
    assert operations(loaded.ring)["gpu_end_ns"].to_list() == [220, None]


def test_times_no_clock_shows_are_none(load):
    """A start of 0, an end before its start."""
    loaded = load()
    context = loaded.nccl.init(1, 2, 0)
    for sequence, (begin, end) in enumerate([(0, 50), (50, 49), (50, 50)]):
        loaded.nccl.channel(context, loaded.nccl.collective(context, sequence), 0, begin, end)
    rows = operations(loaded.ring).select("gpu_start_ns", "gpu_end_ns").rows()
    assert rows == [(None, None), (50, None), (50, 50)]


def test_nccl_s_log_says_where_the_events_go_or_why_they_do_not(load):
    """INFO where it works, WARN where it does not."""
    said = []
    logger = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)(
        lambda level, _flags, _file, _line, form, first: said.append((level, form.decode(), first.decode()))
    )
    for folder in (None, "/proc/nowhere"):
        loaded = load() if folder is None else load(TRACEKIT_COLLECT_DIR=folder)
        loaded.nccl.init(1, 2, 0, log=logger)
        loaded.nccl.init(2, 2, 0, log=logger)
        if folder is None:
            assert said == [(3, "tracekit: NCCL events go to %s", str(loaded.path))]
            said.clear()
    assert [(level, form) for level, form, _ in said] == [(2, "tracekit: no NCCL events: %s: %s")] * 2


def test_what_comes_after_finalize_is_kept(load):
    """Kernels of a destroyed communicator still end; a new one goes into the same ring."""
    loaded = load()
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    handle = nccl.collective(context, 0)
    part = nccl.start(context, KERNEL_CH, parent=handle, channelId=0, pTimer=10)
    nccl.finalize(context)
    nccl.mask.value = 77  # NCCL is gone: nobody may write there any more
    nccl.set_step(3, 0)
    assert nccl.mask.value == 77
    nccl.state(part, KERNEL_CH_STOP, pTimer=30)
    nccl.stop(part)
    nccl.set_step(4, DEFAULT)
    again = nccl.init(2, 2, 1)
    nccl.collective(again, 0)
    rows = operations(loaded.ring).select("communicator_id", "gpu_start_ns", "gpu_end_ns").rows()
    assert rows == [(1, 10, 30), (2, None, None)]


def test_an_overflowing_lane_keeps_the_newest_and_counts_the_rest(load):
    """16 slots hold the last eight of 50 operations."""
    loaded = load(TRACEKIT_NCCL_SLOTS=16)
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(50):
        loaded.nccl.collective(context, sequence)
    ring = loaded.ring
    assert operations(ring)["sequence"].to_list() == list(range(42, 50))
    assert ring.overwritten == 100 - 16


def test_an_operation_that_lost_a_channel_has_no_times(load):
    """16 slots of the thread that reports channels: the first channel's are overwritten by the second's."""
    loaded = load(TRACEKIT_NCCL_SLOTS=16)
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    first, second = nccl.collective(context, 0), nccl.collective(context, 1, channels=7)

    def report():
        nccl.channel(context, first, 0, 10, 90)
        for number in range(7):
            nccl.channel(context, second, number, 20, 80)
        nccl.channel(context, first, 1, 30, 70)

    thread = threading.Thread(target=report)
    thread.start()
    thread.join()
    rows = operations(loaded.ring).select("channels", "channels_timed", "gpu_start_ns", "gpu_end_ns").rows()
    assert rows == [(2, 1, None, None), (7, 7, 20, 80)]


def test_a_torn_slot_is_left_out_and_counted(load):
    """A slot whose sequence number is not that of its place was being written when its process died."""
    loaded = load()
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(3):
        loaded.nccl.collective(context, sequence)
    slots = np.memmap(loaded.path, SLOT, "r+", HEADER_BYTES, (6,))
    slots["sequence"][2] = 0
    slots.flush()
    assert operations(loaded.ring)["sequence"].to_list() == [0, 2]
    assert loaded.ring.overwritten == 1


def test_a_slot_of_another_lane_is_left_out(load):
    """Its place says whose it is."""
    loaded = load()
    context = loaded.nccl.init(1, 2, 0)
    for sequence in range(2):
        loaded.nccl.collective(context, sequence)
    slots = np.memmap(loaded.path, SLOT, "r+", HEADER_BYTES, (4,))
    slots["lane"][0] = 9
    slots.flush()
    assert operations(loaded.ring)["sequence"].to_list() == [1]


def test_an_address_that_holds_another_name_is_another_name(load):
    """Names are known by address, but only as long as the text is the same."""
    loaded = load()
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    buffer = create_string_buffer(b"AllReduce")
    for text in (b"AllReduce", b"Broadcast", b"AllReduce"):
        buffer.value = text
        nccl.start(context, COLL, seqNumber=0, func=cast(buffer, c_char_p))
    assert operations(loaded.ring)["function"].to_list() == ["AllReduce", "Broadcast", "AllReduce"]


def test_python_switches_the_events_with_the_step(load):
    """NCCL reads the mask again before each operation; what began in a recorded step is finished in one that is not."""
    loaded = load()
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    nccl.set_step(7, DEFAULT)
    kept = nccl.collective(context, 0)
    nccl.set_step(8, 0)
    assert nccl.mask.value == 0
    nccl.channel(context, kept, 0, 10, 20)
    late = nccl.collective(context, 1)  # its mask was read before the step changed
    nccl.channel(context, late, 0, 30, 40)
    nccl.set_step(9, COLL)
    assert nccl.mask.value == COLL
    nccl.collective(context, 2)
    rows = operations(loaded.ring).select("step", "sequence", "gpu_end_ns").rows()
    assert rows == [(7, 0, 20), (9, 2, None)]


@pytest.mark.parametrize("version", VERSIONS)
def test_events_nobody_asked_for_have_handles_and_leave_nothing(load, version):
    """NCCL reports parents too, and counts graph-captured collectives only where these have handles."""
    loaded = load(version)
    context = loaded.nccl.init(1, 2, 0)
    kinds = [GROUP, PROXY_OP] if version == 4 else [GROUP, GROUP_API, COLL_API, PROXY_OP]
    for kind in kinds:
        handle = loaded.nccl.start(context, kind)
        assert handle
        loaded.nccl.state(handle, 23)
        loaded.nccl.stop(handle)
    if version > 4:  # types that do not exist, and two at once
        assert [loaded.nccl.start(context, kind) for kind in (0, 1 << 40, COLL | P2P)] == [None] * 3
    assert len(loaded.ring.slots) == 0


def test_a_thread_without_a_lane_is_counted_and_lanes_come_back(load):
    """32 threads can report at once; the 33rd on are counted, and lanes of ended threads serve again."""
    loaded = load()
    nccl = loaded.nccl
    context = nccl.init(1, 2, 0)
    together = threading.Barrier(40)

    def report(wait):
        nccl.start(context, COLL, seqNumber=0, func="AllReduce")
        if wait:
            together.wait()

    for wait in (True, False):
        threads = [threading.Thread(target=report, args=(wait,)) for _ in range(40)]
        for thread in threads:
            thread.start()
            if not wait:
                thread.join()
        for thread in threads:
            thread.join()
    assert loaded.ring.dropped == 8
    assert len(loaded.ring.slots) == 32 + 40


def test_more_communicators_and_names_than_there_is_room_for(load):
    """Their operations are kept without what could not be noted."""
    loaded = load()
    nccl = loaded.nccl
    contexts = [nccl.init(number, 2, 0) for number in range(513)]
    nccl.collective(contexts[-1], 1)
    for number in range(130):
        nccl.start(contexts[0], COLL, seqNumber=2, func=f"Function{number}")
    rows = operations(loaded.ring)
    assert rows["communicator_id"].to_list() == [None] + [0] * 130
    known = [f"Function{number}" for number in range(123)]  # 127 names, four of them used by the collective
    assert rows["function"].to_list() == ["AllReduce", *known, *[""] * 7]


def test_the_attempt_of_an_elastic_restart_has_a_folder_of_its_own(load):
    """Beside the rank's segments."""
    loaded = load(TORCHELASTIC_RESTART_COUNT=2)
    loaded.nccl.init(1, 2, 0)
    assert len(list((loaded.directory / "attempt-002").glob("nccl-*.ring"))) == 1
