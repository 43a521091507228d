"""Which communication kernels of different ranks belong to the same collective, and by how much clocks differ.

In: the GPU ops of a recording. Out: `Matches`: a number per instance, the same on all ranks that took part; and
`ClockOffsets`, from collectives that end for all members at the same moment.

Only recent profilers write an identifier of each collective. Without one, the kernels of a process group run in the
same order on all of its ranks, but the recordings of ranks begin and end at different kernels. So each rank is shifted
against the one with most kernels until as many as possible are alike. Transfers between two ranks are identified by
sender and receiver, and match first in, first out.

The offset of a rank's clock is the median of how much later it saw its collectives end than the median member did. If
ranks share no group with all others, offsets and true ends are fitted in turn until they agree: least absolute error,
coordinate by coordinate. Rooted collectives (broadcast) end when the root is done and give no information.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, MEDIAN_ERROR
from tracekit.report.tables import GroupMatches
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.model import ProcessGroup
from tracekit.trace.op import GpuRecording

#: Group of kernels without a recorded group: all ranks are assumed to take part.
UNNAMED_GROUP = "all ranks"
#: This kernel of a rank matches none of another rank's.
UNMATCHED = -1
#: Name of both sides of a transfer during matching.
_TRANSFER = "transfer"
_P2P = re.compile(r"^_?(i?send|i?recv)$", re.IGNORECASE)
#: The number of elements in a rank's part of a collective, null if ranks may send different amounts.
ELEMENTS_OF_ALL = pl.when(
    ~pl.col("collective").cast(pl.String).str.contains("(?i)all_?to_?all|_?v$|gather$|scatter$|send_?recv|coalesced")
).then("elements")
#: Collectives that end on some ranks before all have begun.
_ROOTED = re.compile(
    r"broadcast|(?<!all)(?<!all_)reduce(?!_?scatter)|(?<!all)(?<!all_)gather|(?<!reduce)(?<!reduce_)scatter"
)
#: A shift is preferred to one with more pairs, but at other times, if this share of its pairs is alike and overlaps in
#: time. Chosen.
CONVINCING = 0.9
#: Profilers record nothing finer than this, seconds.
_AGREED_S = 1e-9
_ROUNDS = 100
#: Ratio of the standard error of a median to the median absolute deviation, before dividing by sqrt(n).
_ERROR_OF_MEDIAN = MAD_TO_SIGMA * MEDIAN_ERROR


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Rows of the communication GPU ops, by instance.

    `row`: of the recording's GPU ops, `instance`: from 0, `rank`, `start`, `end` (seconds, by the rank's own clock):
    [members]. `synchronising`: whether no member can end before all have begun, [instances]. `group_of`: index into
    `groups`, [instances].
    """

    row: Ints
    instance: Ints
    rank: Int32s
    start: Floats
    end: Floats
    synchronising: np.ndarray
    group_of: Ints
    groups: tuple[GroupMatches, ...]

    @property
    def matched(self) -> int:
        """Instances found on every recorded rank of their group."""
        return len(self.group_of)

    @property
    def unmatched(self) -> int:
        """Communication kernels without partners on the other ranks."""
        return sum(sum(group.unmatched.values()) for group in self.groups)

    def begun(self, clocks: ClockOffsets) -> tuple[Floats, Floats]:
        """When each member began, and the last one of its instance, by corrected clocks, seconds, [members]."""
        start = self.start - clocks.of(self.rank)
        last = np.full(self.matched, -np.inf)
        np.maximum.at(last, self.instance, start)
        return start, last[self.instance]


def match_collectives(recording: GpuRecording) -> Matches:
    """Match the communication kernels of all ranks. Unrecorded ranks of a group do not count as missing."""
    kernels = _communication(recording)
    matched: list[tuple[Ints, GroupMatches]] = []
    stated = {group.name: group for group in recording.groups}
    for (name,), members in kernels.group_by("group", maintain_order=True):
        group = stated.get(str(name)) or ProcessGroup(UNNAMED_GROUP, recording.ranks)
        matched += _of_group(group, members, recording.ranks)
    return _assembled(kernels, matched)


def _communication(recording: GpuRecording) -> pl.DataFrame:
    """The communication kernels, with `row` in front, each with its group, or the group of its stream if it states
    none.
    """
    kernels = (
        recording.gpu_ops.with_row_index("row")
        .filter(kernel_class=str(KernelClass.COMMUNICATION))
        .cast({pl.Categorical: pl.String})
        .with_columns(
            pl.col("row").cast(pl.Int64),
            end=pl.col("start") + pl.col("duration"),
            short=pl.col("name").str.split("(").list.first().str.split("<").list.first(),
        )
    )
    stream = ["rank", "device", "stream"]
    return kernels.with_columns(
        group=pl.coalesce(
            "group",
            pl.when(pl.col("group").drop_nulls().n_unique().over(stream) == 1).then(
                pl.col("group").drop_nulls().first().over(stream)
            ),
        ).fill_null(UNNAMED_GROUP)
    )


def _of_group(
    group: ProcessGroup, kernels: pl.DataFrame, recorded: Sequence[int]
) -> Iterator[tuple[Ints, GroupMatches]]:
    """[instances, ranks] rows of the group's collectives, and of its transfers between each pair of ranks."""
    transfer = kernels["collective"].fill_null("").str.contains(_P2P.pattern.replace("^", "(?i)^")) & (
        kernels["source"].is_not_null() | kernels["destination"].is_not_null()
    )
    ranks = tuple(rank for rank in group.ranks if rank in recorded)
    collectives = kernels.filter(~transfer)
    if collectives.height:
        yield _matched(group.name, ranks, [collectives.filter(rank=rank) for rank in ranks], collectives)
    if not transfer.any():
        return
    transfers = _with_global_ends(kernels.filter(transfer), group).with_columns(collective=pl.lit(_TRANSFER))
    for (source, destination), of_pair in transfers.group_by(["from", "to"], maintain_order=True):
        pair = (int(source), int(destination))
        sides = [of_pair.filter(rank=pair[0], sends=True), of_pair.filter(rank=pair[1], sends=False)]
        yield _matched(f"{group.name}: {pair[0]} to {pair[1]}", pair, sides, of_pair)


def _with_global_ends(transfers: pl.DataFrame, group: ProcessGroup) -> pl.DataFrame:
    """`from` and `to` of each transfer. Older versions give ranks within the group instead of ranks of the job."""
    sends = transfers["collective"].str.contains("(?i)send")
    own_end = pl.when(sends).then("source").otherwise("destination")
    other = pl.when(sends).then("destination").otherwise("source")
    local = transfers.filter(own_end.is_not_null() & (own_end != pl.col("rank"))).height > 0
    numbers = dict(enumerate(group.ranks))
    peer = other.replace_strict(numbers, default=None, return_dtype=pl.Int32) if local else other
    return transfers.with_columns(sends=sends, peer=peer.fill_null(-1)).with_columns(
        pl.when("sends").then("rank").otherwise("peer").alias("from"),
        pl.when("sends").then("peer").otherwise("rank").alias("to"),
    )


def _matched(
    name: str, ranks: tuple[int, ...], kernels: Sequence[pl.DataFrame], all_kernels: pl.DataFrame
) -> tuple[Ints, GroupMatches]:
    """Which rows belong together, [instances, ranks]. `kernels`: of each rank, by start."""
    kernels = [of_rank.sort("start") for of_rank in kernels]
    if len(ranks) < 2:
        rows, shifts = np.empty((0, len(ranks)), np.int64), [0] * len(ranks)
    else:
        rows, shifts = _by_identifier(kernels, all_kernels) or _by_alignment(kernels)
    unmatched = {
        rank: own.height - len(rows) for rank, own in zip(ranks, kernels, strict=True) if own.height > len(rows)
    }
    by_rank = dict(zip(ranks, shifts, strict=True))
    places = [np.flatnonzero(np.isin(own["row"].to_numpy(), rows[:, number])) for number, own in enumerate(kernels)]
    inside = sum(int(np.ptp(place)) + 1 - len(place) for place in places if len(place))
    is_transfer = all_kernels["collective"][0] == _TRANSFER
    return rows, GroupMatches(name, ranks, len(rows), unmatched, by_rank, inside, is_transfer)


def _by_identifier(kernels: Sequence[pl.DataFrame], all_kernels: pl.DataFrame) -> tuple[Ints, list[int]] | None:
    """Kernels with the same identifier on all ranks; None if no identifier is unique to an instance.

    A collective can consist of several kernels, which are numbered. Kernels at the beginning of a recording, whose
    calls came before it, have no identifier: if all others are shifted by the same distance, these are matched by
    position.
    """
    key = _identifier(kernels, all_kernels)
    if key is None:
        return None
    joined: pl.DataFrame | None = None
    for number, of_rank in enumerate(kernels):
        side = of_rank.with_row_index("place").filter(pl.col(key).is_not_null())
        side = side.select(
            key, pl.int_range(pl.len()).over(key).alias("part"),
            pl.col("row").alias(f"row{number}"), pl.col("place").cast(pl.Int64).alias(f"place{number}"),
        )  # fmt: skip
        joined = side if joined is None else joined.join(side, on=[key, "part"], how="inner", maintain_order="left")
    if joined is None or not joined.height:
        return None
    places = joined.select(pl.col("^place.*$")).to_numpy()
    reference = max(range(len(kernels)), key=lambda number: kernels[number].height)
    shifts = places[:, [reference]] - places
    if (shifts == shifts[0]).all():
        return _shifted(kernels, reference, shifts[0].tolist())
    return joined.select(pl.col("^row.*$")).to_numpy(), [0] * len(kernels)


def _identifier(kernels: Sequence[pl.DataFrame], all_kernels: pl.DataFrame) -> str | None:
    """The column that identifies instances: every rank has it, with its own value for most kernels.

    Transfers have none that both sides share.
    """
    if (all_kernels["collective"] == _TRANSFER).any():
        return None
    return next(
        (
            key
            for key in ("comms_id", "sequence")
            if all(0 < own[key].drop_nulls().len() <= 2 * own[key].drop_nulls().n_unique() for own in kernels)
        ),
        None,
    )


def _by_alignment(kernels: Sequence[pl.DataFrame]) -> tuple[Ints, list[int]]:
    """Each rank shifted against the one with most kernels; kernels alike on all ranks are an instance."""
    reference = max(range(len(kernels)), key=lambda number: kernels[number].height)
    kinds = _kinds(kernels)
    times = [of_rank.select("start", "end").to_numpy() for of_rank in kernels]
    shifts = [
        0 if number == reference else _best_shift(kinds[number], kinds[reference], times[number], times[reference])
        for number in range(len(kernels))
    ]
    return _shifted(kernels, reference, shifts)


def _kinds(kernels: Sequence[pl.DataFrame]) -> list[Ints]:
    """A number for each kernel of each rank, equal for kernels that look alike."""
    table = pl.concat([of_rank.with_columns(side=pl.lit(number)) for number, of_rank in enumerate(kernels)])
    # Use only what the kernel states itself: other ranks may not have recorded what its launch states.
    says = pl.col("stated")
    alike = table.select(
        "side",
        kind=pl.struct(
            "short",
            pl.when(says).then("collective").alias("collective"),
            pl.when(says).then(ELEMENTS_OF_ALL).alias("n"),
            pl.when(says).then("dtype").alias("dtype"),
        ).rank("dense"),
    )
    return [alike.filter(side=number)["kind"].to_numpy().astype(np.int64) for number in range(len(kernels))]


def _shifted(kernels: Sequence[pl.DataFrame], reference: int, shifts: list[int]) -> tuple[Ints, list[int]]:
    """Rows that match, [instances, ranks], if each rank's kernels begin `shifts` places after the reference's."""
    kinds, count = _kinds(kernels), kernels[reference].height
    met = np.full((count, len(kernels)), UNMATCHED, np.int64)
    for number, shift in enumerate(shifts):
        place = np.arange(len(kinds[number])) + shift
        inside = (place >= 0) & (place < count)
        inside[inside] &= kinds[number][inside] == kinds[reference][place[inside]]
        met[place[inside], number] = kernels[number]["row"].to_numpy()[inside]
    return met[(met >= 0).all(axis=1)], shifts


def _best_shift(kind: Ints, reference: Ints, times: Floats, reference_times: Floats) -> int:
    """How many places after the reference's a rank's kernels begin.

    The shift with most pairs that are alike wins; of equal ones, the one whose pairs end closest together. Jobs repeat
    themselves, so a shift with fewer pairs wins if its pairs overlap in time and the others do not.
    """
    if not len(kind):
        return 0
    shifts = np.arange(-len(kind) + 1, len(reference))
    equal = sum(
        (_pairs_by_shift(kind == value, reference == value) for value in np.intersect1d(kind, reference).tolist()),
        np.zeros(len(shifts), np.int64),
    )
    pairs = np.minimum.reduce(
        [
            np.full(len(shifts), len(kind)),
            np.full(len(shifts), len(reference)),
            len(kind) + shifts,
            len(reference) - shifts,
        ]
    )
    overlapping = _overlaps_by_shift(kind, reference, times, reference_times)

    def best(candidates: Ints) -> int:
        numbers: list[int] = candidates.tolist()
        return min(numbers, key=lambda number: _median_distance_s(int(shifts[number]), times, reference_times))

    most = best(np.flatnonzero(equal == equal.max()))
    together = best(np.flatnonzero(overlapping == overlapping.max()))
    convincing = overlapping[together] >= CONVINCING * pairs[together] > 0
    if convincing and overlapping[most] < CONVINCING * equal[most]:
        return int(shifts[together])
    return int(shifts[most])


def _pairs_by_shift(own: np.ndarray, theirs: np.ndarray) -> Ints:
    """For each shift of `own` against `theirs`, the number of places where both are true, [shifts], by convolution."""
    size = 1 << (len(own) + len(theirs)).bit_length()
    product = np.fft.rfft(theirs.astype(np.float64), size) * np.fft.rfft(own[::-1].astype(np.float64), size)
    return np.rint(np.fft.irfft(product, size)[: len(own) + len(theirs) - 1]).astype(np.int64)


def _overlaps_by_shift(kind: Ints, reference: Ints, times: Floats, reference_times: Floats) -> Ints:
    """The same count for kernels that are alike and overlap in time. Both are in order of start."""
    first = np.searchsorted(np.maximum.accumulate(reference_times[:, 1]), times[:, 0], side="left")
    behind = np.searchsorted(reference_times[:, 0], times[:, 1], side="right")
    count = np.maximum(behind - first, 0)
    own_row = np.repeat(np.arange(len(kind)), count)
    theirs = np.arange(len(own_row)) - np.repeat(np.cumsum(count) - count - first, count)
    meet = (kind[own_row] == reference[theirs]) & (reference_times[theirs, 1] >= times[own_row, 0])
    return np.bincount(theirs[meet] - own_row[meet] + len(kind) - 1, minlength=len(kind) + len(reference) - 1)


def _median_distance_s(shift: int, times: Floats, reference_times: Floats) -> float:
    """The median difference between the ends of the pairs that a shift makes, seconds."""
    overlap = slice(max(0, -shift), min(len(times), len(reference_times) - shift))
    return float(
        np.median(np.abs(times[overlap, 1] - reference_times[overlap.start + shift : overlap.stop + shift, 1]))
    )


def _assembled(kernels: pl.DataFrame, matched: Sequence[tuple[Ints, GroupMatches]]) -> Matches:
    rows = [rows for rows, _ in matched]
    sizes = np.array([group.matched for _, group in matched], np.int64)
    first = np.cumsum(sizes) - sizes
    row = np.concatenate([part.ravel() for part in rows]) if rows else np.empty(0, np.int64)
    instance = [np.repeat(begin + np.arange(len(part)), part.shape[1]) for begin, part in zip(first, rows, strict=True)]
    of_row = kernels.select("row", "rank", "start", "end", "collective", "short").join(
        pl.DataFrame({"row": row}), on="row", how="right", maintain_order="right"
    )
    names = of_row["collective"].fill_null(of_row["short"]).str.to_lowercase()
    rooted = np.array([_ROOTED.search(_operation(name)) is not None for name in names.to_list()], np.bool_)
    numbers = np.concatenate(instance) if instance else np.empty(0, np.int64)
    synchronising = np.ones(int(sizes.sum()), np.bool_)
    synchronising[numbers[rooted]] = False
    return Matches(
        row=row,
        instance=numbers,
        rank=of_row["rank"].to_numpy(),
        start=of_row["start"].to_numpy(),
        end=of_row["end"].to_numpy(),
        synchronising=synchronising,
        group_of=np.repeat(np.arange(len(matched)), sizes),
        groups=tuple(group for _, group in matched),
    )


def _operation(name: str) -> str:
    """The operation that the name of a collective or kernel contains: ncclDevKernel_AllReduce_Sum_f32_RING_LL ->
    allreduce.
    """
    match = re.match(r"(?:nccl|rccl)\w*?kernel_([a-z]+)", name)
    return match[1] if match else name


@dataclass(frozen=True, slots=True, eq=False)
class ClockOffsets:
    """Seconds, [ranks]: `ahead`, how far a rank's clock is ahead of the common time; `uncertainty`, one standard error.

    `collectives`: the number of collectives behind each rank's offset; 0 if there were none and its clock is trusted.
    """

    ranks: tuple[int, ...]
    ahead: Floats
    uncertainty: Floats
    collectives: Ints

    def of(self, rank: np.ndarray) -> Floats:
        """How far the clock of each of these ranks is ahead, seconds."""
        return np.asarray(self.ahead[np.searchsorted(self.ranks, rank)])


def measure_offsets(matches: Matches, ranks: tuple[int, ...]) -> ClockOffsets:
    """The offsets of all ranks."""
    telling = matches.synchronising[matches.instance]
    rank = np.searchsorted(ranks, matches.rank[telling])
    _, instance = np.unique(matches.instance[telling], return_inverse=True)
    end, count = matches.end[telling], len(ranks)
    ahead, true_end = np.zeros(count), np.zeros(0)
    for _ in range(_ROUNDS if len(end) else 0):
        true_end = _medians(end - ahead[rank], instance, int(instance.max()) + 1)
        before, ahead = ahead, _medians(end - true_end[instance], rank, count)
        if np.abs(ahead - before).max() <= _AGREED_S:
            break
    collectives = np.bincount(rank, minlength=count)
    residual = np.abs(end - true_end[instance] - ahead[rank]) if len(end) else end
    spread = _medians(residual, rank, count)
    uncertainty = np.where(collectives > 0, _ERROR_OF_MEDIAN * spread / np.sqrt(np.maximum(collectives, 1)), np.nan)
    return ClockOffsets(tuple(ranks), ahead, uncertainty, collectives)


def _medians(values: Floats, group: Ints, groups: int) -> Floats:
    """The median of the values of each group, 0 for an empty one, [groups]."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=groups)
    first = np.cumsum(counts) - counts
    medians = np.zeros(groups)
    filled = counts > 0
    low, high = first[filled] + (counts[filled] - 1) // 2, first[filled] + counts[filled] // 2
    ordered = values[order]
    medians[filled] = (ordered[low] + ordered[high]) / 2
    return medians
