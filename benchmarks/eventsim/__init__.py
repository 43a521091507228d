"""A simulator of training jobs that shares no model with tracekit: an event-driven job on hosts and network cards.

    from benchmarks.eventsim import draw_job, simulate, truths
    job = draw_job(7, "P3")
    simulate(job).trace     # what its ranks recorded
    truths(job)             # what is wrong with it, and what each cause really costs

`model` says what a job is, `schedule`, `topology` and `graph` what its ranks do in a step, `world`, `causes`, `uneven`
and `troubles` what everything costs, `engine` and `network` run it, `run` records it, `truth` runs it again without a
cause, and `cases` draws jobs. The scores of tracekit's diagnosis are in `benchmarks.verdicts`.
"""

from benchmarks.eventsim.cases import CASES, draw_job
from benchmarks.eventsim.model import Job
from benchmarks.eventsim.run import SimulatedJob, simulate
from benchmarks.eventsim.truth import Truth, truths

__all__ = ["CASES", "Job", "SimulatedJob", "Truth", "draw_job", "simulate", "truths"]
