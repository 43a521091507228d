"""A simulator of training jobs that shares no model with tracekit: event-driven, with hosts and network cards.

    from judges.eventsim import draw_job, simulate, truths
    job = draw_job(7, "P3")
    simulate(job).trace     # the recording of its ranks
    truths(job)             # its causes and the true price of each

`model` describes a job; `schedule`, `topology` and `graph` define a step; `world`, `causes`, `uneven` and `troubles`
give every op its cost; `engine` and `network` run the job; `run` records it; `truth` runs it again without a cause;
`cases` draws jobs. `judges.eventsim` scores tracekit's diagnosis.
"""

from judges.eventsim.cases import CASES, draw_job
from judges.eventsim.model import Job
from judges.eventsim.run import SimulatedJob, simulate
from judges.eventsim.truth import Truth, truths

__all__ = ["CASES", "Job", "SimulatedJob", "Truth", "draw_job", "simulate", "truths"]
