"""How every number of the first screen is computed: the formula with its symbols, and with the figures filled in.

In: a `Report`. Out: rows for `whatif --explain`. T(x) is the mean step time of replay x, or how long a recording takes
in it; docs/method.md defines the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.base.text import counted, error_of, of_whole, percent_sure, seconds, three_digits
from tracekit.report.conclusions import Finding, Fix
from tracekit.report.report import Report
from tracekit.report.verdict import LossKind

_SURE_OF = "how sure it is that this cause exists where it is named, not a share of the loss"


def explanations(report: Report, gpu_hour: float | None = None) -> Iterator[tuple[str, str]]:
    """The name of each number on the screen or in formulas, and how it was computed."""
    if report.has_workers:
        yield from _times(report)
    yield from _loss(report, gpu_hour)
    leading = report.leading
    if leading is not None:
        yield from _cause(leading)
        yield from _headline(report, leading)
        fix = report.first_fix
        if fix is not None and fix.withheld is None:
            yield from _price(report, fix)
    yield from _trust(report)
    if report.has_workers:
        yield from _pictures(report)


def _times(report: Report) -> Iterator[tuple[str, str]]:
    found, steps = report.step_time_s, report.job.steps
    yield "T(recorded)", f"{seconds(found.recorded)}, the mean of {counted(steps, 'recorded step')}"
    yield (
        "T(original)",
        f"{seconds(found.original)}, the replay of what each op costs itself, without waiting and launch delays",
    )
    yield (
        "T(ideal)",
        (
            f"{seconds(found.ideal)}, the same replay with every compute at the mean and every transfer at the"
            " median of its kind"
        ),
    )
    yield "T(kept)", f"{seconds(found.with_delays or 0.0)}, the replay of T(original) with launch delays kept"
    yield "S", f"T(original) / T(ideal) = {report.slowdown_text}; 1.1 or more is straggling"
    parts = report.verdict.parts
    yield (
        "Rest",
        (
            f"T(original) - T(ideal) = {seconds(parts.lost_s)}, less {seconds(parts.explained_s)} of named causes and"
            f" {seconds(parts.noise_s)} of noise = {seconds(parts.unexplained_s)} a step; mentioned from 2% and three"
            f" standard errors ({seconds(parts.error_s)}) on"
        ),
    )


def _loss(report: Report, gpu_hour: float | None) -> Iterator[tuple[str, str]]:
    """Cost, and the share in the headline."""
    verdict, gpus = report.verdict, report.job.gpus
    if not verdict.lost_s > 0:
        return
    base, base_s = "the longer of T(recorded) and T(kept)", verdict.lost_s / verdict.share
    loss, whole = verdict.losses[0], of_whole(report.job.whole)
    if verdict.of_mean_ops:
        how = "T(original) - T(ideal)"
    elif loss.kind is LossKind.COMMUNICATION and not loss.causes:
        how = "T(original) - T(original, communication takes no time)"
    elif not report.has_workers and loss.causes and report.findings[loss.causes[0]].where.ranks:
        how = "T(kept) - T(kept, this rank at the pace of its peers)"
    elif report.job.whole == "recording" and loss.causes:
        how = "what the first cause costs, see Cause"
    else:
        how = "T(kept) - T(kept, without the named causes)"
        if len(verdict.losses) > 1:
            how = f"the most of {how} and what one kind of loss costs"
    yield "Lost", f"{how} = {seconds(verdict.lost_s)} {whole}"
    yield "Share", f"lost / {base} = {seconds(verdict.lost_s)} / {seconds(base_s)} = {verdict.share:.1%}"
    if not report.daily:
        return
    yield (
        "GPU-hours",
        (
            f"share x GPUs x 24 h = {verdict.share:.1%} x {gpus:,} x 24 ="
            f" {three_digits(verdict.lost_gpu_hours_per_day)} a day"
        ),
    )
    if gpu_hour is not None:
        lost = verdict.lost_gpu_hours_per_day
        yield "Money", f"GPU-hours x price = {three_digits(lost)} x {gpu_hour:g} = {lost * gpu_hour:,.0f} a day"


def _cause(cause: Finding) -> Iterator[tuple[str, str]]:
    """Why, and how certain."""
    yield "Why", f"{cause.effect}: {'; '.join(figure.words for figure in cause.evidence)}"
    ratios = [((figure.value or 0.0) / figure.needed, figure) for figure in cause.evidence if figure.needed > 0]
    ratio, weakest = min(ratios, key=lambda each: each[0], default=(1.0, None))
    if weakest is not None and 1 - float(0.5**ratio) == cause.confidence:
        yield (
            "Sure",
            (
                f"1 - 0.5^r = {percent_sure(cause.confidence)} (never more than 99%), r = {ratio:.2f}: how far the"
                f" weakest figure, {weakest.name}, is above its threshold; {_SURE_OF}"
            ),
        )
    else:
        yield (
            "Sure",
            f"{percent_sure(cause.confidence)}, what this cause's rule gives for the figures above; {_SURE_OF}",
        )


def _headline(report: Report, leading: Finding) -> Iterator[tuple[str, str]]:
    """What the first line gives as the cost of the leading cause, alone and with the other causes of its kind."""
    verdict, whole = report.verdict, report.job.whole
    whole_s = verdict.lost_s / verdict.share
    if not leading.priced:
        yield "Cause", f"{seconds(verdict.lost_s)} of it as recorded; no replay tells what would change it"
        return
    if leading.saves_step_s is not None:
        yield "Cause", f"T(no profiler) - T(no profiler, without this cause) = {leading.saves_step_s.words} a step"
        return
    yield "Cause", f"T(kept) - T(kept, without this cause) = {_of(leading.saved_s, whole_s, whole)}"
    loss = next(loss for loss in verdict.losses if loss.causes)
    if len(loss.causes) > 1 and report.has_workers:
        yield (
            "Causes",
            f"T(kept) - T(kept, without all {len(loss.causes)} of its kind) = {_of(loss.explained_s, whole_s, whole)}",
        )


def _of(saved_s: float, whole_s: float, whole: str) -> str:
    return f"{seconds(saved_s)} {of_whole(whole)}, {saved_s / whole_s:.1%} of it"


def _price(report: Report, fix: Fix) -> Iterator[tuple[str, str]]:
    """What the fix saves."""
    gpus, whole = report.job.gpus, report.job.whole
    new_step_s, saved_s = fix.new_step_s or 0.0, fix.saved_s or 0.0
    whole_s = new_step_s + saved_s
    if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
        yield (
            "Saves",
            (
                f"T(no profiler) - T(no profiler, {fix.title[:1].lower()}{fix.title[1:]}) = {fix.saves_step_s.words} of"
                f" a step of {seconds(fix.unprofiled_step_s)}; 90 %: what recording cost, and the scatter of the steps"
            ),
        )
        return
    yield (
        "Saves",
        (
            f"T(kept) - T(kept, {fix.title[:1].lower()}{fix.title[1:]}) = {seconds(saved_s)} {of_whole(whole)}; the"
            f" {whole} then takes {seconds(whole_s)} - saving = {seconds(new_step_s)}"
        ),
    )
    yield (
        "Error",
        (
            f"replay error x T(recorded) + half the 95% interval of the mean saving, from blocks of steps ="
            f" {error_of(saved_s, fix.error_s)}"
        ),
    )
    if report.daily:
        yield (
            "Given back",
            (
                f"saving / {whole} x GPUs x 24 h = {saved_s / whole_s:.1%} x {gpus:,} x 24 ="
                f" {three_digits(fix.saved_gpu_hours_per_day or 0.0)} GPU-hours a day"
            ),
        )


def _trust(report: Report) -> Iterator[tuple[str, str]]:
    trust = report.trust
    yield (
        "Replay",
        f"|T(kept) - T(recorded)| / T(recorded) = {trust.replay_error or 0.0:.2%}; more than 5% is not trusted",
    )
    if report.rl:
        return
    yield (
        "Delays",
        (
            f"T(recorded) / T(original) - 1 = {trust.discrepancy or 0.0:.2%}, what launch delays add;"
            f" {trust.unexplained or 0.0:.2%} of it no cause explains; more than 5% is not trusted"
        ),
    )


def _pictures(report: Report) -> Iterator[tuple[str, str]]:
    worker = (report.by_worker or [])[0]
    yield (
        "Map",
        (
            "S alone = T(ideal, this worker as recorded) / T(ideal); largest: worker"
            f" ({worker.dp_rank},{worker.pp_rank}), {worker.slowdown:.3f}"
        ),
    )
    step = max(report.by_step, key=lambda row: row.slowdown or 0.0)
    yield (
        "Steps",
        (
            f"S of a step = its original / its ideal time; largest: step {step.step},"
            f" {seconds(step.original_s)} / {seconds(step.ideal_s)} ="
            f" {step.slowdown or 0.0:.3f}"
        ),
    )
