"""Templates: the compiled graph of one lane's ops, and their identities.

In: structures (dependencies among the ops of a lane). Out: `Template`s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracekit.analysis.graph.compiled import NO_RENDEZVOUS, CompiledGraph, Wiring, compile_graphs
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Int32s, Ints
from tracekit.trace.model import COMMUNICATION, KINDS

_IS_COMMUNICATION = np.array([kind in COMMUNICATION for kind in KINDS])


class Template(CompiledGraph, frozen=True, eq=False):
    """A compiled graph and the identity of its rows, [rows] columns.

    `member`: the structure that a row comes from; `pp_rank`, `kind`, `seq`, `chunk`.
    """

    member: Int32s
    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]


def rendezvous_keys(structures: Sequence[Structure]) -> Ints:
    """The data-parallel collectives of a job: the distinct `Structure.dp_key`s, ascending."""
    keys = np.unique(np.concatenate([structure.dp_key for structure in structures]))
    return keys[keys >= 0]


def build_templates(structures: Sequence[Structure], keys: Ints) -> list[Template]:
    """A template per structure; data-parallel collectives (`keys`) join the lanes of a step across templates.

    Raises GraphError if dependencies form a cycle.
    """
    compiled = compile_graphs([_wiring([structure]) for structure in structures], keys)
    return [_template(graph, [structure]) for graph, structure in zip(compiled, structures, strict=True)]


def build_coupled_template(structures: Sequence[Structure]) -> Template:
    """One graph of several lanes of a step, whose data-parallel collectives join within it.

    Raises GraphError if dependencies form a cycle.
    """
    return _template(compile_graphs([_wiring(structures)], NO_RENDEZVOUS)[0], structures)


def _wiring(structures: Sequence[Structure]) -> Wiring:
    """The dependencies of several lanes, concatenated."""
    sizes = np.array([len(structure.kind) for structure in structures])
    offsets = np.cumsum(sizes) - sizes
    parts = list(zip(structures, offsets, strict=True))

    def describe(row: int) -> str:
        member = int(np.searchsorted(offsets, row, side="right")) - 1
        part, row_in_part = structures[member], row - int(offsets[member])
        return f"{KINDS[part.kind[row_in_part]]} {part.seq[row_in_part]} of stage {part.pp_rank[row_in_part]}"

    return Wiring(
        before=np.concatenate([part.before + offset for part, offset in parts]),
        after=np.concatenate([part.after + offset for part, offset in parts]),
        group=np.concatenate([part.group + offset for part, offset in parts]),
        rendezvous_key=np.concatenate([part.dp_key for part in structures]),
        synchronises=_IS_COMMUNICATION[np.concatenate([part.kind for part in structures])],
        describe=describe,
    )


def _template(graph: CompiledGraph, structures: Sequence[Structure]) -> Template:
    sizes = [len(structure.kind) for structure in structures]
    return Template(
        **{name: getattr(graph, name) for name in CompiledGraph.__struct_fields__},
        member=np.repeat(np.arange(len(structures), dtype=np.int32), sizes),
        pp_rank=np.concatenate([part.pp_rank for part in structures]),
        kind=np.concatenate([part.kind for part in structures]),
        seq=np.concatenate([part.seq for part in structures]),
        chunk=np.concatenate([part.chunk for part in structures]),
    )
