"""What the host ops of a GPU recording consist of.

In: host ops, and what the threads did at any time. Out: the host ops with lists of what they consist of, so that an op
trace still tells which part of them a repair takes away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.gpu_recording import WHAT_SCHEMA

#: Kinds of host ops that are mostly of one reason.
KINDS = {str(IdleReason.LOADER): "input", str(IdleReason.GC): "gc"}
#: What takes less than this share of all host work goes with the rest of its reason.
_SMALLEST_SHARE = 1e-3
#: Shorter parts of an op are left out, seconds.
_SHORTEST_S = 1e-7


def with_work(host: pl.DataFrame, pieces: pl.DataFrame, whats: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give host ops the columns `did` (rows of the second result), `did_s` (seconds) and `did_n` (in how many pieces).

    Work that is mostly of a reason in KINDS is of that kind. `host`, `pieces` (HOST_SCHEMA): by rank and thread. Time
    in which nothing was recorded is Python without a name.
    """
    if host.is_empty():
        return host, whats.clear()
    named = pl.concat(
        [whats, pl.DataFrame([(str(IdleReason.PYTHON), "", "", False, False)], WHAT_SCHEMA, orient="row")]
    )
    every, total_s = np.arange(named.height, dtype=np.int32), np.zeros(named.height)
    of_kind = [(named["reason"] == one).to_numpy() for one in KINDS]
    ranks, mostly = [*_ranks(host, pieces)], []
    for of_rank in ranks:
        row, did, did_s, _ = of_rank.divided(every, -np.inf)
        total_s += np.bincount(did, did_s, named.height)
        inside = [np.bincount(row[mask[did]], did_s[mask[did]], len(of_rank.begin)) for mask in of_kind]
        mostly.append((2 * np.array(inside) > of_rank.end - of_rank.begin) & (of_rank.end > of_rank.begin))
    host = host.drop("thread")
    for kind, mask in zip(KINDS.values(), np.concatenate(mostly, axis=1), strict=True):
        of_it = pl.Series(mask) & (host["kind"] == "host")
        host = host.with_columns(kind=pl.when(of_it).then(pl.lit(kind)).otherwise("kind"))
    longest, renumbered = _longest(named, total_s)
    return host.hstack(pl.concat(one.lists(renumbered.astype(np.int32)) for one in ranks)), longest


@dataclass(frozen=True, slots=True, eq=False)
class _OfRank:
    """The host ops of a rank: `begin`, `end`, seconds, and which `pieces` of its threads they may share, [ops]."""

    begin: Floats
    end: Floats
    first: Ints
    last: Ints
    pieces: pl.DataFrame

    def divided(self, number: Int32s, shortest_s: float) -> tuple[Ints, Int32s, Floats, Int32s]:
        """The parts of the ops, by op: the op, the number of what it did, seconds, and in how many pieces, [parts].

        `number`: of whats and of nothing.
        """
        ops, room = len(self.begin), int((self.last - self.first).sum()) + len(self.begin)
        bound, did_s = np.zeros(ops + 1, np.int64), np.empty(room)
        did, did_n = np.empty((2, room), np.int32)
        start, what = self.pieces["start"].to_numpy(), self.pieces["what"].to_numpy()
        count = native.divide_work(
            self.begin, self.end, self.first, self.last, start, start + self.pieces["duration"].to_numpy(), what,
            number, int(number.max()) + 1, shortest_s, bound, did, did_s, did_n,
        )  # fmt: skip
        return np.repeat(np.arange(ops), np.diff(bound)), did[:count], did_s[:count], did_n[:count]

    def lists(self, number: Int32s) -> pl.DataFrame:
        """The columns `did`, `did_s` and `did_n` of the ops."""
        divided = pl.DataFrame(dict(zip(("row", *_LISTS), self.divided(number, _SHORTEST_S), strict=True)))
        parts = divided.with_columns(pl.col("row").set_sorted()).group_by("row", maintain_order=True).agg(_LISTS)
        place = np.full(len(self.begin), -1)
        place[parts["row"].to_numpy()] = np.arange(parts.height)
        return parts.select(pl.col(_LISTS).gather(pl.Series(place).set(pl.Series(place < 0), None)))


_LISTS = ("did", "did_s", "did_n")


def _ranks(host: pl.DataFrame, pieces: pl.DataFrame) -> Iterator[_OfRank]:
    """Yield each rank of `host`."""
    for number in host["rank"].unique().sort().to_list():
        bounds = [np.searchsorted(table["rank"].to_numpy(), [number, number + 1]).tolist() for table in (host, pieces)]
        rank_ops, rank_pieces = (table[slice(*bound)] for table, bound in zip((host, pieces), bounds, strict=True))
        begin = rank_ops["start"].to_numpy()
        end, thread = begin + rank_ops["duration"].to_numpy(), rank_ops["thread"].to_numpy()
        start, of_piece = rank_pieces["start"].to_numpy(), rank_pieces["thread"].to_numpy()
        stop = start + rank_pieces["duration"].to_numpy()
        first, last = np.zeros((2, rank_ops.height), np.int64)
        for low, high in pairwise(np.flatnonzero(np.diff(of_piece, prepend=-1, append=-1)).tolist()):
            ops = np.flatnonzero(thread == of_piece[low])
            first[ops] = low + np.searchsorted(stop[low:high], begin[ops], side="right")
            last[ops] = np.maximum(first[ops], low + np.searchsorted(start[low:high], end[ops], side="left"))
        yield _OfRank(begin, end, first, last, rank_pieces)


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    is_long = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~is_long).unique("reason", maintain_order=True)
    new_row = np.cumsum(is_long) - 1
    of_rest = {reason: int(is_long.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(is_long), rest]), np.where(is_long, new_row, others)
