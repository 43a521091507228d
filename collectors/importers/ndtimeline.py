"""Importers of veScale's NDTimeline: its raw log and the Chrome trace its timeline handler writes.

In: `timeline_run*_raw.log` lines or a JSON list of complete events. Out: a `Trace`. A metric that fuses several
transfers (`forward-send-backward-recv`) becomes one op per transfer with the same times. Microbatch and chunk are not
in these files.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.text import quoted
from tracekit.collectors.merge.record_times import FUSED_TRANSFERS, cut_steps
from tracekit.trace.canonical import UNIT_KEY, Trace
from tracekit.trace.model import Layout, OpKind, TimeUnit

#: Metric -> op kinds, where it is not the name of the kind itself.
METRICS: dict[str, tuple[OpKind, ...]] = {
    **FUSED_TRANSFERS,
    "unshard-all-gather": (OpKind.PARAMS_ALL_GATHER,),
    "params-all-gather-nonoverlapping": (OpKind.PARAMS_ALL_GATHER,),
    "grad-reduce-scatter": (OpKind.GRADS_REDUCE_SCATTER,),
    "grads-reduce-scatter-nonoverlapping": (OpKind.GRADS_REDUCE_SCATTER,),
    "grad-all-reduce": (OpKind.ALL_REDUCE,),
    **{str(kind): (kind,) for kind in OpKind},
}
_STEP_TAG = "_inner_global_step"
_LINE = re.compile(
    r"metric_name: (?P<metric>.+?), elapsed: .+?, recent_elapsed_raw_parts: (?P<durations>\[.*?\]),"
    r" recent_since_start_raw_parts: (?P<starts>\[.*?\]), tags: (?P<tags>\[.*\]),"
    r" step_range: range\((?P<first>-?\d+), (?P<last>-?\d+)\), world_info: WorldInfo: TopoInfo\((?P<place>[^)]*)\)"
)
_FIELD = re.compile(r"(\w+)=(\d+)")
_SCHEMA = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "dp_rank": pl.Int32,
    "pp_rank": pl.Int32,
    "tp_rank": pl.Int32,
    "kind": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}


class _TimedMetric(NamedTuple):
    """One timed metric. `place`: step, rank, dp_rank, pp_rank, tp_rank; `start_s`: seconds since the epoch."""

    metric: str
    place: tuple[int, ...]
    start_s: float
    duration_s: float


def read_raw_log(path: Path) -> Trace:
    """The trace; sizes are in the log. Raises FormatError with the line that cannot be read."""
    sizes: dict[str, int] = {}
    events = list(_raw_events(path, sizes))
    if not events:
        raise FormatError(f"{path}: no line with a metric; expected lines with `metric_name: forward-compute, ...`")
    job = Layout(
        dp=sizes.get("dp_size", 1),
        pp=sizes.get("pp_size", 1),
        tp=sizes.get("tp_size", 1),
        world_size=sizes.get("world_size", 0),
    )
    return _trace(events, job, path, "ndtimeline", TimeUnit.S)


def read_trace_file(path: Path) -> Trace:
    """The trace; sizes are the largest ranks seen. Raises FormatError with the event that cannot be read."""
    events = list(_chrome_events(path))
    if not events:
        raise FormatError(f"{path}: no complete event (ph X) with rank, step and pp in its args")
    _, _, dp, pp, tp = (1 + max(numbers) for numbers in zip(*(event.place for event in events), strict=True))
    return _trace(events, Layout(dp=dp, pp=pp, tp=tp), path, "ndtimeline-chrome", TimeUnit.US)


def _raw_events(path: Path, sizes: dict[str, int]) -> Iterator[_TimedMetric]:
    """Parse the events of a raw log; fill `sizes` with its parallel sizes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if "metric_name: " not in line:
                continue
            match = _LINE.search(line)
            if match is None:
                raise FormatError(f"{path}, line {number}: cannot be read: {line.strip()[:80]!r}; delete the torn line")
            place = {field: int(value) for field, value in _FIELD.findall(match["place"])}
            sizes.update({field: value for field, value in place.items() if field.endswith("size")})
            yield from _line_events(match, place, f"{path}, line {number}")


def _line_events(match: re.Match[str], place: dict[str, int], where: str) -> Iterator[_TimedMetric]:
    """Return one event per part; parts without a step tag are spread evenly over the step range."""
    try:
        durations, starts, tags = (ast.literal_eval(match[part]) for part in ("durations", "starts", "tags"))
        first, last = int(match["first"]), int(match["last"])
        if not len(durations) == len(starts) == len(tags):
            raise FormatError(
                f"{where}: {len(durations)} durations, {len(starts)} starts and {len(tags)} tags; expected one of each"
            )
        steps = [tag.get(_STEP_TAG) for tag in tags]
        if durations and None in steps:
            per_step, rest = divmod(len(durations), max(1, last - first))
            if rest or last <= first:
                raise FormatError(f"{where}: {len(durations)} parts do not spread evenly over the steps {first}:{last}")
            steps = [first + position // per_step for position in range(len(durations))]
        ranks = [place[name] for name in ("rank", "dp_rank", "pp_rank", "tp_rank")] if durations else []
        for step, start, duration in zip(steps, starts, durations, strict=True):
            yield _TimedMetric(match["metric"], (int(step), *ranks), float(start), float(duration))
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{where}: damaged ({quoted(error)}); delete the line") from None


def _chrome_events(path: Path) -> Iterator[_TimedMetric]:
    try:
        events: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not JSON ({error}); the file may be truncated: copy or record it again") from None
    for number, event in enumerate(events):
        try:
            if event.get("ph") != "X":
                continue
            args = event["args"]
            name, place = str(event["name"]), (args["step"], args["rank"], event["pid"], args["pp"], args["tp"])
            start_s, duration_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
            yield _TimedMetric(name, tuple(map(int, place)), start_s, duration_s)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"{path}, event {number}: damaged ({quoted(error)}); expected name, ts, dur, pid, args"
            ) from None


def _trace(events: list[_TimedMetric], layout: Layout, path: Path, form: str, unit: TimeUnit) -> Trace:
    """Build ops of the tensor-parallel rank 0 of each worker; count other metrics in the metadata."""
    rows = []
    other: Counter[str] = Counter()
    for event in events:
        kinds = METRICS.get(event.metric, ())
        step, *_, tp_rank = event.place
        if tp_rank or step < 0:
            continue
        if not kinds:
            other[event.metric] += 1
        start_ns = round(event.start_s * 1e9)
        end_ns = start_ns + round(event.duration_s * 1e9)
        rows += [(*event.place, str(kind), start_ns, end_ns) for kind in kinds]
    if not rows:
        raise FormatError(f"{path}: none of its metrics is an op kind tracekit knows: {', '.join(sorted(other)[:8])}")
    null = pl.lit(None, pl.Int32)
    ops = pl.DataFrame(rows, schema=_SCHEMA, orient="row").with_columns(microbatch=null, chunk=null)
    ops, step_starts_ns = cut_steps(ops)
    return Trace.from_frame(
        ops,
        layout,
        name=path.stem,
        step_starts={step: start_ns / 1e9 for step, start_ns in step_starts_ns.items()},
        metadata={"format": form, UNIT_KEY: str(unit), "framework": "veScale", "other_metrics": dict(other)},
        source=str(path),
    )
