"""The report on a post-training run in words, for the terminal and for its page.

In: an `RlReport`. Out: sentences with their subjects, and tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.rl.report import Generation, RlReport
from tracekit.base.text import counted, percent, seconds, short, three_digits
from tracekit.report.section import Table

#: An engine that differs from the median speed by this share is mentioned, and this many of them.
_UNEVEN, _MOST_NAMED = 0.05, 3


def sizes(report: RlReport) -> str:
    """What was analysed."""
    job = report.job
    on = f", {counted(job.trajectories, 'trajectory')} on {counted(job.engines, 'engine')}" if job.engines else ""
    return f"{job.format}, {counted(job.steps, 'step')}{on}"


def answer_rows(report: RlReport) -> Iterator[tuple[str, str]]:
    """What the first line rests on."""
    yield "Step", "; ".join(_step(report))
    if report.generation is not None:
        yield "Engines", "; ".join(_engines(report.generation))
    if (off := report.replay_error) is not None and not report.flagged:
        words = f"{'yes' if report.trusted else 'NO'}: the replayed step is off by {off:.1%}"
        if (made := report.generation) is not None:
            words += f", its generation by {abs(made.error):.1%}, engines' requests by up to {made.engine_error:.1%}"
        yield "Trust", words


def _step(report: RlReport) -> Iterator[str]:
    yield f"{seconds(report.step_s)} {'as logged' if report.trainer_wait_s is None else 'from sync to sync'}"
    if report.generation_s is not None:
        yield f"generation {seconds(report.generation_s)}"
    if report.trainer_wait_s is not None:
        yield f"the trainer waits {seconds(report.trainer_wait_s)}"
    if report.staleness:
        yield f"weights lag behind by {counted(report.staleness, 'step')}"
    if report.unaccounted_s is None:
        yield "logged as the sum of its phases, so time outside them is unknown"


def _engines(generation: Generation) -> Iterator[str]:
    base, more = (three_digits(value * 1e3) for value in (generation.base_s, generation.per_request_s))
    yield f"a decoding step takes {base} ms + {more} ms for each running request"
    if generation.slots is not None:
        yield f"{counted(generation.slots, 'slot')} an engine"
    uneven = sorted((speed, name) for name, speed in generation.speeds.items() if abs(speed - 1) > _UNEVEN)
    for speed, name in uneven[:_MOST_NAMED]:
        yield f"{short(name, 30)} at {three_digits(speed)} times the median speed"
    if len(uneven) > _MOST_NAMED:
        yield f"{len(uneven) - _MOST_NAMED} more are uneven"


def tables(report: RlReport) -> tuple[Table, Table, Table]:
    """Phases, losses and prices."""

    def row(name: str, value_s: float) -> tuple[str, str, str]:
        return name, seconds(value_s), percent(value_s / report.step_s)

    rest = [] if report.unaccounted_s is None else [row("unaccounted", report.unaccounted_s)]
    phases = (*(row(short(one.phase, 30), one.seconds) for one in report.phases), *rest)
    losses = tuple(row(one.loss, one.lost_s) for one in report.losses)
    return (
        Table("Phases", ("Phase", "a step", "share"), phases),
        Table("Losses", ("Loss", "costs a step", "share"), losses, None if losses else "not known"),
        _prices(report),
    )


def _prices(report: RlReport) -> Table:
    rows, notes = [], dict[str, list[str]]()
    for one in report.what_if:
        name = short(one.scenario, 34)
        old = "-" if one.oldest_sample_steps is None else counted(one.oldest_sample_steps, "step")
        if one.step_s is None or one.saved_s is None:
            rows.append((name, "-", "-", "-", "-"))
        else:
            share = percent(one.saved_s / report.step_s)
            rows.append((name, seconds(one.step_s), seconds(one.saved_s), share, old))
        for note in (one.assumes or "").split("; "):
            if note and note != report.flagged:
                notes.setdefault(note, []).append(name)
    said = (
        note if len(names) == len(rows) and len(rows) > 1 else f"{', '.join(names)}: {note}"
        for note, names in notes.items()
    )
    return Table(
        "Alternatives",
        ("What if", "step", "saved", "of the step", "oldest sample"),
        tuple(rows),
        ". ".join(said) or None,
    )
