"""Reader of a kept `--segments` folder of `tracekit collect`.

In: the folder, and a YAML file of sizes where the ranks did not record them. Out: the `Trace` of its last job.
"""

from __future__ import annotations

from pathlib import Path

from tracekit.base.errors import FormatError, LayoutError
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.importers.published import read_mapping
from tracekit.collectors.merge.merge import MergedAttempt, merge_attempt, merge_run
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.merge.run_facts import find_unrecorded
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.launchers import attempts
from tracekit.collectors.run_directory.segments import is_run_directory, read_clocks, read_run
from tracekit.trace.canonical import Trace
from tracekit.trace.model import TimeUnit, is_size

#: Size in the YAML file of a segments folder -> word of `LayoutOptions`.
STATED_SIZES = {"dp_size": "dp", "pp_size": "pp", "tp_size": "tp", "vpp_size": "vpp"}


def read_segments(path: Path, *, layout: Path | None = None, unit: TimeUnit | None = None) -> Trace:
    """Read the run's last job, from its first attempt on.

    `layout`: YAML with those of `STATED_SIZES` that the ranks did not record. Raises FormatError, TraceError or
    LayoutError.
    """
    if unit is not None:
        raise FormatError(f"{path}: a folder of `tracekit collect` fixes the unit of its times; leave out --unit")
    if not is_run_directory(path):
        raise FormatError(f"{path}: not a folder of `tracekit collect --segments`; it has no run.json")
    run = read_run(path)
    numbers = attempts(path)
    if not numbers:
        raise FormatError(f"{path}: no rank wrote anything; record the run again")
    options, clocks = None if layout is None else _stated_sizes(layout), read_clocks(path)

    def merge(number: int) -> MergedAttempt:
        recording = read_attempt(path, number)
        stopped = find_unrecorded(recording).stopped_line()
        for line in (*recording.left_out, *([] if stopped is None else [stopped])):
            say(f"tracekit: {printable(line)}")
        return merge_attempt(
            recording,
            name=path.absolute().name,
            first_step=run.options.first_step,
            options=options,
            clocks=clocks,
            metadata={"command": list(run.command)},
        )

    return merge_run(numbers, merge)


def _stated_sizes(path: Path) -> LayoutOptions:
    """Read the sizes in a YAML file. Raises FormatError or LayoutError, naming the file."""
    content = read_mapping(path, "dp_size: 4")
    stated = {word: content[name] for name, word in STATED_SIZES.items() if name in content}
    if not stated:
        raise LayoutError(f"{path}: states no size; expected some of {', '.join(STATED_SIZES)}, such as `dp_size: 4`")
    for word, size in stated.items():
        if not is_size(size):
            raise LayoutError(
                f"{path}: {word}_size is {size!r:.40}; expected an integer of at least 1, such as `{word}_size: 4`"
            )
    return LayoutOptions(**stated)
