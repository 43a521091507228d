"""Whether the times of a rank can be those of one clock: what no GPU does says that they are not.

In: a recording. Out: sentences on ranks whose times contradict each other. Idle time, its reasons and what a fix saves
are differences of such times, so nothing of them is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.analysis.gpu.trust import NOISE_S
from tracekit.analysis.numeric.codes import numbered
from tracekit.base.text import code_name, counted, seconds
from tracekit.trace.gpu_activity import Activity
from tracekit.trace.gpu_recording import GpuRecording

#: Ops of a stream run in the order of their launches; in no recording that was looked at does a single one overtake.
_LARGEST_SHARE = 0.01
#: No GPU has more work queued than this, seconds.
_LONGEST_QUEUE_S = 10.0


def contradictions(recording: GpuRecording) -> Iterator[str]:
    """Yield what the times of each rank contradict."""
    yield from _longer_than_all(recording)
    yield from _overtaking(recording)
    yield from _far_behind(recording)


def _longer_than_all(recording: GpuRecording) -> Iterator[str]:
    """Kernels without a launch that last longer than all that has one."""
    launched = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    rest = pl.concat([table.select("rank", "start", "duration") for table in (recording.calls, launched)])
    rest = rest.group_by("rank").agg(rest_s=(pl.col("start") + pl.col("duration")).max() - pl.col("start").min())
    others = recording.gpu_ops.filter(pl.col("launch").is_null() & pl.col("activity").eq(str(Activity.KERNEL)))
    longer = others.join(rest, on="rank").filter(pl.col("duration") > pl.col("rest_s"))
    for (rank,), kernels in longer.group_by("rank", maintain_order=True):
        longest = kernels.sort("duration", descending=True)
        yield (
            f"rank {rank}: {counted(kernels.height, 'kernel')} such as {code_name(str(longest['name'][0]))} last"
            f" {seconds(longest['duration'][0])}, longer than all that was recorded from launch to end"
            f" ({seconds(longest['rest_s'][0])}): whether its GPU is idle meanwhile cannot be told"
        )


def _overtaking(recording: GpuRecording) -> Iterator[str]:
    """GPU ops that run before one of their stream that was launched earlier."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    launched = recording.calls["start"].gather(ops["launch"]).to_numpy()
    start, rank = ops["start"].to_numpy(), ops["rank"].to_numpy()
    stream = numbered(ops["rank"], ops["device"], ops["stream"])
    order = np.lexsort((start, launched, stream))
    later = (np.diff(stream[order]) == 0) & (np.diff(launched[order]) > 0)
    before = rank[order][1:][later & (np.diff(start[order]) < -NOISE_S)]
    for number, count in zip(*np.unique(before, return_counts=True), strict=True):
        if count > _LARGEST_SHARE * (rank == number).sum():
            yield (
                f"rank {number}: {counted(int(count), 'GPU op')} ran before one of the same stream that was launched"
                " earlier: its times are of several clocks, so neither idle time nor its reasons can be told"
            )


def _far_behind(recording: GpuRecording) -> Iterator[str]:
    """GPUs that begin what was launched only when the host had long finished."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    calls = recording.calls.with_columns(end=pl.col("start") + pl.col("duration"))
    behind = ops.select("rank", behind_s=pl.col("start") - calls["end"].gather(ops["launch"]))
    hosts = calls.group_by("rank").agg(host_s=pl.col("end").max() - pl.col("start").min())
    least = behind.group_by("rank").agg(pl.col("behind_s").min()).join(hosts, on="rank").sort("rank")
    far = pl.col("behind_s") > pl.max_horizontal(pl.lit(_LONGEST_QUEUE_S), "host_s")
    for rank, behind_s, host_s in least.filter(far).iter_rows():
        yield (
            f"rank {rank}: its GPU begins every op at least {seconds(behind_s)} after the launch, in a recording of"
            f" {seconds(host_s)}: the clocks of host and GPU differ, so what its GPU waits for cannot be told"
        )
