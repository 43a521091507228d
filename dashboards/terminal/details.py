"""One job in detail: every table, cause and fix behind its answer, how each number is computed, culprits, plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.analysis.graph import Posting
from tracekit.base.text import (
    cost_alone,
    counted,
    error_of,
    of_whole,
    percent,
    percent_sure,
    seconds,
    short,
    sure,
    three_digits,
)
from tracekit.dashboards.terminal.tables import (
    LARGEST_MAP,
    labelled,
    merged_map,
    new_table,
    section_panel,
    section_table,
    side_by_side,
    slowdown_text,
    steps_line,
)
from tracekit.dashboards.words import cost_words, fix_table, published_difference, worker_label
from tracekit.report.conclusions import Culprit, Finding, Fix
from tracekit.report.questions import Optimum, change_text
from tracekit.report.report import Report
from tracekit.report.tables import Contribution
from tracekit.report.tables import Table as TableOfReport

if TYPE_CHECKING:
    from tracekit.analysis.job.history import History

#: The number of rows in a table that names culprits.
_TOP = 8
#: Workers or a stage count as the culprit from this share of the loss on.
_CULPRIT_SHARE = 0.3
_POSTED = {
    Posting.EARLY: "ahead of the computes before them",
    Posting.ANY_DIRECTION: "behind the previous compute of any direction",
    Posting.BATCHED: "in batches between computes, which wait for them",
    Posting.RECORDED: "in the order in which the host asked and waited, as recorded",
}

_SURE_OF = "how sure it is that this cause exists where it is named, not a share of the loss"

_LONGEST_HOST = 28


def print_details(report: Report, console: Console) -> None:
    """Print all evidence behind the answer."""
    if report.by_worker:
        grid = report.worker_grid()
        if (worker_map := merged_map(grid.slowdown, grid.dp_ranks, LARGEST_MAP[0])) is not None:
            console.print(Padding(worker_map, (0, 0, 1, 0)))
        console.print(Padding(steps_line(report, max(console.width - 60, 10)), (0, 0, 1, 0)))
    if parts := [section_panel(part, console) for part in report.parts]:
        console.print(Padding(side_by_side(parts, console), (0, 0, 1, 0)))
    console.print(_causes(report))
    console.print(section_table(fix_table(report)))
    if report.by_worker:
        console.print()
        console.print(Text("Method", style="bold underline"))
        console.print(Padding(labelled(_figures(report)), (0, 0, 1, 0)))
        stages = {str(row.pp_rank): row for row in report.by_pp_rank or ()}
        dp_ranks = {str(row.dp_rank): row for row in report.by_dp_rank or ()}
        panels = [_op_kinds(report), _sets("Stage", stages), _sets("DP rank", dp_ranks), _workers(report)]
        console.print(side_by_side(panels, console))


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """The figures of the published method, and what was inferred."""
    times, trust, verdict = report.step_time_s, report.trust, report.verdict
    yield "S", f"{report.slowdown_text}: the step takes as many times as long as if every op took its ideal time"
    original = f"original (launch delays removed) {seconds(times.original)}"
    yield "Step time", f"recorded {seconds(times.recorded)}, {original}, ideal {seconds(times.ideal)}"
    hours = verdict.lost_gpu_hours
    lost = "" if hours is None else f"{three_digits(hours)} GPU-hours in these steps, "
    yield "Lost", f"{lost}{verdict.share:.1%} of the time"
    if report.straggling:
        yield "Loss", _location_words(report)
    figures = f"replay error {trust.replay_error or 0.0:.2%}, launch delays add {trust.discrepancy or 0.0:.1%}"
    if clamped := (trust.clamped_transfers or 0) + (trust.clamped_delays or 0):
        figures += f"; {clamped:,} transfers or delays more than 10 ms below zero taken as 0: ops overlapped"
    yield "Replay", figures
    yield "Receives", _posting(report)
    if instead := published_difference(report):
        yield "Published", f"the published method says {instead}"


def _posting(report: Report) -> str:
    """The inferred bound of the start of a receive; empty if it is the published rule."""
    posting = report.posting
    if not posting or posting.rule is Posting.SAME_DIRECTION:
        return ""
    if posting.rule is Posting.RECORDED:
        return f"posted {_POSTED[posting.rule]}"
    return f"posted {_POSTED[posting.rule]} ({posting.obeyed:.1%} of {posting.telling:,} ops that tell)"


def _location_words(report: Report) -> str:
    """The shares of the loss due to few workers and to the last stage, the larger first."""
    rows = report.worker_grid().rows
    slowest = report.slowest_workers or []
    workers = ", ".join(worker_label(rows[worker]) for worker in slowest[:3])
    more = len(slowest) - 3
    workers_text = workers + (f" and {more} more" if more > 0 else "")
    few, last = report.m_w or 0.0, report.m_s or 0.0
    shares = [(few, f"idealising {workers_text} gives back {percent(few)} of the loss (M_W)")]
    if len(report.by_pp_rank or ()) > 1:
        shares.append((last, f"idealising the last stage gives back {percent(last)} (M_S)"))
    shares.sort(reverse=True)
    line = ", ".join(text for _, text in shares)
    if shares[0][0] >= _CULPRIT_SHARE:
        return line
    largest = max(shares[0][0], 0.0)
    return f"no few workers: idealising the slowest workers or the last stage gives back at most {percent(largest)}"


def _op_kinds(report: Report) -> Table:
    table = new_table("Op kind", "Slowdown", "if ideal", "on path")
    on_path = {row.kind: row.recorded_s for row in report.critical_path}
    for row in report.by_kind[:_TOP]:
        share = percent(on_path.get(row.kind, 0.0) / report.step_time_s.recorded)
        table.add_row(str(row.kind), slowdown_text(row.slowdown or 0.0), change_text(row.saved_s or 0.0), share)
    return table


def _sets(head: str, rows: Mapping[str, Contribution]) -> Table:
    """S of each stage or DP rank by its number, the costliest first."""
    table = new_table(head, "Slowdown", "if ideal")
    worst = sorted(rows.items(), key=lambda row: row[1].slowdown or 0.0, reverse=True)[:_TOP]
    for number, row in worst:
        saved = "" if row.saved_s is None else change_text(row.saved_s)
        table.add_row(number, slowdown_text(row.slowdown or 0.0), saved)
    return table


def _workers(report: Report) -> Table:
    rows = report.by_worker or []
    has_hosts = any(row.host is not None for row in rows)
    table = new_table("Rank", *(("host",) if has_hosts else ()), "(dp,pp)", "Slowdown", "on path")
    on_path = {(row.dp_rank, row.pp_rank): row.recorded_s for row in report.critical_workers or ()}
    for row in rows[:_TOP]:
        host = (Text(short(row.host or "")),) if has_hosts else ()
        share = percent(on_path.get((row.dp_rank, row.pp_rank), 0.0) / report.step_time_s.recorded)
        table.add_row(str(row.rank), *host, str(row.worker), slowdown_text(row.slowdown), share)
    return table


def _causes(report: Report) -> RenderableType:
    """What is wrong, where, since when, how certain, on what evidence, what to check next."""
    lines: list[RenderableType] = [Text("Causes", style="bold underline")]
    for number, (cause, place) in enumerate(zip(report.findings, report.answer.places, strict=True), 1):
        line = Text().append(cause.title, style="bold")
        line.append(f"  {place}" if cause.priced or cause.where_text != "whole job" else "")
        if cause.priced:
            line.append(f", {cause.when}, {sure(cause.confidence)}: {cost_words(cause)}")
            if cause.saved_when_acting_s is not None:
                line.append(f", {seconds(cause.saved_when_acting_s)} in each of those steps")
        lines.append(_hanging_indent(f" {number}.", line))
        for name, text in (("because", cause.effect), ("check", cause.next_check)):
            if text:
                lines.append(_hanging_indent(f"    {name:<7}", Text(text), style="dim"))
    return Group(*lines, Text())


def _hanging_indent(head: str, text: Text, style: str = "") -> RenderableType:
    """`head`, then `text`, with all its lines indented to the same column."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(head, text, style=style)
    return grid


def explanations(report: Report, gpu_hour: float | None = None) -> dict[str, str]:
    """The computation of each number on the screen or in formulas, by its name.

    T(x) is the mean step time of replay x, or how long a recording takes in it; docs/method.md defines the rest.
    """
    rows = {**_times(report), **_loss(report, gpu_hour)}
    if report.leading_finding is not None:
        rows |= _cause(report.leading_finding) | _headline(report, report.leading_finding)
        if report.first_fix is not None and report.first_fix.withheld is None:
            rows |= _price(report, report.first_fix)
    return rows | _trust(report) | _pictures(report)


def _times(report: Report) -> dict[str, str]:
    if not report.by_worker:
        return {}
    times, parts = report.step_time_s, report.verdict.parts
    return {
        "T(recorded)": f"{seconds(times.recorded)}, the mean of {counted(report.job.steps, 'recorded step')}",
        "T(original)": f"{seconds(times.original)}, the replay of what each op costs itself, without waiting and launch"
        " delays",
        "T(ideal)": f"{seconds(times.ideal)}, the same replay with every compute at the mean and every transfer at the"
        " median of its kind",
        "T(kept)": f"{seconds(times.with_delays or 0.0)}, the replay of T(original) with launch delays kept",
        "Method": f"S = T(original) / T(ideal) = {report.slowdown_text}; 1.1 or more is straggling",
        "Rest": f"T(original) - T(ideal) = {seconds(parts.lost_s)}, less {seconds(parts.explained_s)} of named causes"
        f" and {seconds(parts.noise_s)} of noise = {seconds(parts.unexplained_s)} a step; mentioned from 2% and three"
        f" standard errors ({seconds(parts.error_s)}) on",
    }


def _loss(report: Report, gpu_hour: float | None) -> dict[str, str]:
    verdict, gpus, hours = report.verdict, report.job.gpus, report.verdict.lost_gpu_hours_per_day
    if not verdict.lost_s > 0:
        return {}
    base, base_s = "the longer of T(recorded) and T(kept)", verdict.lost_s / verdict.share
    rows = {
        "Lost": f"{verdict.formula or 'as diagnosed'} = {seconds(verdict.lost_s)} {of_whole(report.job.whole)}",
        "Share": f"lost / {base} = {seconds(verdict.lost_s)} / {seconds(base_s)} = {verdict.share:.1%}",
    }
    if not report.daily or hours is None:
        return rows
    lost = three_digits(hours)
    rows["GPU-hours"] = f"share x GPUs x 24 h = {verdict.share:.1%} x {gpus:,} x 24 = {lost} a day"
    if gpu_hour is not None:
        rows["Money"] = f"GPU-hours x price = {lost} x {gpu_hour:g} = {hours * gpu_hour:,.0f} a day"
    return rows


def _cause(cause: Finding) -> dict[str, str]:
    sure = f"{percent_sure(cause.confidence)}, what this cause's rule gives for the figures above"
    why = f"{cause.effect}: {'; '.join(figure.words for figure in cause.evidence)}"
    return {"Why": why, "Sure": f"{sure}; {_SURE_OF}"}


def _headline(report: Report, leading: Finding) -> dict[str, str]:
    """The cost of the leading cause on the first line, alone and with the other causes of its kind."""
    verdict, whole = report.verdict, report.job.whole
    whole_s = verdict.lost_s / verdict.share
    if not leading.priced:
        return {"Cause": f"{seconds(verdict.lost_s)} of it as recorded; no replay tells what would change it"}
    if leading.saves_step_s is not None:
        return {"Cause": f"T(no profiler) - T(no profiler, without this cause) = {leading.saves_step_s.words} a step"}
    rows = {"Cause": f"T(kept) - T(kept, without this cause) = {_saving_words(leading.saved_s, whole_s, whole)}"}
    loss = next(loss for loss in verdict.losses if loss.causes)
    if len(loss.causes) > 1 and report.by_worker:
        together = _saving_words(loss.explained_s, whole_s, whole)
        rows["Causes"] = f"T(kept) - T(kept, without all {len(loss.causes)} of its kind) = {together}"
    return rows


def _saving_words(saved_s: float, whole_s: float, whole: str) -> str:
    return f"{seconds(saved_s)} {of_whole(whole)}, {saved_s / whole_s:.1%} of it"


def _price(report: Report, fix: Fix) -> dict[str, str]:
    whole, action = report.job.whole, f"{fix.title[:1].lower()}{fix.title[1:]}"
    if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
        return {
            "Saves": f"T(no profiler) - T(no profiler, {action}) = {fix.saves_step_s.words} of a step of"
            f" about {seconds(fix.unprofiled_step_s)}; 90 %: what recording cost, and the scatter of the steps"
        }
    new_step_s, saved_s = fix.new_step_s or 0.0, fix.saved_s or 0.0
    whole_s = new_step_s + saved_s
    rows = {
        "Saves": f"T(kept) - T(kept, {action}) = {seconds(saved_s)} {of_whole(whole)}; the {whole} then takes"
        f" {seconds(whole_s)} - saving = {seconds(new_step_s)}",
        "Error": "replay error x T(recorded) + half the 95% interval of the mean saving, from blocks of steps ="
        f" {error_of(saved_s, fix.error_s)}",
    }
    if report.daily:
        saved = three_digits(fix.saved_gpu_hours_per_day or 0.0)
        share = f"{saved_s / whole_s:.1%} x {report.job.gpus:,} x 24"
        rows["Given back"] = f"saving / {whole} x GPUs x 24 h = {share} = {saved} GPU-hours a day"
    return rows


def _trust(report: Report) -> dict[str, str]:
    """The replay error and, if a host launches, the cost of launch delays."""
    trust = report.trust
    error = f"|T(kept) - T(recorded)| / T(recorded) = {trust.replay_error or 0.0:.2%}; more than 5% is not trusted"
    if not trust.discrepancy:
        return {"Replay": error}
    delays = f"T(recorded) / T(original) - 1 = {trust.discrepancy or 0.0:.2%}, what launch delays add"
    unexplained = f"{trust.unexplained or 0.0:.2%} of it no cause explains; more than 5% is not trusted"
    return {"Replay": error, "Delays": f"{delays}; {unexplained}"}


def _pictures(report: Report) -> dict[str, str]:
    """The largest figures of map and steps."""
    if not report.by_worker:
        return {}
    worker, step = report.by_worker[0], report.worst_step
    return {
        "Map": "1 - T(ideal) / T(ideal, this worker as recorded); largest: worker"
        f" ({worker.dp_rank},{worker.pp_rank}), {cost_alone(worker.slowdown)}",
        "Steps": f"what goes with the causes, the rest as stragglers cost each step; most: step {step.step},"
        f" {seconds(step.lost_s or 0.0)} of {seconds(step.recorded_s)}",
    }


def print_culprits(culprits: Sequence[Culprit], console: Console) -> None:
    """Print each culprit with its node, what is slow, its cost per step, the confidence, and since when."""
    table = new_table("Rank", "host", "slow", "costs a step", "sure", "since")
    for culprit in culprits:
        table.add_row(
            f"worker ({culprit.dp_rank},{culprit.pp_rank})" if culprit.rank is None else str(culprit.rank),
            Text("unknown" if culprit.host is None else short(culprit.host)),
            culprit.part,
            seconds(culprit.cost_s),
            percent_sure(culprit.confidence),
            "-" if culprit.first_step is None else f"step {culprit.first_step}",
        )
    console.print(table)


def print_history(history: History, console: Console) -> None:
    """Print each host that computes slower than it used to, since when, and what that costs together."""
    from tracekit.analysis.job.history import FEWEST_WINDOWS

    if not history.slower:
        work = f"with the same work in {FEWEST_WINDOWS} windows"
        none = f"Of {counted(history.hosts, 'node')} {work}, none is slower than it was."
        console.print(none if history.hosts else f"There is no node {work}, so none could be compared.")
        return
    table = new_table("Host", "computes", "before", "change", "since")
    for node in history.slower:
        job = f" of {node.since_job}" if node.since_job != history.job else ""
        table.add_row(
            Text(short(node.host, _LONGEST_HOST)),
            seconds(node.now_s),
            seconds(node.before_s),
            f"{node.change:+.1%}",
            short(f"window {node.since_window}{job}", 24),
        )
    console.print(table)
    saved = three_digits(history.saved_gpu_hours_per_day)
    console.print(f"As fast as they used to be, the job would save {saved} GPU-hours a day.", soft_wrap=True)
    if history.all_slower:
        console.print("All became slower at once: compare their work first, such as the lengths of sequences.")


def print_optimum(optimum: Optimum, console: Console) -> None:
    """Print the answer, the plans, the settings of the best one, and the front."""
    from tracekit.analysis.job.best_plans import PLAN_HEADS, in_gb, moves_words, plan_row, sentence

    console.print(Text(sentence(optimum)))
    if optimum.plans:
        console.print()
        faster = [plan for plan in optimum.plans if plan.saved_s > 0] or optimum.plans[:1]
        console.print(section_table(TableOfReport("Plans", PLAN_HEADS, tuple(map(plan_row, faster)))))
        buckets = "; ".join(",".join(map(str, stage)) for stage in optimum.plans[0].buckets)
        rows = [("Buckets", f"{buckets} (layers of each, last first, by stage)")]
        rows += list(optimum.plans[0].settings.paste.items())
        console.print()
        console.print(labelled(rows))
    if optimum.front:
        console.print()
        rows_of_front = tuple(
            (in_gb(plan.memory_gb), seconds(plan.step_time_s), ",".join(map(str, plan.split)), plan.schedule,
             str(plan.microbatches))
            for plan in optimum.front
        )  # fmt: skip
        heads = ("memory", "step", "split", "schedule", "microbatches")
        console.print(section_table(TableOfReport("Front", heads, rows_of_front)))
    console.print()
    searched = f"{optimum.searched.replayed:,} of {optimum.searched.plans:,} plans replayed"
    moves = [("Or", words) for words in moves_words(optimum)]
    console.print(labelled([*moves, ("Searched", searched), *(("Note", note) for note in optimum.notes)]))
