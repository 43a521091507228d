"""The loads of experts: read from a log, and experts placed on ranks so that loads are even."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.paths import unreadable
from tracekit.base.text import quoted
from tracekit.report.questions import PlacedLayer, Placement

#: Largest file that is read, bytes, and what an expert may have of tokens.
_LARGEST_FILE = 1 << 30
_Tokens = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _LoadsRow(Struct):
    step: _Number
    layer: _Number
    tokens_per_expert: Annotated[list[_Tokens], msgspec.Meta(min_length=1, max_length=1 << 16)]


class Loads(Struct, frozen=True, eq=False):
    """Tokens of each expert of a job, by step and layer: `tokens`, [steps, layers, experts]; `source`: for messages."""

    source: str
    steps: Ints
    layers: Ints
    tokens: Floats

    @classmethod
    def read(cls, path: Path) -> Loads:
        """Read a file. Raises FormatError, with the line, if it is not as the module describes."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a file; loads are read from a file with a line per step and layer")
            if status.st_size > _LARGEST_FILE:
                raise FormatError(f"{path}: larger than {_LARGEST_FILE >> 30} GiB; keep the steps of the recording")
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise unreadable(path, error) from None
        by_layer: dict[tuple[int, int], Sequence[float]] = {}
        experts = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=_LoadsRow)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FormatError(
                    f'{path}, line {number}: {error}; expected {{"step": 0, "layer": 0, "tokens_per_expert": [12, 7]}}'
                ) from None
            experts = experts or len(row.tokens_per_expert)
            if len(row.tokens_per_expert) != experts:
                raise FormatError(
                    f"{path}, line {number}: {len(row.tokens_per_expert)} experts, the lines before have {experts};"
                    " write one file per kind of layer"
                )
            if (row.step, row.layer) in by_layer:
                raise FormatError(
                    f"{path}, line {number}: step {row.step} has layer {row.layer} twice; add up the microbatches of a"
                    " step, and leave out forwards that are computed again"
                )
            by_layer[row.step, row.layer] = row.tokens_per_expert
        if not by_layer:
            raise FormatError(f"{path}: no loads; expected a line per step and layer")
        steps, layers = (sorted({key[part] for key in by_layer}) for part in (0, 1))
        missing = next(
            (key for key in ((step, layer) for step in steps for layer in layers) if key not in by_layer), None
        )
        if missing is not None:
            raise FormatError(f"{path}: step {missing[0]} lacks layer {missing[1]}; write all layers of each step")
        tokens = np.array([[by_layer[step, layer] for layer in layers] for step in steps])
        return cls(str(path), np.array(steps), np.array(layers), tokens)

    def without_experts(self, job: str) -> FormatError:
        """The error that a job has no experts for these loads."""
        return FormatError(f"{self.source}: {quoted(job)} has no all-to-alls of experts; leave the loads out")

    def in_steps(self, steps: Ints) -> Floats:
        """The tokens in these steps, [steps, layers, experts]. Raises FormatError if there are none of a step."""
        present = np.isin(steps, self.steps)
        if not present.all():
            raise FormatError(
                f"{self.source}: holds steps {self.steps[0]} to {self.steps[-1]}, not step {steps[~present][0]} of the"
                " recording; give the loads of the recorded steps"
            )
        return np.asarray(self.tokens[np.searchsorted(self.steps, steps)])


def default_placement(experts: int, ranks: int) -> Placement:
    """Experts in order on ranks in order, equally many on each. Raises SelectionError if that cannot be."""
    if experts % ranks:
        raise SelectionError(f"{experts} experts cannot be divided among {ranks} ranks equally")
    return [[expert, expert * ranks // experts] for expert in range(experts)]


def loads_of_ranks(tokens: Floats, placement: Placement, ranks: int) -> Floats:
    """The tokens of each rank, [any, ranks], from those of each expert, [any, experts]."""
    share = np.zeros((tokens.shape[-1], ranks))
    for expert, rank in placement:
        share[expert, rank] += 1
    return np.asarray(tokens @ (share / np.maximum(share.sum(axis=1, keepdims=True), 1)))


def balanced_placement(tokens: Floats, ranks: int, slots: int, nodes: int = 1, groups: int = 1) -> Placement:
    """Place experts with these tokens, [experts], in `slots` slots, equally many on each rank.

    `groups`: of experts in order, each on one of `nodes` equal runs of ranks. Raises SelectionError if that cannot be.

    Replicas of an expert share its tokens equally; the expert with most tokens per replica gets the next one. Replicas
    are packed by falling load onto the rank that has least, then two change places as long as that lowers the load of
    the heaviest rank. Groups are first placed on nodes in the same way, so that each stays on one.
    """
    experts = len(tokens)
    for whole, part, what in (
        (slots, ranks, "slots among {} ranks"),
        (ranks, nodes, "ranks among {} nodes"),
        (groups, nodes, "groups among {} nodes"),
        (experts, groups, "experts among {} groups"),
    ):
        if part < 1 or whole % part:
            raise SelectionError(f"{whole} {what.format(part)}: not equally many; choose a multiple of {part}")
    if slots < experts:
        raise SelectionError(f"{slots} slots for {experts} experts; each needs at least one")
    members = np.arange(experts).reshape(groups, -1)
    node_of = _packed(tokens[members].sum(axis=1), nodes) if nodes > 1 else np.zeros(groups, np.int64)
    placement: Placement = []
    for node in range(nodes):
        on_node, width = members[node_of == node].ravel(), ranks // nodes
        counts = _replicas(tokens[on_node], slots // nodes)
        expert = np.repeat(np.arange(len(on_node)), counts)
        rank = _packed((tokens[on_node] / counts)[expert], width)
        placement += [[int(on_node[local]), node * width + int(slot)] for local, slot in zip(expert, rank, strict=True)]
    return sorted(placement)


def placed_layers(loads: Loads, ranks: int, slots: int, nodes: int, groups: int) -> list[PlacedLayer]:
    """Place the experts of each layer by their mean load over the steps, as `balanced_placement` does."""
    layers = []
    for layer, tokens in zip(loads.layers.tolist(), loads.tokens.mean(axis=0), strict=True):
        placement = balanced_placement(tokens, ranks, slots, nodes, groups)
        load = loads_of_ranks(tokens, placement, ranks)
        layers.append(PlacedLayer(layer, placement, float(load.max() / (load.mean() or 1.0))))
    return layers


def _replicas(tokens: Floats, slots: int) -> Ints:
    """How many slots each expert gets, [experts]."""
    counts = np.ones(len(tokens), np.int64)
    for _ in range(slots - len(tokens)):
        counts[int((tokens / counts).argmax())] += 1
    return counts


def _packed(load: Floats, bins: int) -> Ints:
    """The bin of each item, [items], equally many in each, so that the fullest has little."""
    size, bin_of = len(load) // bins, np.empty(len(load), np.int64)
    held, total = np.zeros(bins, np.int64), np.zeros(bins)
    for item in np.argsort(-load, kind="stable").tolist():
        free = np.flatnonzero(held < size)
        bin_of[item] = best = int(free[total[free].argmin()])
        held[best] += 1
        total[best] += load[item]
    while (swap := _better_swap(load, bin_of, total)) is not None:
        first, second = swap
        moved = load[first] - load[second]
        total[bin_of[first]] -= moved
        total[bin_of[second]] += moved
        bin_of[first], bin_of[second] = bin_of[second], bin_of[first]
    return bin_of


def _better_swap(load: Floats, bin_of: Ints, total: Floats) -> Sequence[int] | None:
    """Items whose exchange lowers the fullest bin most, and fills no other as much; None if there are none."""
    full = int(total.argmax())
    candidates, others = np.flatnonzero(bin_of == full), np.flatnonzero(bin_of != full)
    if not len(others):
        return None
    moved = load[candidates][:, None] - load[others]
    after = np.maximum(total[full] - moved, total[bin_of[others]] + moved)
    best = int(after.argmin())
    if not after.flat[best] < total[full] * (1 - 1e-12):
        return None
    return int(candidates[best // len(others)]), int(others[best % len(others)])
