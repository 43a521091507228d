"""Importers of MegaScan, the tracer of MegatronApp: the files of its ranks, and what its script makes of them.

In: a folder of `benchmark-data-D-pipeline-P-tensor-T.json`, or the Chrome trace aggregated from them. Out: a `Trace` of
tensor-parallel rank 0 of each worker. By default, MegaScan records forwards and backwards alone; with
`--trace-granularity full`, it adds transfers, the optimizer and layers. Transfers are kept if each belongs to one
compute; if not, the graph infers them. The first iteration warms up and is left out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.paths import read_whole
from tracekit.base.stderr import say
from tracekit.base.text import quoted
from tracekit.collectors.importers.sniff import MEGASCAN_FILE
from tracekit.trace.canonical import UNIT_KEY, Trace
from tracekit.trace.model import Layout, OpKind, TimeUnit

_FORWARD, _BACKWARD = OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE
_SEND_FORWARD, _RECV_FORWARD = OpKind.FORWARD_SEND, OpKind.FORWARD_RECV
_SEND_BACKWARD, _RECV_BACKWARD = OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV
#: Scope -> kinds of op. In the steady phase of 1F1B, Megatron sends and receives at once.
_KINDS: dict[str, tuple[OpKind, ...]] = {
    "forward": (_FORWARD,),
    "forward-warmup": (_FORWARD,),
    "backward": (_BACKWARD,),
    "backward-cooldown": (_BACKWARD,),
    "send-forward": (_SEND_FORWARD,),
    "recv-forward": (_RECV_FORWARD,),
    "send-backward": (_SEND_BACKWARD,),
    "recv-backward": (_RECV_BACKWARD,),
    "send-warmup": (_SEND_FORWARD,),
    "recv-warmup": (_RECV_FORWARD,),
    "recv-extra": (_RECV_FORWARD,),
    "send-extra": (_SEND_BACKWARD,),
    "send-cooldown": (_SEND_BACKWARD,),
    "recv-cooldown": (_RECV_BACKWARD,),
    "exchange-next": (_SEND_FORWARD, _RECV_BACKWARD),
    "exchange-prev": (_SEND_BACKWARD, _RECV_FORWARD),
    "optimizer": (OpKind.OPTIMIZER,),
}
#: Transfer -> the compute that it belongs to, and whether the first end of the model has none.
_TRANSFERS = {
    _SEND_FORWARD: (_FORWARD, False),
    _RECV_FORWARD: (_FORWARD, True),
    _SEND_BACKWARD: (_BACKWARD, True),
    _RECV_BACKWARD: (_BACKWARD, False),
}
_COMPUTES = tuple(name for name, kinds in _KINDS.items() if kinds in ((_FORWARD,), (_BACKWARD,)))
_LABELS, _POSITION = ("microbatch", "model_chunk"), ("dp_rk", "pp_rk", "pp_rank", "tp_rk")
_LAYER = "transformer-layer"
_LARGEST_FILE = 1 << 31
#: Larger numbers and times (in any unit) are damage.
_LARGEST, _LONGEST = 1_000_000, 1e18
#: The largest number of stages that a message names.
_MOST_NAMED = 3
#: Times within an iteration may go back by so much: CUDA gives milliseconds as float32.
_ROUNDING_NS = 10_000
_SCHEMA = {
    "step": pl.Int64, "rank": pl.Int64, "dp_rank": pl.Int64, "pp_rank": pl.Int64, "kind": pl.String,
    "start": pl.Float64, "duration": pl.Float64, "microbatch": pl.Int64, "chunk": pl.Int64,
}  # fmt: skip
_Records = Iterable[tuple[int, dict[str, Any]]]


class _MegatronRank(Struct, frozen=True):
    """A rank and its position."""

    rank: int
    dp: int
    pp: int
    tp: int


class _Scope(Struct, frozen=True):
    """A named time of one rank."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


def read_ranks(path: Path) -> Trace:
    """The trace; positions are in the names of the files.

    Raises FormatError with the record that is damaged, or with the files that are missing.
    """
    if not path.is_dir():
        raise FormatError(f"{path}: one rank of MegaScan; give the folder that has the files of all ranks")
    matches = {file: MEGASCAN_FILE.fullmatch(file.name) for file in sorted(path.iterdir())}
    places = {file: tuple(map(int, match.groups())) for file, match in matches.items() if match is not None}
    if not places:
        raise FormatError(f"{path}: no file of MegaScan; expected benchmark-data-0-pipeline-0-tensor-0.json")
    dp, pp, tp = (1 + max(numbers) for numbers in zip(*places.values(), strict=True))
    missing = sorted(set(range(pp)) - {p for _, p, t in places.values() if t == 0})
    if missing:
        stages = ", ".join(map(str, missing[:_MOST_NAMED])) + (" ..." if len(missing) > _MOST_NAMED else "")
        raise FormatError(
            f"{path}: no file of pipeline stage {stages}, such as"
            f" benchmark-data-0-pipeline-{missing[0]}-tensor-0.json; copy the files of all ranks"
        )
    scopes = {}
    for file, (d, p, t) in places.items():
        rank = _MegatronRank((p * dp + d) * tp + t, d, p, t)  # as Megatron numbers them
        for step, records in enumerate(_iterations(_records(file))):
            scopes[rank, step] = _scopes(file, records, "rel_ts", 1)
    return _trace(scopes, path, "megascan", TimeUnit.NS)


def read_aggregated(path: Path) -> Trace:
    """The trace; positions are in its events. Raises FormatError with the event that is damaged."""
    events: defaultdict[tuple[int, int], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for number, event in enumerate(_records(path)):
        if event.get("ph") != "M":
            args = event.get("args")
            step = _count(path, number, args if isinstance(args, dict) else {}, "iteration")
            events[_count(path, number, event, "pid"), step].append((number, event))
    scopes = {where: _scopes(path, of_rank, "ts", 1000) for where, of_rank in events.items()}
    ranks: dict[int, _MegatronRank] = {}
    for pid in sorted({pid for pid, _ in scopes}):
        of_rank = [scope for (rank, _), group in scopes.items() if rank == pid for scope in group]
        noted = {key: value for scope in of_rank for key, value in scope.attributes.items()}
        stage, tensor = noted.get("pp_rk", noted.get("pp_rank", 0)), noted.get("tp_rk", 0)
        others = sum((rank.pp, rank.tp) == (stage, tensor) for rank in ranks.values())
        ranks[pid] = _MegatronRank(pid, noted.get("dp_rk", others), stage, tensor)
    return _trace(
        {(ranks[pid], step): of_step for (pid, step), of_step in scopes.items()}, path, "megascan-chrome", TimeUnit.US
    )


def _records(path: Path) -> list[dict[str, Any]]:
    """The JSON list in a file, packed or not."""
    try:
        records = json.loads(read_whole(path, _LARGEST_FILE, "record fewer iterations"))
    except ValueError as error:
        raise FormatError(f"{path}: not complete JSON ({error!s:.120}); copy it again") from None
    if not isinstance(records, list):
        raise FormatError(f"{path}: not a list of records of MegaScan")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise _damaged(path, number, f"{quoted(record)}, expected an object")
    return records


def _iterations(records: list[dict[str, Any]]) -> Iterator[_Records]:
    """The records of each complete iteration, with their numbers in the file."""
    current: list[tuple[int, dict[str, Any]]] | None = None
    for number, record in enumerate(records):
        if record.get("name") == "iteration":
            if record.get("ph") == "E" and current is not None:
                yield current
            current = [] if record.get("ph") == "B" else None
        elif current is not None:
            current.append((number, record))


def _scopes(path: Path, records: _Records, clock: str, unit_ns: int) -> list[_Scope]:
    """The scopes of one rank in one iteration. `clock`: the key of its times, `unit_ns`: their unit."""
    scopes: list[_Scope] = []
    begun: list[tuple[str, int]] = []
    latest, number = 0, 0
    for number, record in records:
        name, phase = str(record.get("name")).replace("_", "-"), record.get("ph")
        now = _nanoseconds(path, number, record, clock, unit_ns)
        attributes = args if isinstance(args := record.get("args"), dict) else record
        labels = (*_POSITION, *_LABELS) if name in _COMPUTES else _POSITION
        for label in labels if phase != "B" else ():
            if attributes.get(label) is not None:
                _count(path, number, attributes, label)
        if latest and now < latest - _ROUNDING_NS:
            raise _damaged(path, number, f"{clock} goes back, as if the rank restarted")
        latest = now
        if phase == "B":
            begun.append((name, now))
        elif phase == "X":
            took = _nanoseconds(path, number, record, "dur", unit_ns)
            scopes.append(_Scope(name, now, now + took, attributes))
        elif phase == "E":
            opened, start_ns = begun.pop() if begun else ("nothing", now)
            if opened != name:
                raise _damaged(path, number, f"{name} ends, but {opened} began last")
            scopes.append(_Scope(name, start_ns, max(now, start_ns), attributes))
    if begun:
        raise _damaged(path, number, f"{begun[-1][0]} never ends")
    return scopes


def _nanoseconds(path: Path, number: int, record: dict[str, Any], key: str, unit_ns: int) -> int:
    """A time in a record. Raises FormatError if it is none."""
    value = record.get(key)
    if not isinstance(value, int | float) or not abs(value) < _LONGEST:
        raise _damaged(path, number, f"{key} is {quoted(value)}, expected a time")
    return round(value * unit_ns)


def _count(path: Path, number: int, record: dict[str, Any], key: str) -> int:
    """A number from 0 in a record. Raises FormatError if it is none."""
    value = record.get(key)
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _damaged(path, number, f"{key} is {quoted(value)}, expected a number from 0 to {_LARGEST - 1:,}")
    return value


def _damaged(path: Path, number: int, why: str) -> FormatError:
    return FormatError(f"{path}, record {number}: damaged: {why}; copy or record it again")


def _trace(scopes: Mapping[tuple[_MegatronRank, int], list[_Scope]], path: Path, form: str, unit: TimeUnit) -> Trace:
    """The ops of the tensor-parallel rank 0 of each worker; scopes of other names are counted in the metadata."""
    first = min((step for _, step in scopes), default=0)
    if any(step > first for _, step in scopes):
        say(f"tracekit: iteration {first}, the first, is left out: it warms up")
        scopes = {where: of_step for where, of_step in scopes.items() if where[1] > first}
    begins: dict[int, int] = {}
    for (_, step), of_step in scopes.items():
        for scope in of_step:
            begins[step] = min(begins.get(step, scope.start_ns), scope.start_ns)
    rows: list[tuple[Any, ...]] = []
    other: Counter[str] = Counter()
    for (rank, step), of_step in scopes.items():
        for scope in of_step if rank.tp == 0 else ():
            start, took = (scope.start_ns - begins[step]) / 1e9, (scope.end_ns - scope.start_ns) / 1e9
            labels = [scope.attributes.get(key) if scope.name in _COMPUTES else None for key in _LABELS]
            place = (step, rank.rank, rank.dp, rank.pp)
            rows += [(*place, str(kind), start, took, *labels) for kind in _KINDS.get(scope.name, ())]
            other[scope.name] += scope.name not in _KINDS
    ops = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    if ops.filter(pl.col("kind") == _FORWARD).is_empty():
        raise FormatError(f"{path}: no complete iteration with a forward; expected records of MegaScan")
    ranks = {rank for rank, _ in scopes}
    dp, pp, tp = (1 + max(getattr(rank, axis) for rank in ranks) for axis in ("dp", "pp", "tp"))
    layout = Layout(dp=dp, pp=pp, tp=tp, vpp=1 + max(chunk or 0 for *_, chunk in rows))
    if layout.pp == 1 < layout.vpp:
        raise FormatError(f"{path}: {layout.vpp} model chunks on one pipeline stage; copy the files of all ranks")
    if not _transfers_belong(ops, layout):
        ops = ops.filter(~pl.col("kind").is_in([str(kind) for kind in _TRANSFERS]))
    order = ["step", "rank", "kind", "start"]
    ops = ops.sort(order).with_columns(seq=pl.int_range(pl.len()).over(order[:3]))
    layers = _layers(scopes, layout)
    metadata = {"format": form, UNIT_KEY: str(unit), "framework": "Megatron-LM", "other_metrics": dict(+other)}
    return Trace.from_frame(ops, layout, name=path.name.partition(".")[0], metadata=metadata | layers, source=str(path))


def _transfers_belong(ops: pl.DataFrame, layout: Layout) -> bool:
    """Whether each worker has one transfer of every kind for each compute, except perhaps at the ends of the model."""
    have = Counter(ops.select("step", "rank", "pp_rank", "kind").iter_rows())
    at_end = Counter(ops.select("step", "rank", "pp_rank", "kind", pl.col("chunk").fill_null(0)).iter_rows())
    for step, rank, stage in {key[:3] for key in have}:
        for transfer, (compute, first) in _TRANSFERS.items():
            most = have[step, rank, stage, compute]
            ends = stage == (0 if first else layout.pp - 1)
            chunk = 0 if first else layout.vpp - 1
            fewest = most - (at_end[step, rank, stage, compute, chunk] if ends else 0)
            if not fewest <= have[step, rank, stage, transfer] <= most:
                return False
    return True


def _layers(scopes: Mapping[tuple[_MegatronRank, int], list[_Scope]], layout: Layout) -> dict[str, list[int]]:
    """The layers of each stage, counted in the forwards of its first microbatch; empty if they were not recorded."""
    counts = [0] * layout.pp
    step = min(step for _, step in scopes)
    for rank in {rank for rank, _ in scopes if (rank.dp, rank.tp) == (0, 0)}:
        of_step = scopes.get((rank, step), [])
        for scope in of_step:
            if _KINDS.get(scope.name) == (_FORWARD,) and scope.attributes.get("microbatch") == 0:
                counts[rank.pp] += sum(
                    span.name == _LAYER and scope.start_ns <= span.start_ns < scope.end_ns for span in of_step
                )
    return {"layers": counts} if all(counts) else {}
