"""The first line on a post-training run, for every output.

In: an `RlAccount`. Out: the kind of the leading loss, and a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.rl.account import WORTH, Loss, RlAccount
from tracekit.base.text import percent
from tracekit.trace.post_training import TRAINER_WAIT

_LOSSES: dict[Loss, str] = {
    "queueing": "waiting for a free slot of an engine",
    "tail": "the tail",
    "engines": "the imbalance of engines",
    "tools": "waiting for tools",
    "reward": "the reward",
    "sync": "the weight sync",
}


def first_line(account: RlAccount) -> tuple[str, str]:
    """The kind of the first line, that of a `Verdict`, and its sentence: the leading loss, else the longest phase of a
    log; or the time that is in no phase, if that is more.
    """
    if account.flagged:
        return "contradiction", account.flagged
    kind, lost_s, words = "balanced", 0.0, f"no loss costs {percent(WORTH)} of the step"
    if account.leading is not None:
        kind, lost_s = account.leading, max(one.lost_s for one in account.losses)
        words = f"{_LOSSES[account.leading]} costs {percent(lost_s / account.step_s)} of the step"
    elif account.job.basis == "phases" and account.phases:
        kind, lost_s = "phases", account.phases[0].seconds
        words = _phase_words(account.phases[0].phase, lost_s / account.step_s)
    unknown_s = account.unaccounted_s or 0.0
    if unknown_s > lost_s and unknown_s >= WORTH * account.step_s:
        kind, words = (
            "unaccounted",
            f"{percent(unknown_s / account.step_s)} of the step is in no phase; time what it does",
        )
    return kind, words + "".join(f"; {more}" for more in _more(account)) + _saves(account)


#: What to say of a phase that is neither generation nor training, and what to do about it.
_PHASES = {
    TRAINER_WAIT: ("the trainer waits for rollouts", ""),
    "validation": ("validation takes", ": validate less often, or beside the training"),
    "checkpoint": ("saving checkpoints takes", ": save less often, or asynchronously"),
}


def _phase_words(phase: str, share: float) -> str:
    words, do = _PHASES.get(phase, (f"{phase} takes", ""))
    return f"{words} {percent(share)} of the step{do}"


def _more(account: RlAccount) -> Iterator[str]:
    """What else belongs into the first line: the side that is short of GPUs, what steps differ by, and tools."""
    if account.sides is not None and account.sides.short_of_gpus:
        yield account.sides.short_of_gpus
    if account.unlike is not None and account.unlike.worst:
        yield account.unlike.worst
    if account.tools is not None and (account.tools.share or 0.0) >= WORTH:
        yield f"tools cost at most {percent(account.tools.share or 0.0)} of the run"


def _saves(account: RlAccount) -> str:
    """The alternative that saves most, if that is certain to save time, and worth mentioning."""
    certain = [one for one in account.what_if if one.high_s is not None and one.high_s < account.step_s]
    best = max(certain, key=lambda price: price.saved_s or 0.0, default=None)
    if best is None or not best.saved_s or best.saved_s < account.step_s / 100:
        return ""
    least, most = ((account.step_s - (bound or 0.0)) / account.step_s for bound in (best.high_s, best.low_s))
    saves = percent(most) if percent(least) == percent(most) else f"{round(least * 100)} to {percent(most)}"
    age = best.oldest_sample_steps
    steps = "one step" if age == 1 else f"{age} steps"
    aged = "" if age is None else f", oldest sample {steps} old"
    name = "one step of staleness" if best.scenario == "staleness=1" else best.scenario
    return f"; {name} saves {saves}{aged}"
