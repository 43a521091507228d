"""Parts of the pages Job and Compare besides findings: sections, and why one GPU of a recording waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import polars as pl
from dash import ClientsideFunction, Input, Output, clientside_callback, dcc, html
from dash.development.base_component import Component

from tracekit.base.text import NO_NAME, printable, seconds, three_digits
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.components import (
    GAP_BEGINS,
    GPU_REASONS,
    Folded,
    attributes,
    figure_panel,
    figure_parts,
    folded,
    folded_panel,
    halves,
    href,
    note,
    panel,
    row_table,
)
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.browser.ui.figures import memory_over_time, rank_times
from tracekit.dashboards.figures.charts import picture
from tracekit.dashboards.words import figure_columns
from tracekit.report.hardware import GpuInReport, MemoryPoint, NamedTime, OpTime, Synchronisation
from tracekit.report.report import Report
from tracekit.report.tables import Picture, Series, ShareGrid, Table, frame_of

#: Shorter times, seconds, would read 0 us.
SHORTEST_S = 0.5e-6
#: Reasons shown unfolded, names listed for each, and rows of changes.
MOST_REASONS, MOST_NAMES, MOST_CHANGES = 3, 2, 12
#: Characters of a name that fits everywhere.
SHORT_NAME = 20
#: Cells of a row of a table: what it is about, then figures as text and anything else as a component.
Row = tuple[Any, ...]
#: Most columns of a table that fits into half of a page.
NARROW = 5


def gpu_panels(stored: Stored, report: Report, rank: str, q: str) -> list[Component]:
    """One GPU: the only one; of several, that of `rank`, else of the culprit, else the one that idles least. `q`: the
    filter of names.
    """
    gpus = report.gpu_of_ranks
    if not gpus:
        return []
    chosen = [rank, *(str(culprit.rank) for culprit in report.answer.culprits)]
    by_rank = {str(gpu.rank): gpu for gpu in gpus}
    gpu = next((by_rank[number] for number in chosen if number in by_rank), min(gpus, key=lambda gpu: gpu.idle_s))
    heads, calls = ("Call", "Where", "Times", "Waits", "Idle after", "Without them saves"), gpu.synchronisations
    return [
        _idle(gpu, _rank_links(stored, gpus, gpu)),
        _kernels_and_ops(gpu, q),
        folded_panel(
            "Calls that wait, copies, launches",
            _table("Calls that wait for the GPU", heads, map(_call, calls)),
            halves([_copies(gpu), note("Exposed: while no kernel runs.")], _launches(gpu)),
        ),
        *_memory(gpu),
    ]


def gpu_changes(before: Report, after: Report) -> list[Component]:
    """The work of one GPU in a step before and after, the largest change first."""
    if not (before.gpu and after.gpu):
        return []
    sides = _each_step(before), _each_step(after)
    return [panel(title, _changed(title, sides[0][title], sides[1][title])) for title in sides[0]]


def _rank_links(stored: Stored, gpus: Sequence[GpuInReport], current: GpuInReport) -> list[Any]:
    links = [
        html.B(f"rank {other.rank}", **attributes(aria_current="true"))
        if other is current
        else dcc.Link(f"rank {other.rank}", href=href("/job", job=stored.name, rank=other.rank))
        for other in gpus
    ]
    return links if len(gpus) > 1 else []


def _table(label: str, heads: Sequence[str], rows: Iterable[Row]) -> Component:
    """A table with figures to the right. `label`: its content, for screen readers."""
    cells: list[list[Any]] = [
        [cell if i and isinstance(cell, str) else html.Td(cell, className="what") for i, cell in enumerate(row)]
        for row in rows
    ]
    figures = [column for column in range(1, len(heads)) if any(isinstance(row[column], str) for row in cells)]
    return row_table(heads, cells, label, figures) if cells else note("None.")


def _name(text: str | None) -> Component:
    """A name of any length: its first line, and all of it while it has the focus."""
    label = printable(text) if text and text.strip() else "-"
    return html.Div(label, className="name", tabIndex=0, title=label) if len(label) > SHORT_NAME else html.Div(label)


def _time_and_share(gpu: GpuInReport, spent_s: float) -> tuple[str, str]:
    """A time, and its share of the recording."""
    return seconds(spent_s), f"{spent_s / (gpu.recording_s or 1.0):.1%}"


def _reason(reason: str) -> str:
    return GPU_REASONS.get(reason, reason)


def _idle(gpu: GpuInReport, ranks: list[Any]) -> Component:
    """The busy time of the GPU, and its idle time between ops by reason."""
    parts = {
        "busy": gpu.busy_s,
        "idle between its ops": gpu.idle_s,
        "before its first op": gpu.before_first.seconds,
        "after its last op": gpu.after_last_s,
    }
    times = ", ".join("{} {} ({})".format(name, *_time_and_share(gpu, spent)) for name, spent in parts.items())
    notes = [f"Of {seconds(gpu.recording_s)} recorded on rank {gpu.rank}: {times}. Shares are of the recording."]
    if began := sorted(gpu.idle_opened_by.items(), key=lambda entry: -entry[1]):
        notes.append(f"Gaps began with {', '.join(f'{GAP_BEGINS.get(kind, kind)} {seconds(s)}' for kind, s in began)}.")
    rows = [
        (_reason(idle.reason), *_time_and_share(gpu, idle.seconds), f"{idle.gaps:,}", _longest(idle.names[:MOST_NAMES]))
        for idle in gpu.idle_by_reason
        if idle.seconds >= SHORTEST_S
    ]
    title, heads = "Why the GPU is idle", ("Why", "Idle", "Share", "Gaps", "Longest")
    tables = [_table(title, heads, rows[:MOST_REASONS])]
    if more := rows[MOST_REASONS:]:
        tables.append(folded(f"{len(more)} more", _table(f"{title}, further reasons", heads, more)))
    return panel(title, *map(note, notes), *tables, *_before_first(gpu), extra=ranks or None)


def _before_first(gpu: GpuInReport) -> list[Component]:
    """The time before the first op of the GPU."""
    before = gpu.before_first
    reasons = sorted(before.by_reason.items(), key=lambda reason: -reason[1])
    rows = [(_reason(why), *_time_and_share(gpu, spent)) for why, spent in reasons if spent >= SHORTEST_S]
    table = _table("Before the first op of the GPU", ("Why", "Takes", "Share"), rows)
    title = f"Before its first op: {seconds(before.seconds)}"
    return [folded(title, halves(table, _longest(before.names)))] if rows else []


def _longest(names: Iterable[NamedTime]) -> Component:
    parts = []
    for time in names:
        if time.seconds >= SHORTEST_S:
            words = dict.fromkeys(filter(None, (time.name or NO_NAME, time.where)))
            parts += [html.Dt(seconds(time.seconds)), html.Dd(_name(", ".join(words)))]
    return html.Dl(parts, className="longest")


def _kernels_and_ops(gpu: GpuInReport, q: str) -> Component:
    """Kernels and operators by name, and the field that filters both."""
    kernels = [
        (
            _name(kernel.name),
            html.Span(kernel.of_class, className="badge"),
            f"{kernel.count:,}",
            *_time_and_share(gpu, kernel.seconds),
        )
        for kernel in gpu.kernels
    ]
    operators = [
        (_name(op.name), _name(op.module), _shapes(op), f"{op.gpu_ops:,}", *_time_and_share(gpu, op.seconds))
        for op in gpu.ops
    ]
    search = dcc.Input(id="names-q", value=q, type="search", placeholder="name, class, module", className="field")
    status = html.Span(id="names-said", role="status")
    tables = [
        _table("Kernels", ("Kernel", "Class", "Times", "GPU time", "Share"), kernels),
        _table("Operators", ("Operator", "Module", "Shapes", "GPU ops", "GPU time", "Share"), operators),
    ]
    field = html.Div([html.Label(["Filter", search]), status], className="filter")
    title = f"{len(kernels)} kernels and {len(operators)} operators"
    return folded_panel(title, field, html.Div(tables, id="names"), opened=bool(q))


def _shapes(op: OpTime) -> Component:
    """The sizes of the inputs of an operator, folded."""
    items = []
    for shape in op.shapes:
        rates = (("flops_s", "Tflop/s"), ("bytes_s", "TB/s"))
        facts = [f"{shape.count:,} x", seconds(shape.seconds)]
        facts += [f"{three_digits(rate / 1e12)} {unit}" for key, unit in rates if (rate := getattr(shape, key))]
        facts += [f"at the card's peak {seconds(shape.roofline_s)}"] if shape.roofline_s else []
        items.append(html.Li(f"{printable(shape.dims)} {printable(shape.dtype)}: {', '.join(facts)}"))
    return Folded(children=[html.Summary(f"{len(items)}"), html.Ul(items)]) if items else html.Div("-")


def _call(call: Synchronisation) -> Row:
    name = f"{call.call} in {call.op}" if call.op else call.call
    times = (call.blocked_s, call.idle_after_s, call.saves_s)
    words = ("-" if spent is None else seconds(spent) for spent in times)
    line = html.Div(_name(call.where.rpartition("/")[2]), title=printable(call.where))
    return (_name(name), line, f"{call.count:,}", *words)


def _copies(gpu: GpuInReport) -> Component:
    rows = [
        (
            f"{printable(copy.kind)}{', pageable' if copy.pageable else ''}",
            f"{copy.count:,}",
            f"{copy.bytes:,}",
            seconds(copy.seconds),
            seconds(copy.exposed_s),
        )
        for copy in gpu.transfers
    ]
    return _table("Copies", ("Copies", "Times", "Bytes", "Takes", "Exposed"), rows)


def _memory(gpu: GpuInReport) -> Iterator[Component]:
    if (memory := gpu.memory) is not None:
        summary = f"At most {memory.peak_bytes / 1e9:.3g} GB given out, {memory.reserved_bytes / 1e9:.3g} GB kept"
        given_out = memory_over_time(memory)
        yield folded_panel(
            given_out.title,
            *figure_parts(
                picture(given_out, viewer().theme).update_yaxes(rangemode="tozero"),
                label="Memory of the GPU over the recording",
                table=frame_of(memory.points, MemoryPoint),
            ),
            note(f"{summary}. The largest of each of {len(memory.points)} intervals is drawn."),
        )


def _launches(gpu: GpuInReport) -> Component:
    launch = gpu.launch
    rows = [
        ("calls that launch", f"{launch.calls:,}", seconds(launch.call_s)),
        ("kernels", f"{launch.kernels:,}", seconds(launch.kernel_s)),
        ("kernels shorter than 10 us", f"{launch.short_kernels:,}", seconds(launch.short_s)),
    ]
    return _table("Launches", ("Launches", "Times", "Takes"), rows)


def _each_step(report: Report) -> dict[str, dict[str, float]]:
    """Seconds of a step by name, under the title of their table."""
    gpu, steps = report.gpu, report.steps_in_whole
    assert gpu, "asked for reports on one GPU"
    idle = {_reason(part.reason): part.seconds for part in gpu.idle_by_reason}
    tables = {
        "What the GPU did": {"busy": gpu.busy_s, "before its first op": gpu.before_first.seconds, **idle},
        "Findings, and what each takes": {
            f"{finding.name}: {_reason(finding.reason)}": finding.seconds for finding in gpu.findings
        },
        "Kernels that changed": {kernel.name: kernel.seconds for kernel in gpu.kernels},
    }
    return {title: {name: spent / steps for name, spent in rows.items()} for title, rows in tables.items()}


def _changed(title: str, before: dict[str, float], after: dict[str, float]) -> Component:
    """A table of what changed most; a name that one side does not tell has a dash there."""
    change = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in before | after}
    rows = [
        (
            _name(name),
            *(seconds(side[name]) if name in side else "-" for side in (before, after)),
            f"{'+' if change[name] > 0 else ''}{seconds(change[name])}",
        )
        for name in sorted(change, key=lambda name: -abs(change[name]))[:MOST_CHANGES]
        if abs(change[name]) >= SHORTEST_S
    ]
    return _table(title, (title, "Before", "After", "Change"), rows)


clientside_callback(
    ClientsideFunction("tables", "filterNames"), Output("names-said", "children"), Input("names-q", "value")
)


def ranks_picture(stored: Stored, report: Report) -> list[Component]:
    """The GPU time of each rank, if recorded."""
    ranks: list[dict[str, Any]] = msgspec.to_builtins(report.by_rank or [])
    if not ranks or "compute_s" not in ranks[0]:
        return []
    if report.gpu:
        ranks = [ranks[0] | {"before_first_s": report.gpu.before_first.seconds}]
    times = rank_times(ranks)
    table, csv = pl.DataFrame(ranks, infer_schema_length=None), href("/download/by_rank.csv", job=stored.name)
    label = "Time of each rank's GPU that was computing, exposed communication, or idle"
    return [figure_panel(times.title, picture(times, viewer().theme), label=label, table=table, csv=csv)]


def pictures_of_sections(report: Report) -> list[Component]:
    """The metrics of culprits over those of their peers, and the pictures among the sections, each with its figures."""
    return [
        figure_panel(part.title, picture(part, viewer().theme), label=_label(part), table=_figures(part))
        for part in report.pictures
    ]


def _label(part: Picture) -> str:
    """A picture in words."""
    if isinstance(part, ShareGrid):
        return f"{part.unit} over the mean, {part.down} by {part.across}"
    if isinstance(part, Series):
        return part.note or f"{', '.join(line.name for line in part.lines)} over {part.axis}"
    return "; ".join(part.notes) or part.title


def _figures(part: Picture) -> pl.DataFrame:
    if isinstance(part, ShareGrid):
        columns = zip(*part.values, strict=True)
        return pl.DataFrame({part.down: part.rows, **dict(zip(part.columns, columns, strict=True))}, strict=False)
    if isinstance(part, Series):
        band = {} if part.usual is None else {"low": part.usual.low, "high": part.usual.high}
        return pl.DataFrame({part.axis: part.places} | {line.name: line.values for line in part.lines} | band)
    rows = [(part.rows[bar.row], part.legend[bar.what].name, bar.start_s, bar.end_s, bar.words) for bar in part.bars]
    return pl.DataFrame(rows, ["row", "what", "start_s", "end_s", "words"], orient="row")


def sections(stored: Stored, report: Report) -> list[Component]:
    """The tables of the report, folded if they are of its kind; of one GPU without those that compare ranks."""
    alone = bool(report.gpu)
    tables = [
        html.Div(_section_table(section), className="half" if len(section.heads) <= NARROW else "whole")
        for section in report.tables_of_sections
        if len(section.rows) > alone and not section.title.startswith("GPU ")
    ]
    if not tables:
        return []
    tables_row = html.Div(tables, className="row")
    return [tables_row if stored.kind.folded is None else folded_panel(stored.kind.folded, tables_row)]


def _section_table(section: Table) -> Component:
    table = row_table(section.heads, section.rows, section.title, figure_columns(section.rows))
    return panel(section.title, table, note(section.note) if section.note else None)
