"""The pages and words for each kind of stored job. Pages read them here and never test which kind a job is."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from tracekit.dashboards.figures.lanes import LEVELS, LEVELS_OF_RL


class TimelineWords(Struct, frozen=True):
    """The words of the page Timeline for a kind of job.

    `colours`: what they mean, `levels`: each of them, if ops have no peers. `group`: its rows without a group; `who`,
    `ranks`: of a row, and of the filter of rows; `find`: an example of ops; `longest`: the heading of the table and its
    order. `fixed`: parts of the address that nobody chooses. `peers`: its ops have peers, and so an ideal, streams and
    a critical path to choose.
    """

    title: tuple[str, ...]
    colours: str
    who: str
    group: str
    ranks: str
    find: str
    longest: tuple[str, str]
    levels: tuple[str, ...] = LEVELS
    fixed: Mapping[str, str] = {}
    peers: bool = False


class StoredKind(Struct, frozen=True, kw_only=True):
    """The pages and words for a kind of job. `pages`: addresses and titles. `no_workers`: why those about workers
    cannot show it, as the end of a sentence; None if they can. `question`: what the page What-if asks for, `example`:
    such a text; `of_ops`: it selects ops, which can be scaled or kept. `compared`: the modes of the page Compare with
    their names; `choose`: what to do there first; `alike`: which jobs it suggests. `folded`: the heading below which
    the tables of a report are folded; None if they are not.
    """

    pages: Mapping[str, str]
    no_workers: str | None = None
    timeline: TimelineWords
    question: str = "Ops"
    example: str
    of_ops: bool = True
    compared: Mapping[str, str]
    choose: str
    alike: str
    folded: str | None = "Critical path and times by kind"


_OF_ANY_JOB = {"/whatif": "What-if", "/timeline": "Timeline", "/compare": "Compare", "/hang": "Hang"}
PIPELINE = StoredKind(
    pages={"/job": "Job", "/time": "Time", "/workers": "Workers", "/pipeline": "Pipeline", **_OF_ANY_JOB},
    timeline=TimelineWords(
        title=("Recorded against ", "ideal", ", op by op"),
        colours="Own time against ",
        who="worker",
        group="Each worker",
        ranks="DP ranks",
        find="forward 3",
        longest=("slowest", "Ranked by what they take beyond the median of their peers"),
        peers=True,
    ),
    example="worker=1,2 and step=100-105",
    compared={"job": "Another job", "split": "This job before a step"},
    choose="No change point was found in this job. Choose the job before the change, or a step.",
    alike="of the same layout",
)
_OP_GRAPH = StoredKind(
    pages={"/job": "Job", **_OF_ANY_JOB},
    no_workers="is no pipeline, so it has no workers",
    timeline=TimelineWords(
        title=("Streams and threads, op by op",),
        colours="Kind of op:",
        who="rank",
        group="Each rank",
        ranks="Ranks",
        find="gemm",
        longest=("longest", "Longest first"),
        fixed={"view": "recorded", "streams": "all", "order": "rank", "critical": "no"},
    ),
    example="kind=host and rank=0",
    compared={"job": "Another job"},
    choose="Choose the job before the change.",
    alike="that are no pipelines",
)
_PHASES = {"title": ("Phases and requests, one by one",), "colours": "Phase:", "find": "train", "levels": LEVELS_OF_RL}
_POST_TRAINING = structs.replace(
    _OP_GRAPH,
    timeline=structs.replace(_OP_GRAPH.timeline, **_PHASES),
    question="Alternative",
    example="staleness=1,partial=0.9",
    of_ops=False,
    folded=None,
)
#: By the kind of the trace, and by the source of the report, which tells more.
KINDS: Mapping[str, StoredKind] = {
    "pipeline": PIPELINE,
    "ops": _OP_GRAPH,
    "recording": _OP_GRAPH,
    "rl": _POST_TRAINING,
}
