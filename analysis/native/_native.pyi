import numpy as np
import numpy.typing as npt

_Bools = npt.NDArray[np.bool_]
_Bytes = npt.NDArray[np.uint8]
_Int16s = npt.NDArray[np.int16]
_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]
_Floats = npt.NDArray[np.float64]

def gather_times(
    values: _Floats, first: _Int64s, lane: _Int64s, cell: _Int64s, seq: _Int64s, begin: int, end: int, out: _Floats
) -> None:
    """Fill `out`, [rows, lanes], from `begin` to `end` of its lanes.

    `first`: where the ops of each cell of a lane begin in `values`, [all lanes, cells]. `lane`: that of each column of
    `out`; `cell`, `seq`: of each row.
    """

def gather_labels(
    values: _Int32s, first: _Int64s, lane: _Int64s, cell: _Int64s, seq: _Int64s, begin: int, end: int, out: _Int32s
) -> None:
    """Like `gather_times`, for an integer column."""

def hash_streams(start: _Floats, bounds: _Int64s, streams: _Int64s, signature: _UInt64s) -> None:
    """Fold into each lane's `signature` the order in which the kinds of each stream take turns.

    `start`: [rows, lanes]. `bounds`: rows of each kind, [parts, 2]; `streams`: where the parts of each stream begin.
    """

def replay_order(
    group: _Int32s,
    by_group: _Int32s,
    first_of_group: _Int32s,
    first_next: _Int32s,
    nexts: _Int32s,
    waits: _Int32s,
    ordered: _Int32s,
) -> int:
    """Fill `ordered`, [groups], so that each group comes after all it waits for; returns how many are in no cycle."""

def rounds(
    ordered: _Int32s,
    by_group: _Int32s,
    first_of_group: _Int32s,
    first_wait: _Int32s,
    waits_for: _Int32s,
    group: _Int32s,
    rendezvous: _Int32s,
    of_rendezvous: _Int32s,
    number: _Int32s,
) -> None:
    """Fill `number` with each group's round: after each rendezvous it depends on, not before its own one."""

def assign_buffers(
    order: _Int32s, first_of_group: _Int32s, first_wait: _Int32s, waits_for: _Int32s, unit: _Int32s, buffer: _Int32s
) -> int:
    """Fill `buffer`, [rows], reused once nothing later waits for a row; returns the number of buffers.

    Groups of one `unit` may run at the same time, so a buffer becomes free only after its unit.
    """

def rendezvous_starts(
    order: _Int32s,
    first_of_group: _Int32s,
    rendezvous: _Int32s,
    start: _Floats,
    step: _Int32s,
    rendezvous_start: _Floats,
) -> None:
    """Raise `rendezvous_start`, [rendezvous, steps], to the latest recorded start of each collective in each step."""

def transfer_durations(
    order: _Int32s,
    first_of_group: _Int32s,
    rendezvous: _Int32s,
    is_communication: _Bools,
    start: _Floats,
    step: _Int32s,
    rendezvous_start: _Floats,
    lowest: float,
    cost: _Floats,
) -> int:
    """Turn the durations of communication ops in `cost` into transfer durations.

    Values below `lowest` become 0; returns how many do.
    """

def launch_delays(
    first_wait: _Int32s, waits_for: _Int32s, start: _Floats, duration: _Floats, lowest: float, delay: _Floats
) -> int:
    """Turn recorded starts in `delay` into launch delays; values below `lowest` become 0; returns how many do."""

def critical_paths(
    first_wait: _Int32s,
    waits_for: _Int32s,
    order: _Int32s,
    first_of_group: _Int32s,
    group_of_row: _Int32s,
    rendezvous: _Int32s,
    is_communication: _Bools,
    start: _Floats,
    end: _Floats,
    first_lane: _Int64s,
    row: _Int64s,
    lane: _Int64s,
    apart: _Bools,
    counts: _Int64s,
    rows: _Int64s,
    lanes: _Int64s,
    late_rows: _Int64s,
    late_lanes: _Int64s,
) -> int:
    """Walk back from ops (`row`, `lane`), [steps], over what each op waited for longest; returns the number of ops.

    `start`, `end`: of a replay, [rows, lanes]; `first_lane`: where the lanes of each step begin, [steps + 1].
    `counts`: how many ops each path has, [steps]. `rows`, `lanes`: the ops of one path after the other, last op first;
    `late_rows`, `late_lanes`: who of its group arrived last, where the path goes on. With `apart`, [1], lanes of other
    graphs meet these, and a path ends at a rendezvous, with -1 for who arrived last.
    """

def proximal_step(
    value: _Floats,
    low: _Floats,
    high: _Floats,
    step: float,
    scale: float,
    multiplier: _Floats,
    target: _Floats,
) -> None:
    """The proximal step of the distance of each `value` to its bounds, in place: `multiplier` and `target`."""

def replay(
    order: _Int32s,
    first_of_group: _Int32s,
    first_wait: _Int32s,
    waits_for: _Int32s,
    buffer: _Int32s,
    rendezvous: _Int32s,
    is_communication: _Bools,
    matrix: _Floats,
    matrix_row: _Int64s,
    constant: _Floats,
    delay: _Floats,
    delay_row: _Int64s,
    finishing: int,
    first_new: int,
    last_new: int,
    first_lane: _Int64s,
    steps: _Int64s,
    rendezvous_start: _Floats,
    live: _Floats,
    ends: _Floats,
    starts_out: _Floats,
    ends_out: _Floats,
    changed: _Floats,
    begin: _Floats,
    choice: _Int32s,
    chosen: _Floats,
    first_choice: int,
    changed_delay: _Floats,
) -> None:
    """Replay the groups `finishing` to `last_new` for the lanes `first_lane[0]` to `first_lane[-1]`.

    Where `rendezvous_start`, [rendezvous, steps], is not empty, lanes of other templates take part: groups before
    `first_new` have started in an earlier call and only finish now; groups after it that meet other lanes only start
    and leave the time when the last of them is there in `rendezvous_start`. `steps`: its column for each run of lanes.
    `live`: [buffers, lanes]. `ends` is raised to the end of each lane; `starts_out` and `ends_out`, [rows, lanes], are
    filled unless empty. Rows of `matrix_row` beyond `matrix` are those of `changed`, [rows, lanes],
    those of `delay_row` beyond `delay` those of `changed_delay`.
    A row that waits for nothing is ready at its `begin`, [rows].

    Unless `choice`, [rows, lanes of the matrix or 1], is empty, choices from `first_choice` on replay side by side,
    each with the lanes of the matrix: ops of that choice cost what `chosen`, [rows, lanes], says, all others what
    `matrix` says.
    """

def roll_out(
    first: _Int64s,
    arrives: _Floats,
    base_s: _Floats,
    per_request_s: _Floats,
    slots: int,
    until: float,
    tokens_left: _Floats,
    tool_left: _Floats,
    end: _Floats,
) -> None:
    """Decode the requests of each engine, from `first[engine]` on in order of arrival, at most `slots` at a time.

    A decoding step takes base + per request x running. Updates the tokens and seconds of tools that are left at the
    time `until`, and the end of each request that has ended by then. Tools begin at half of the tokens.
    """

def divide_work(
    begin: _Floats,
    end: _Floats,
    first: _Int64s,
    last: _Int64s,
    start: _Floats,
    stop: _Floats,
    what: _Int32s,
    number: _Int32s,
    numbers: int,
    shortest_s: float,
    bound: _Int64s,
    did: _Int32s,
    seconds: _Floats,
    pieces: _Int32s,
) -> int:
    """Divide each op, `begin` to `end`, among the pieces `first` to `last` of its thread, `start` to `stop`.

    `number`: of each `what`, and at its end of the rest of the op, which no piece covers; there are so many `numbers`.
    The parts of op i are `bound[i]` to `bound[i + 1]`, by number: seconds, and in how many pieces; only those longer
    than `shortest_s`. Returns how many parts there are.
    """
