"""Jobs of the simulator that shares no model with the rules, with hardly any noise: what a rule misses is no bad luck.

Truth: the same job, run again without the cause.
"""

from __future__ import annotations

import tracekit
from judges.eventsim.causes import Cause
from judges.eventsim.model import Job, Network, Noise, Posting, Shape
from judges.eventsim.run import simulate
from judges.eventsim.truth import mean_step_s, without
from tracekit.report.report import Report

PIPELINE = Shape(dp=2, pp=4, microbatches=8, steps=4)
FLAT = Shape(dp=4, pp=1, microbatches=8, steps=10)
#: Transfers of a twentieth of a forward, parameters of an eighth of a step.
BUSY = Network(activation_bytes=100e6, parameter_bytes=6e9)
QUIET = Noise(op=0.002, worker=0.001, transfer=0.01)


def job(*causes: Cause, **changes) -> Job:
    chosen = {"shape": PIPELINE, "posting": Posting.ANY_DIRECTION, "noise": QUIET, "network": BUSY} | changes
    return Job(causes=causes, **chosen)


def report(of: Job) -> Report:
    return tracekit.job_of(simulate(of).trace).whatif()


def named(of: Job) -> list:
    return [cause for cause in report(of).findings if cause.priced]


def costs(of: Job, cause: Cause) -> float:
    return mean_step_s(of) - mean_step_s(without(of, cause))
