"""Pictures that need more than the tables of a report: a step of a pipeline, and a run of post-training.

In: a replay, or a recorded run. Out: plain data, few enough bars for a page.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.base.text import seconds

_WAITS = {
    "peer": "waits for stage {}",
    "transfer": "waits for the transfer from stage {}",
    "collective": "waits for its parameters",
    "host": "waits for its host, which launches late",
}


class Bar(Struct, frozen=True):
    """A compute or a part of a gap. `what`: of `WHATS` in `analysis/bubbles/picture.py`. Seconds from the first compute
    of the step on any stage.

    `microbatch`, `chunk`: of a compute, the latter None if stages have one. `waits_for`: the stage that a gap waits
    for.
    """

    stage: int
    what: str
    start_s: float
    end_s: float
    microbatch: int | None = None
    chunk: int | None = None
    waits_for: int | None = None

    @property
    def words(self) -> str:
        """What it is, for people who point at it."""
        took = seconds(self.end_s - self.start_s)
        if self.microbatch is None:
            return f"stage {self.stage} {_WAITS[self.what].format(self.waits_for)}: {took}"
        of = "" if self.chunk is None else f", chunk {self.chunk}"
        return f"stage {self.stage}: {self.what} of microbatch {self.microbatch}{of}: {took}"


class Picture(Struct, frozen=True):
    """One schedule. `name`: "recorded", or as asked for. `window_s`: from the first start to the last end of any
    compute. `peak_microbatches`: the most that any stage holds. `left_out`: the number of bars that did not fit.
    """

    name: str
    stages: int
    window_s: float
    peak_microbatches: float
    bars: list[Bar]
    left_out: int = 0


class PipelinePicture(Struct, frozen=True):
    """The slowest step of a pipeline: as recorded, then under each schedule that was asked for."""

    step: int
    schedules: list[Picture]


class PhaseBars(Struct, frozen=True):
    """Seconds of a phase in each of the steps drawn."""

    phase: str
    seconds: list[float]


class RequestBar(Struct, frozen=True):
    """A request of the longest generation. Seconds from the first time that any of them was submitted.

    `long`: it is in the tail, the longest 5 % of its step.
    """

    engine: int
    engine_name: str
    tokens: float
    submit_s: float
    start_s: float
    end_s: float
    long: bool


class RlPicture(Struct, frozen=True):
    """A run of post-training: `phases` over steps spread over `steps`, the longest phase first, and `requests` by
    engine and start, None without trajectories.

    `longest_s`: phases of the step that takes longest; `window_s`: from the first submission to the last end.
    """

    steps: int
    longest_s: float
    phases: list[PhaseBars]
    requests: list[RequestBar] | None
    window_s: float
