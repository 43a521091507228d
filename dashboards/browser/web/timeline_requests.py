"""Data for the timeline in the browser: spans as binary columns, one op in words, the slowest as a table, a file.

In: requests under /timeline/ with the parameters of the page. Out: answers made from `StepOps`; a status and one line
for errors. A binary answer is a uint32 length, that many bytes of JSON, then the arrays that it lists, each [type,
offset from the end of the JSON, items], little-endian and aligned to 8 bytes.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flask
import numpy as np
import numpy.typing as npt
import polars as pl
from dash import Dash

from tracekit.analysis.numeric.arrays import Ints
from tracekit.base.errors import NotStoredError, SelectionError
from tracekit.base.text import LONGEST_NAME, counted, cut, printable, seconds
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.view_state import OpName, TimelineState, read_state, state_of
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.web.serving import csv_file, file_stem
from tracekit.dashboards.figures.lanes import LANE_OP, StreamOps
from tracekit.dashboards.figures.spans import (
    PathSpans,
    Replay,
    StepOps,
    Window,
    count,
    overview,
    path_spans,
    slowest,
    spans,
    sums,
)
from tracekit.trace.model import KINDS, OpKind, Worker

#: Up to this many spans, the browser gets all of them at once; above, only those in its window.
WHOLE_SPANS = 200_000
OVERVIEW_ROWS, OVERVIEW_COLUMNS = 64, 600
MOST_COLUMNS, MOST_ROWS = 16_384, 1_024
SLOWEST_SHOWN, SLOWEST_IN_CSV = 50, 10_000
#: Most workers named in the description of a critical path.
NAMED_ON_PATH = 3
#: Most arrows of an op.
MOST_ARROWS = 256


class _TimelineView:
    """The subject of a request: a job, the state in the parameters, and the ops of its step, which have peers."""

    def __init__(self, stored: Stored, state: TimelineState, ops: StepOps) -> None:
        self.stored, self.state, self.ops = stored, state, ops
        self.by_worker = results().by_worker(stored.name)
        self.about = self.by_worker.select(
            pl.col("dp_rank", "pp_rank", "rank").cast(pl.Int64), pl.col("host").cast(pl.String), "slowdown"
        )
        self.workers: Ints = self.state.ordered(self.ops, self.by_worker)
        cells = pl.DataFrame({name: getattr(self.ops, name)[self.workers] for name in ("dp_rank", "pp_rank")})
        #: Rank, host and exact S of the workers shown, in their order.
        self.facts = cells.join(self.about, on=["dp_rank", "pp_rank"], how="left", maintain_order="left").with_columns(
            pl.col("slowdown").fill_null(1.0), pl.col("host").fill_null("")
        )
        self.rows = self.state.rows(self.ops, self.workers, self.facts["host"].to_list())
        self.lines = self.state.lines(self.ops)

    def header(self) -> dict[str, Any]:
        """The fields with which the browser names ops and rows."""
        return {"kinds": list(map(str, KINDS))}

    def is_tall(self, stream: str) -> bool:
        """Whether a line of that stream has the full height."""
        return stream == "compute"

    def names_of(self, seq: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:  # noqa: ARG002 - they have kinds
        """The names of spans, where these are more than their kinds."""
        return {}

    def started_at(self) -> float | None:
        """The start of the step in seconds since the epoch, if known."""
        return results().job(self.stored.name).trace.step_starts.get(self.state.step)

    def op_words(self, name: OpName, op: int) -> tuple[str, list[list[str]]]:
        """The name of an op, and the rows of the side panel: label and value."""
        ops, kind, facts = self.ops, OpKind(name.kind), _facts_of(self, name.worker)
        ratio = float(ops.ratios(np.array([op]), Replay.RECORDED)[0])
        rows = [
            ["rank", facts[0]],
            ["host", facts[1]],
            ["worker", name.worker.coordinates],
            ["microbatch", str(ops.microbatch[op]) if ops.microbatch[op] >= 0 else "-"],
            ["chunk", str(ops.chunk[op]) if ops.chunk[op] >= 0 else "-"],
            ["number of its kind", str(name.seq)],
        ]
        for replay in Replay:
            start, duration = float(ops.start[replay][op]), float(ops.duration[replay][op])
            rows.append([f"{replay}: start", f"{start * 1e3:,.3f} ms"])
            rows.append([f"{replay}: duration", seconds(duration)])
            if kind.is_communication:
                rows.append(
                    [f"{replay}: waiting", seconds(min(max(duration - float(ops.cost[replay][op]), 0.0), duration))]
                )
        duration_name = "transfer" if kind.is_communication else "own time"
        peers = "none: most workers of the stage ran none" if np.isinf(ratio) else seconds(ops.median[kind.code])
        rows += [
            [f"{duration_name}, recorded", seconds(float(ops.cost[Replay.RECORDED][op]))],
            [f"{duration_name}, ideal", seconds(float(ops.cost[Replay.IDEAL][op]))],
            ["peer median", peers],
            ["ratio to peers", said_ratio(ratio)],
            ["launch delay", seconds(float(ops.launch_delay[op]))],
        ]
        if (started := self.started_at()) is not None:
            rows.append(["started", viewer().moment(started + float(ops.start[Replay.RECORDED][op]))])
        return name.kind, rows

    def slowest(self, most: int) -> pl.DataFrame:
        """The slowest ops of the view, with rank and host."""
        table = slowest(self.ops, self.workers, self.lines, self.state.window(1), most, self.state.find)
        joined = table.join(self.about, on=["dp_rank", "pp_rank"], how="left", maintain_order="left")
        return joined.select("dp_rank", "pp_rank", "rank", "host", *table.columns[2:])

    def listed(self, table: pl.DataFrame) -> dict[str, Any]:
        """The slowest ops of the view, as rows of text with the name of each op."""
        rows = [
            {
                "name": f"{row['dp_rank']},{row['pp_rank']},{row['kind']},{row['seq']}",
                "cells": [
                    f"dp {row['dp_rank']}, stage {row['pp_rank']}" if row["rank"] is None else f"rank {row['rank']}",
                    row["host"] or "-",
                    f"dp {row['dp_rank']}, stage {row['pp_rank']}",
                    row["kind"],
                    "-" if row["microbatch"] is None else str(row["microbatch"]),
                    f"{row['start_s'] * 1e3:,.3f} ms",
                    seconds(row["duration_s"]),
                    seconds(row["cost_s"]),
                    "-" if row["peer_median_s"] is None else seconds(row["peer_median_s"]),
                    "no peers" if row["ratio"] is None else said_ratio(row["ratio"]),
                    seconds(row["beyond_peers_s"]),
                    seconds(row["launch_delay_s"]),
                ],
            }
            for row in table.iter_rows(named=True)
        ]
        heads = ["Rank", "Host", "Worker", "Op kind", "Microbatch", "Start", "Duration", "Own time", "Peer median"]
        return {"heads": [*heads, "Ratio", "Beyond peers", "Launch delay"], "rows": rows}


class _StreamView(_TimelineView):
    """The same for a job whose ranks have streams and threads, all as recorded."""

    ops: StreamOps

    def header(self) -> dict[str, Any]:
        """The names of ops and ranks, and how many lines each row has, down to the last with an op."""
        ops, rows = self.ops, self.rows
        lane = ops.stream(np.arange(ops.first[-1]))
        line_of = {line.stream: number for number, line in enumerate(self.lines, 1)}
        number = np.array([line_of.get(stream, 1) for stream in ops.stream_names])[lane]
        last, used = np.maximum.reduceat(number, ops.first[:-1]), np.ones(rows.row[-1] + 1, np.int64)
        np.maximum.at(used, rows.row, last[rows.worker])
        return {"kinds": [LANE_OP], "names": ops.names, "roles": ops.roles, "used": used.tolist()}

    def is_tall(self, stream: str) -> bool:  # noqa: ARG002 - all are
        return True

    def names_of(self, seq: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:
        return {"name": self.ops.name[seq]}

    def started_at(self) -> float | None:
        return None

    def op_words(self, name: OpName, op: int) -> tuple[str, list[list[str]]]:  # noqa: ARG002 - its number says all
        return self.ops.names[self.ops.name[op]], self.ops.facts(op)

    def slowest(self, most: int) -> pl.DataFrame:
        """The longest: nothing has peers."""
        table = slowest(self.ops, self.workers, self.lines, self.state.window(1), most, self.state.find)
        return self.ops.described(table)

    def listed(self, table: pl.DataFrame) -> dict[str, Any]:
        """The longest ops of ranks, in the form of the slowest."""
        heads = ["Rank", "Track", "Kind", "Op", "Start", "Duration"]
        each_s, unit = (1e-3, "ms") if (table["start_s"] < 1).all() else (1.0, "s")
        rows = [
            {
                "name": f"{row['rank']},0,{LANE_OP},{row['seq']}",
                "cells": [
                    self.ops.who(row["rank"]),
                    *(cut(row[name], LONGEST_NAME) for name in ("on", "kind", "op")),
                    f"{row['start_s'] / each_s:,.3f} {unit}",
                    seconds(row["duration_s"]),
                ],
            }
            for row in table.iter_rows(named=True)
        ]
        return {"heads": heads, "rows": rows}


#: Who shows the ops of a step, by their kind.
_VIEWS: dict[type[StepOps], type[_TimelineView]] = {StepOps: _TimelineView, StreamOps: _StreamView}


def _view_of(args: Mapping[str, str], *, with_workers: bool = False) -> _TimelineView:
    """The job, state and ops of a request. Raises NotStoredError, SelectionError for an invalid state."""
    stored = analysed(args.get("job", ""), with_workers=with_workers)
    read = state_of(results(), stored.name, args)
    if read.remarks:
        raise SelectionError(read.remarks[0])
    ops = results().step(stored.name, read.state.step)
    return _VIEWS[type(ops)](stored, read.state, ops)


def analysed(name: str, *, with_workers: bool = False) -> Stored:
    """Return the job of that name. Raises NotStoredError if there is none, or it was stored without an analysis, or has
    no workers but must.
    """
    stored = results().stored(name)
    if stored.report is None or (with_workers and stored.lacking):
        raise NotStoredError(f"the job {name!r:.100} {stored.lacking}")
    return stored


def serve_timeline(app: Dash) -> None:
    """Add the routes that the page Timeline uses."""
    for path, answer in (
        ("check", _check),
        ("layout", _layout),
        ("spans", _spans),
        ("path", _path),
        ("op", _op),
        ("sums", _sums),
        ("slowest", _slowest),
        ("slowest.csv", _slowest_csv),
        ("export.json.gz", _export),
    ):
        app.server.add_url_rule(
            f"/timeline/{path}", f"timeline_{path}", lambda answer=answer: answer(flask.request.args)
        )


def packed(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Encode a binary answer as described in the docstring of this module."""
    places, parts, offset = {}, [], 0
    for name, values in arrays.items():
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
        places[name] = [values.dtype.name, offset, values.size]
        parts.append(data + bytes(-len(data) % 8))
        offset += len(parts[-1])
    text = json.dumps({**header, "arrays": places}).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def _binary(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> flask.Response:
    return flask.Response(packed(header, arrays), mimetype="application/octet-stream")


def _check(args: Mapping[str, str]) -> flask.Response:
    """Return the problem with the typed state, as an answer and not as a failure; null if it is valid."""
    name = analysed(args.get("job", "")).name
    read = state_of(results(), name, args)
    return flask.jsonify({"problem": read.remarks[0] if read.remarks else None})


def _layout(args: Mapping[str, str]) -> flask.Response:
    """Return the tracks: rows top to bottom, lines of each, begin and end of the view, and the overview."""
    view = _view_of(args)
    ops, workers, rows_shown = view.ops, view.workers, view.rows
    leaders, place_of = rows_shown.leaders(), np.full(ops.workers, -1)
    place_of[workers] = np.arange(len(workers))
    facts = view.facts[place_of[leaders]]
    hosts, groups = (
        {name: i for i, name in enumerate(dict.fromkeys(values))} for values in (facts["host"], rows_shown.group)
    )
    started = view.started_at()
    spans_shown = count(ops, rows_shown.worker, view.lines)
    rows = max(1, min(OVERVIEW_ROWS, len(workers)))
    picture = overview(ops, workers, view.lines[0].replay, rows, OVERVIEW_COLUMNS)
    header = {
        "step": ops.step,
        "started_at": None if started is None else viewer().moment(started),
        "begins": ops.begin(),
        "ends": {str(name): ops.end(name) for name in ops.start},
        "lines": [[str(line.replay), line.stream, view.is_tall(line.stream)] for line in view.lines],
        **view.header(),
        "spans": spans_shown,
        "whole": spans_shown <= WHOLE_SPANS,
        "hosts": list(hosts),
        "groups": list(groups),
        "pinned": rows_shown.pinned,
        "workers": len(workers),
        "overview": [rows, OVERVIEW_COLUMNS, view.lines[0].replay],
    }
    return _binary(
        header,
        {
            "dp_rank": ops.dp_rank[leaders].astype(np.int32),
            "pp_rank": ops.pp_rank[leaders].astype(np.int32),
            "rank": facts["rank"].fill_null(-1).to_numpy().astype(np.int32),
            "host": np.array([hosts[host] for host in facts["host"]], np.int32),
            "group": np.array([groups[group] for group in rows_shown.group], np.int32),
            "members": np.bincount(rows_shown.row).astype(np.int32),
            "slowdown": facts["slowdown"].to_numpy().astype(np.float32),
            "picture": picture.ravel(),
        },
    )


def _spans(args: Mapping[str, str]) -> flask.Response:
    """Return the spans of the pinned rows and of those from `first` to before `last`, or of all if they are few."""
    view = _view_of(args)
    pinned, rows, window = view.rows.pinned, len(view.rows.group), None
    first, last = pinned, rows
    if count(view.ops, view.rows.worker, view.lines) > WHOLE_SPANS:
        first = _number(args, "first", pinned, rows)
        last = _number(args, "last", first, rows)
        if last - first > MOST_ROWS:
            raise SelectionError(f"{last - first} rows at once; expected at most {MOST_ROWS}")
        columns = _number(args, "columns", 1, MOST_COLUMNS)
        longest = max(map(view.ops.end, view.ops.start))
        window = view.state.window(columns) or Window(view.ops.begin(), longest, columns)
    workers, row = view.rows.part(first, last)
    boxes = spans(view.ops, workers, view.lines, window, row)
    header = {
        "first_row": first,
        "rows": last - first,
        "window": None if window is None else [window.start_s, window.end_s, window.columns],
    }
    names = ("first", "start", "duration", "wait", "ratio", "covers", "seq", "microbatch", "kind")
    return _binary(header, {name: getattr(boxes, name) for name in names} | view.names_of(boxes.seq))


def _path(args: Mapping[str, str]) -> flask.Response:
    """Return the critical path of the first replay shown, with the positions of its ops in the view."""
    view = _view_of(args, with_workers=True)
    ops, replay = view.ops, view.lines[0].replay
    path = path_spans(results().replay(view.stored.name), ops, replay)
    line = _line_of(view, path.op, replay)
    row = np.where(line < 0, -1, view.rows.of_workers(ops.workers)[path.worker]).astype(np.int32)
    header = {"words": _path_words(view, path, replay)}
    arrays: dict[str, npt.NDArray[Any]] = {"row": row, "line": line, "start": path.start}
    arrays["duration"] = path.duration.astype(np.float32)
    return _binary(header, arrays)


def _line_of(view: _TimelineView, ops: Ints, replay: Replay) -> npt.NDArray[np.int32]:
    """The line of each op in its row; -1 where its stream is not shown."""
    line_of = {line.stream: index for index, line in enumerate(view.lines) if line.replay is replay}
    return np.array([line_of.get(name, -1) for name in view.ops.stream_names], np.int32)[view.ops.stream(ops)]


def _path_words(view: _TimelineView, path: PathSpans, replay: Replay) -> str:
    """Describe the critical path: time share by worker, then launch delays."""
    spent = np.bincount(path.worker, weights=path.duration, minlength=view.ops.workers)
    length_s = max(view.ops.end(replay), 1e-12)
    first = [worker for worker in np.argsort(-spent, kind="stable")[:NAMED_ON_PATH].tolist() if spent[worker] > 0]
    shares = [f"{_worker_name(view, worker)} {spent[worker] / length_s:.0%}" for worker in first]
    more = int((spent > 0).sum()) - len(first)
    others = [f"{more:,} other workers {(spent.sum() - spent[first].sum()) / length_s:.0%}"] if more else []
    delays = f"launch delays {max(1 - spent.sum() / length_s, 0):.0%}"
    return f"Critical path, {replay}: {', '.join([*shares, *others, delays])} of {seconds(length_s)}."


def _worker_name(view: _TimelineView, index: int) -> str:
    worker = Worker(int(view.ops.dp_rank[index]), int(view.ops.pp_rank[index]))
    rank, _ = _facts_of(view, worker)
    return worker.coordinates if rank == "-" else f"rank {rank}"


def _number(args: Mapping[str, str], name: str, low: int, high: int) -> int:
    """Parse an integer in that range. Raises SelectionError."""
    text = args.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise SelectionError(f"{name}={text!r:.40}; expected a number from {low} to {high}")
    return int(text)


def _op(args: Mapping[str, str]) -> flask.Response:
    view = _view_of(args)
    name = view.state.op
    op = None if name is None else view.ops.find(name.worker.dp_rank, name.worker.pp_rank, name.kind, name.seq)
    if name is None or op is None:
        raise SelectionError(f"op={args.get('op', '')!r:.60} names no op of step {view.state.step}")
    title, rows = view.op_words(name, op)
    return flask.jsonify({"name": str(name), "title": title, "rows": rows, "arrows": _arrows(view, op)})


def _arrows(view: _TimelineView, op: int) -> list[list[list[float]]]:
    """The dependencies of the op, each as [row, line, seconds] of both ends; at most `MOST_ARROWS`.

    An op whose stream is not shown is drawn on the first line.
    """
    ops, replay = view.ops, view.lines[0].replay
    ends, time = ops.arrows(op, replay)
    ends, time = ends[:MOST_ARROWS], time[:MOST_ARROWS]
    row = view.rows.of_workers(ops.workers)[ops.worker_of(ends)]
    line = np.maximum(_line_of(view, ends, replay), 0)
    return np.stack([row, line, time], axis=2)[(row >= 0).all(axis=1)].tolist()


def _sums(args: Mapping[str, str]) -> flask.Response:
    """The sums by kind of the range that is selected, or of the window, as rows of text."""
    view = _view_of(args)
    state, workers = view.state, len(view.workers)
    window = state.window(1) or Window(view.ops.begin(), view.ops.end(view.lines[0].replay), 1)
    if state.range_ms is not None:
        window = Window(state.range_ms[0] / 1e3, state.range_ms[1] / 1e3, 1)
    totals = sums(view.ops, view.workers, view.lines, window, state.find)
    scope = counted(workers, view.stored.kind.timeline.who)
    worker_s = (window.end_s - window.start_s) * max(workers, 1)
    rows = [[kind, f"{ops:,}", seconds(total), f"{total / worker_s:.0%}"] for kind, ops, total in totals.iter_rows()]
    words = f" that match {cut(printable(state.find), LONGEST_NAME)!r}" if state.find else ""
    title = (
        f"{totals['ops'].sum():,} ops{words} of {scope}, {window.start_s * 1e3:,.3f} to {window.end_s * 1e3:,.3f} ms"
    )
    return flask.jsonify({"title": title, "heads": ["Kind", "Ops", "Total", "Share"], "rows": rows})


def said_ratio(ratio: float) -> str:
    """Describe the ratio to the peers in words."""
    if np.isinf(ratio):
        return "no peers"
    return f"{ratio:.2f} x" if ratio < 1000 else "over 1,000 x"


def _facts_of(view: _TimelineView, worker: Worker) -> tuple[str, str]:
    row = view.by_worker.filter((pl.col("dp_rank") == worker.dp_rank) & (pl.col("pp_rank") == worker.pp_rank))
    if row.is_empty():
        return "-", "-"
    rank, host = row["rank"][0], row["host"][0]
    return "-" if rank is None else str(rank), host or "-"


def _slowest(args: Mapping[str, str]) -> flask.Response:
    """The slowest ops of the view, as rows of text with the name of each op."""
    view = _view_of(args)
    return flask.jsonify(view.listed(view.slowest(SLOWEST_SHOWN)))


def _slowest_csv(args: Mapping[str, str]) -> flask.Response:
    return csv_file("slowest-ops", _view_of(args).slowest(SLOWEST_IN_CSV))


def _export(args: Mapping[str, str]) -> flask.Response:
    """The timeline of the step for ui.perfetto.dev, as `tracekit store export` writes it."""
    stored = analysed(args.get("job", ""), with_workers=True)
    steps, workers = (results().table(stored.name, table) for table in ("by_step", "by_worker"))
    read = read_state({"step": args.get("step", "")}, steps, workers)
    if read.remarks:
        raise SelectionError(read.remarks[0])
    with tempfile.TemporaryDirectory(prefix="tracekit.") as folder:
        path = Path(folder) / "timeline.json.gz"
        results().job(stored.name).export(path, steps=[read.state.step])
        file = path.open("rb")  # stays readable when the folder goes
    name = file_stem(stored.name)
    return flask.send_file(
        file, mimetype="application/gzip", as_attachment=True, download_name=f"{name}-step-{read.state.step}.json.gz"
    )
