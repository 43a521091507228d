"""A run of reinforcement-learning post-training, as its log or its recorder wrote it.

In: nothing. Out: `PhaseLog`, seconds per step, or `Timeline`, phases and trajectories with their times.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class Format(StrEnum):
    """Who wrote a file."""

    VERL = "verl"
    OPENRLHF = "openrlhf"
    SLIME = "slime"
    NEMO_RL = "nemo-rl"
    TRAJECTORIES = "trajectories"


class StepTime(StrEnum):
    """How a logged step relates to its phases."""

    SERIAL = "serial"  # contains them, one after the other
    SUMMED = "summed"  # is their sum: no clock measured the step
    OVERLAPPED = "overlapped"  # generation runs beside the other phases


class PhaseLog(Struct, frozen=True, eq=False):
    """What a framework logged: `step_s`, [steps], and the seconds of each phase, [steps]."""

    format: Format
    step_time: StepTime
    step_s: _Floats
    phases: Mapping[str, _Floats]


class Phases(Struct, frozen=True, eq=False):
    """Recorded phases; all arrays are [phases]. `start`, `end`: seconds of one clock."""

    name: npt.NDArray[np.str_]
    step: _Ints
    start: _Floats
    end: _Floats


class Trajectories(Struct, frozen=True, eq=False):
    """Recorded requests, in order of step and submission; a resumed one is a request for each part.

    All arrays are [requests]. `engine`: an index into `engines`; `submit`, `start`, `end`: seconds of the clock of the
    phases; `tokens`: decoded ones; `tool_s`: seconds between start and end in which nothing was decoded; `version`:
    number of the step whose weights decoded it, -1 if unknown.
    """

    engines: tuple[str, ...]
    step: _Ints
    engine: _Ints
    submit: _Floats
    start: _Floats
    end: _Floats
    tokens: _Floats
    tool_s: _Floats
    version: _Ints


class Timeline(Struct, frozen=True, eq=False):
    """Phases with their times, and the trajectories of their generations if they were recorded."""

    phases: Phases
    trajectories: Trajectories | None
