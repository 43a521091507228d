"""What fixes share: the plan of one before it is priced, and the layers of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from tracekit.analysis.evidence.subject import Cause
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.errors import SelectionError, TraceError
from tracekit.base.text import short
from tracekit.report.finding import Place
from tracekit.trace.canonical import Trace

#: What the price of a repair assumes.
SPEED_OF_PEERS = "the speed of peers afterwards"
#: Fixes of which a combination has one: replace a machine, or give it less work.
MACHINE = ("machine",)
#: ... and: move layers in one way.
LAYERS = ("layers",)
#: No model has more layers on a stage, and the search for a split would take too long.
MOST_LAYERS = 1000


class Plan(Struct, frozen=True, eq=False):
    """One proposed fix. `step_times`: its step times if known, seconds, [steps]; None: replay `change` to get them.

    `extra_s`: seconds it adds to each step. `bound`: the replay gives an upper bound of the saving. `cause`: the cause
    that it addresses, None for a fix that any job can try. `details["assumes"]`: an assumption of the price.
    `reached`, `around`, `excludes`: as for `PricedFix`. `edit`: `change` as text, see `Fix.edit`; None: as `fix=KIND`.
    """

    kind: str
    title: str
    where: Place
    change: Any
    step_times: Floats | None = None
    extra_s: float = 0.0
    bound: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: Cause | None = None
    reached: str | None = None
    around: bool = False
    excludes: tuple[str, ...] = ()
    edit: str | None = None


def check_layers(trace: Trace, layers: tuple[int, ...] | None) -> None:
    """Raise SelectionError if the given `layers` do not fit the job, TraceError if the layers in its metadata are
    impossible.

    Call it before the analysis, which finds out only at its end whether it needs the layers.
    """
    stages = trace.layout.pp
    if layers is not None and len(layers) != stages:
        raise SelectionError(f"layers {_shown(layers)}: expected {stages} counts, one per stage")
    if layers is not None and not all(1 <= count <= MOST_LAYERS for count in layers):
        raise SelectionError(f"layers {_shown(layers)}: expected 1 to {MOST_LAYERS} on each stage")
    recorded = trace.metadata.get("layers")
    if isinstance(recorded, list | tuple) and any(type(count) is int and count > MOST_LAYERS for count in recorded):
        raise TraceError(
            f"{short(trace.name)}: its metadata says layers {_shown(recorded)}; expected 1 to {MOST_LAYERS} on each"
            " stage: correct the metadata"
        )


def _shown(layers: Sequence[Any]) -> str:
    return f"{','.join(f'{count!s:.20}' for count in layers[:8])}{',...' if len(layers) > 8 else ''}"


def layers_of(trace: Trace, asked: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The layers of each stage: `asked`, or those of the metadata, if it gives them for each stage."""
    if asked is not None:
        return asked
    layers = trace.metadata.get("layers")
    if not isinstance(layers, list | tuple) or len(layers) != trace.layout.pp:
        return None
    return tuple(layers) if all(type(count) is int and 1 <= count <= MOST_LAYERS for count in layers) else None
