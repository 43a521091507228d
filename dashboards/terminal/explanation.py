"""How every number of the first screen is computed: the formula with its symbols, and with the figures filled in.

In: a `Report`. Out: rows for `whatif --explain`. T(x) is the mean step time of replay x, or how long a recording takes
in it; docs/method.md defines the rest.
"""

from __future__ import annotations

from tracekit.base.text import cost_alone, counted, error_of, of_whole, percent_sure, seconds, three_digits
from tracekit.report.conclusions import Finding, Fix
from tracekit.report.report import Report
from tracekit.report.verdict import LossKind

_SURE_OF = "how sure it is that this cause exists where it is named, not a share of the loss"


def explanations(report: Report, gpu_hour: float | None = None) -> dict[str, str]:
    """How each number on the screen or in formulas was computed, by its name."""
    rows = {**_times(report), **_loss(report, gpu_hour)}
    if report.leading_finding is not None:
        rows |= _cause(report.leading_finding) | _headline(report, report.leading_finding)
        if report.first_fix is not None and report.first_fix.withheld is None:
            rows |= _price(report, report.first_fix)
    return rows | _trust(report) | _pictures(report)


def _times(report: Report) -> dict[str, str]:
    """The times of the replays of a pipeline."""
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
    """Cost, and the share in the headline."""
    verdict, gpus = report.verdict, report.job.gpus
    if not verdict.lost_s > 0:
        return {}
    base, base_s = "the longer of T(recorded) and T(kept)", verdict.lost_s / verdict.share
    rows = {
        "Lost": f"{_how_lost(report)} = {seconds(verdict.lost_s)} {of_whole(report.job.whole)}",
        "Share": f"lost / {base} = {seconds(verdict.lost_s)} / {seconds(base_s)} = {verdict.share:.1%}",
    }
    if not report.daily:
        return rows
    lost = three_digits(verdict.lost_gpu_hours_per_day)
    rows["GPU-hours"] = f"share x GPUs x 24 h = {verdict.share:.1%} x {gpus:,} x 24 = {lost} a day"
    if gpu_hour is not None:
        money = verdict.lost_gpu_hours_per_day * gpu_hour
        rows["Money"] = f"GPU-hours x price = {lost} x {gpu_hour:g} = {money:,.0f} a day"
    return rows


def _how_lost(report: Report) -> str:
    """The formula for the loss."""
    verdict, loss = report.verdict, report.verdict.losses[0]
    if verdict.of_mean_ops:
        return "T(original) - T(ideal)"
    if loss.kind is LossKind.COMMUNICATION and not loss.causes:
        return "T(original) - T(original, communication takes no time)"
    if not report.by_worker and loss.causes and report.findings[loss.causes[0]].where.ranks:
        return "T(kept) - T(kept, this rank at the pace of its peers)"
    if report.job.whole == "recording" and loss.causes:
        return "what the first cause costs, see Cause"
    how = "T(kept) - T(kept, without the named causes)"
    return how if len(verdict.losses) == 1 else f"the most of {how} and what one kind of loss costs"


def _cause(cause: Finding) -> dict[str, str]:
    """Why, and how certain."""
    ratios = [((figure.value or 0.0) / figure.needed, figure) for figure in cause.evidence if figure.needed > 0]
    ratio, weakest = min(ratios, key=lambda each: each[0], default=(1.0, None))
    sure = f"{percent_sure(cause.confidence)}, what this cause's rule gives for the figures above"
    if weakest is not None and 1 - float(0.5**ratio) == cause.confidence:
        sure = (
            f"1 - 0.5^r = {percent_sure(cause.confidence)} (never more than 99%), r = {ratio:.2f}: how far the weakest"
            f" figure, {weakest.name}, is above its threshold"
        )
    why = f"{cause.effect}: {'; '.join(figure.words for figure in cause.evidence)}"
    return {"Why": why, "Sure": f"{sure}; {_SURE_OF}"}


def _headline(report: Report, leading: Finding) -> dict[str, str]:
    """What the first line gives as the cost of the leading cause, alone and with the other causes of its kind."""
    verdict, whole = report.verdict, report.job.whole
    whole_s = verdict.lost_s / verdict.share
    if not leading.priced:
        return {"Cause": f"{seconds(verdict.lost_s)} of it as recorded; no replay tells what would change it"}
    if leading.saves_step_s is not None:
        return {"Cause": f"T(no profiler) - T(no profiler, without this cause) = {leading.saves_step_s.words} a step"}
    rows = {"Cause": f"T(kept) - T(kept, without this cause) = {_of(leading.saved_s, whole_s, whole)}"}
    loss = next(loss for loss in verdict.losses if loss.causes)
    if len(loss.causes) > 1 and report.by_worker:
        together = _of(loss.explained_s, whole_s, whole)
        rows["Causes"] = f"T(kept) - T(kept, without all {len(loss.causes)} of its kind) = {together}"
    return rows


def _of(saved_s: float, whole_s: float, whole: str) -> str:
    return f"{seconds(saved_s)} {of_whole(whole)}, {saved_s / whole_s:.1%} of it"


def _price(report: Report, fix: Fix) -> dict[str, str]:
    """What the fix saves."""
    whole, action = report.job.whole, f"{fix.title[:1].lower()}{fix.title[1:]}"
    if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
        return {
            "Saves": f"T(no profiler) - T(no profiler, {action}) = {fix.saves_step_s.words} of a step of"
            f" {seconds(fix.unprofiled_step_s)}; 90 %: what recording cost, and the scatter of the steps"
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
    """What the replay misses, and what launch delays add, where a host launches."""
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
