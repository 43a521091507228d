"""The report on a post-training run in the terminal.

In: an `RlReport`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tracekit.analysis.rl.report import Generation, RlReport, headline
from tracekit.base.text import counted, percent, seconds, short, three_digits
from tracekit.show.terminal.tables import labelled, new_table, side_by_side

#: An engine that differs from the median speed by this share is mentioned.
_UNEVEN = 0.05


def print_rl(report: RlReport, name: str, console: Console) -> None:
    """Print the first line, what it rests on, and tables of phases, losses and prices."""
    job = report.job
    engines = f", {counted(job.trajectories, 'trajectory')} on {counted(job.engines, 'engine')}" if job.engines else ""
    console.print(Text(f"{short(name)}   {job.format}, {counted(job.steps, 'step')}{engines}"))
    console.print()
    console.print(Text(headline(report), style="bold"))
    console.print()
    console.print(labelled([("Step", _step(report)), *_fit(report.generation)]))
    console.print()
    phases = new_table("Phase", "a step", "share")
    for phase in report.phases:
        phases.add_row(short(phase.phase, 30), seconds(phase.seconds), percent(phase.seconds / report.step_s))
    if report.unaccounted_s is not None:
        phases.add_row("unaccounted", seconds(report.unaccounted_s), percent(report.unaccounted_s / report.step_s))
    losses = new_table("Loss", "costs a step", "share")
    for loss in report.losses:
        losses.add_row(loss.loss, seconds(loss.lost_s), percent(loss.lost_s / report.step_s))
    console.print(side_by_side([phases, losses] if report.losses else [phases], console))
    prices = new_table("What if", "step", "saved", "of the step", "oldest sample")
    notes: dict[str, list[str]] = {}
    for one in report.what_if:
        shown = short(one.scenario, 34)
        old = "-" if one.oldest_sample_steps is None else counted(one.oldest_sample_steps, "step")
        if one.step_s is None or one.saved_s is None:
            prices.add_row(shown, "-", "-", "-", "-")
        else:
            prices.add_row(shown, seconds(one.step_s), seconds(one.saved_s), percent(one.saved_s / report.step_s), old)
        for note in (one.assumes or "").split("; "):
            notes.setdefault(note, []).append(shown)
    console.print(prices)
    for note, scenarios in notes.items():
        if note and note != report.flagged:
            where = "" if len(scenarios) == len(report.what_if) else f"{', '.join(scenarios)}: "
            console.print(Text(f" {where}{note}"))


def _step(report: RlReport) -> str:
    parts = [f"{seconds(report.step_s)} {'from sync to sync' if report.trainer_wait_s is not None else 'as logged'}"]
    if report.generation_s is not None:
        parts.append(f"generation {seconds(report.generation_s)}")
    if report.trainer_wait_s is not None:
        parts.append(f"the trainer waits {seconds(report.trainer_wait_s)}")
    if report.staleness:
        parts.append(f"weights lag behind by {counted(report.staleness, 'step')}")
    if report.unaccounted_s is None:
        parts.append("the step is the sum of its phases, so lost time beside them is unknown")
    return "; ".join(parts)


def _fit(generation: Generation | None) -> list[tuple[str, str | None]]:
    if generation is None:
        return []
    slow = [
        f"{short(engine, 30)} at {three_digits(speed)} times the median speed"
        for engine, speed in sorted(generation.speeds.items(), key=lambda one: one[1])
        if abs(speed - 1) > _UNEVEN
    ]
    limit = "" if generation.slots is None else f"; {counted(generation.slots, 'slot')} an engine"
    return [
        (
            "Engines",
            f"a decoding step takes {three_digits(generation.base_s * 1e3)} ms +"
            f" {three_digits(generation.per_request_s * 1e3)} ms for each running request{limit}"
            + "".join(f"; {one}" for one in slow[:3])
            + (f" and {len(slow) - 3} more" if len(slow) > 3 else ""),
        ),
        ("Trust", f"the replayed generation differs from the recorded one by {abs(generation.error):.1%}"),
    ]
