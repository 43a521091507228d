"""What costs a step of post-training time: losses within the generation, the reward, the weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.detectors.detector import FINDINGS, Candidate, Detector, Repair
from tracekit.analysis.evidence.subject import Cause, Plan
from tracekit.analysis.rl.rl_run import Scenario, Without, more_engines
from tracekit.base.text import percent, seconds, three_digits
from tracekit.report.finding import Figure, LossKind, Place, Unit, confidence_from

if TYPE_CHECKING:  # the replay of requests is imported for runs of post-training only
    from tracekit.analysis.evidence.rl_subject import RlSubject
    from tracekit.analysis.rl.timed import Generations
    from tracekit.report.rl_step import Loss

#: What any job can try, as an edit and its title; trainers wait for a tail less.
STALE = "staleness=1", "Generate the next samples while this step trains"


class RlLossThresholds(Struct, frozen=True):
    """How certain a loss of post-training is."""

    #: Least share of the step that a loss has to exceed, as what the replay misses. Chosen; `rl` finds planted losses
    #: with it.
    error: float = 0.01


RL_LOSSES = RlLossThresholds()


class _LossOfStep(Detector):
    """A loss of the account, as a finding. `edits`: its fixes as text, with their titles; {more}: more engines."""

    kind: ClassVar[Loss]
    edits: ClassVar[dict[str, str]] = {}

    def find(self, job: RlSubject) -> Iterator[Candidate]:
        lost_s = next((loss.lost_s for loss in job.account.losses if loss.loss == self.kind), 0.0)
        if not job.run.flagged and lost_s >= FINDINGS.smallest_cost_share * job.recorded_s:
            needed = max(job.replay_error, RL_LOSSES.error)
            figures = (Figure("part of the step", lost_s / job.recorded_s, needed, Unit.SHARE),)
            change, confidence = Without(self.kind), confidence_from(figures) if len(job.steps) > 1 else 0.0
            yield Candidate(self.kind, Place(), self.effect(job), figures, confidence, change)

    def effect(self, job: RlSubject) -> str:
        """Return how the loss shows, with its size."""
        return f"the {self.kind} takes {seconds(float(job.run.phases[self.kind].mean()))} of each step"

    def fixes(self, job: RlSubject, finding: Cause) -> Iterator[Plan]:
        yield from (structs.replace(plan, bound=True) for plan in super().fixes(job, finding))  # all of it goes away
        more = more_engines(job.account.job.engines)
        for edit, title in self.edits.items():
            yield alternative(job, edit.format(more=more), title.format(more=more), finding)


def alternative(job: RlSubject, edit: str, title: str, cause: Cause | None = None) -> Plan:
    """An alternative as a plan, with what its price assumes."""
    scenario = Scenario.parse(edit)
    price = job.run.price(scenario)
    age = price.oldest_sample_steps
    assumed = [*([f"samples up to {age} step{'s' * (age > 1)} old"] if age else []), *filter(None, [price.assumes])]
    details = {"assumes": "; ".join(assumed) or None, "oldest_sample_steps": age}
    kind = edit.partition("=")[0]
    return Plan(kind, title, Place(), scenario, details=details, cause=cause, around=True, edit=edit)


def _generations_of(job: RlSubject) -> Generations:
    assert job.run.generations is not None, "these losses show in requests"
    return job.run.generations


class Queueing(_LossOfStep):
    """Requests wait for a free slot of an engine.

    Such a wait ends when another request of the engine does; any other wait is no queue. Logs of responses that all
    reach the longest length allowed look like a tail and are this. Paper: no signature; its jobs are of pre-training.
    """

    kind = "queueing"
    loss = LossKind.QUEUEING
    title = "Requests wait for a free slot"
    signature = "requests that start when another one of their engine ends, long after they were submitted"
    refuted_by = "the generation takes as long with twice as many slots"
    next_check = "the engine's running and waiting requests, and its KV cache in use (vLLM: num_requests_waiting)"
    suggested_fix = "let engines run more requests at once (vLLM: max_num_seqs), or use more engines"
    repair = Repair("more-slots", "Run all requests at once", assumes="memory for all of them")
    edits: ClassVar = {"engines={more}": "Generate with {more} engines"}

    def effect(self, job: RlSubject) -> str:
        generations = _generations_of(job)
        waits = generations.ran.start - generations.ran.submit
        return f"requests wait {seconds(float(waits.mean()))} for a free slot, up to {seconds(float(waits.max()))}"


class Tail(_LossOfStep):
    """A few long responses keep a generation from ending. Paper: no signature; its jobs are of pre-training."""

    kind = "tail"
    loss = LossKind.TAIL
    title = "A few long responses hold up the step"
    signature = "the longest 5% of the responses of a step decode when all others have ended"
    refuted_by = "the generation takes as long with a shorter longest response"
    next_check = "the lengths of responses by prompt, and how many reach the limit without an end"
    suggested_fix = "end a generation once 90% of its requests have ended, and go on with the others in the next one"
    edits: ClassVar = {
        "partial=0.9": "End a generation once 90% of its requests have ended",
        "longest-first": "Start the longest requests first",
        **dict([STALE]),
    }

    def effect(self, job: RlSubject) -> str:
        generations = _generations_of(job)
        tokens, usual = generations.requests.tokens, float(np.median(generations.longest()))
        share = percent(float((tokens <= usual).mean()))
        return f"responses have up to {tokens.max():,.0f} tokens, {share} of them at most {usual:,.0f}"


class UnevenEngines(_LossOfStep):
    """Engines of one generation end at different times: one is slower, or has more to decode.

    Paper: no signature; its jobs are of pre-training.
    """

    kind = "engines"
    loss = LossKind.ENGINES
    title = "Engines have uneven work, or uneven speeds"
    signature = "some engines of a step are done long before the last one"
    refuted_by = "engines end together once requests are dealt by length"
    next_check = "the clocks of the slow engine's GPUs, and how requests are routed to engines"
    suggested_fix = "route each request to the engine with the least to decode; check the slowest engine's GPUs"
    repair = Repair("even-engines", "Make engines end together", assumes="equal speeds, requests dealt by length")
    edits: ClassVar = {"longest-first": "Deal requests to engines by length, the longest first"}

    def effect(self, job: RlSubject) -> str:
        generations = _generations_of(job)
        tokens = np.bincount(generations.ran.engine, generations.ran.tokens, len(generations.names))
        most, speeds = three_digits(float(tokens.max() / tokens.mean())), generations.engines.speeds
        low, high = (three_digits(float(speed)) for speed in (speeds.min(), speeds.max()))
        work = f"one has {most} times the mean tokens" if most != "1" else "all have as many tokens"
        return f"engines decode at {low} to {high} times the median speed, and {work}"


class Tools(_LossOfStep):
    """Requests hold their slots while tools run. Paper: no signature; its jobs are of pre-training."""

    kind = "tools"
    loss = LossKind.TOOLS
    title = "Requests wait for tools"
    signature = "time between start and end in which a request decodes nothing"
    refuted_by = "the generation takes as long when tools answer at once"
    next_check = "how long each tool takes, and how many run at once"
    suggested_fix = "give tools a time limit, run more of them at once, and free the slot of a request meanwhile"
    repair = Repair("instant-tools", "Make tools answer at once", assumes="tools that take no time")

    def effect(self, job: RlSubject) -> str:
        generations = _generations_of(job)
        tools, took = float(generations.ran.tool_s.mean()), float((generations.ran.end - generations.ran.start).mean())
        return f"a request spends {seconds(tools)} in tools, {percent(tools / took)} of its time"


class Reward(_LossOfStep):
    """The reward is computed after the generation. Paper: no signature; its jobs are of pre-training."""

    kind = "reward"
    loss = LossKind.REWARD
    title = "The step waits for the reward"
    signature = "time for the reward between the generation and the training"
    refuted_by = "rewards are already computed while responses are generated"
    next_check = "the slowest sample of the reward, and how many are computed at once"
    suggested_fix = "compute the reward of a response when it ends, while others are generated"
    repair = Repair("overlap-reward", "Compute rewards during the generation", assumes="rewards that hide behind it")


class WeightSync(_LossOfStep):
    """Engines wait for new weights. Paper: no signature; its jobs are of pre-training."""

    kind = "sync"
    loss = LossKind.SYNC
    title = "Engines wait for new weights"
    signature = "time for sending weights between the training and the next generation"
    refuted_by = "the step takes as long when no weights are sent"
    next_check = "the bytes sent, and the bandwidth of the links between trainer and engines"
    suggested_fix = "send weights in buckets over NCCL or RDMA, and reshard them while they are sent"
    repair = Repair("instant-sync", "Send weights in no time", assumes="a sync that takes no time")
