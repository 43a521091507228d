"""When a window of a running job is over, on a clock that the test turns."""

import subprocess
import sys
from pathlib import Path

from benchmarks.writtenrun import WrittenRun
from tracekit.live.windows import SETTLE_S, RanksState, ReadyWindow, WindowCutter, WindowSize


def ready(cutter: WindowCutter, now_s: float, *finished: int, first: int = 1) -> ReadyWindow | None:
    """Asks for a window of ranks 0, 1, ... that have finished the steps up to `finished`; `first`: not handed out."""
    steps = {rank: set(range(first, newest + 1)) for rank, newest in enumerate(finished)}
    return cutter.ready(RanksState(steps, dict(enumerate(finished)), range(len(finished))), now_s)


def test_a_window_of_steps_is_ready_once_every_rank_has_finished_them() -> None:
    cutter = WindowCutter(WindowSize(steps=10), late_after_s=5)
    assert ready(cutter, 0, 9, 9) is None
    assert ready(cutter, 1, 10, 9) is None
    assert ready(cutter, 2, 12, 10) == ReadyWindow(10, ())


def test_what_is_written_a_moment_behind_the_end_still_belongs_to_the_window() -> None:
    cutter = WindowCutter(WindowSize(steps=10), late_after_s=5)
    assert ready(cutter, 0, 10, 10) is None
    assert ready(cutter, SETTLE_S, 10, 10) == ReadyWindow(10, ())


def test_a_late_rank_holds_up_one_window_for_the_stated_time_and_no_later_one_until_it_has_caught_up() -> None:
    cutter = WindowCutter(WindowSize(steps=10), late_after_s=5)
    assert ready(cutter, 0, 10, 3) is None
    assert ready(cutter, 4.9, 15, 3) is None
    assert ready(cutter, 5, 15, 3) == ReadyWindow(10, (1,))
    assert ready(cutter, 8, 20, 3, first=11) is None
    assert ready(cutter, 8 + SETTLE_S, 20, 3, first=11) == ReadyWindow(20, (1,))
    assert ready(cutter, 20, 30, 30, first=21) is None
    assert ready(cutter, 21, 30, 30, first=21) == ReadyWindow(30, ())
    assert ready(cutter, 30, 40, 30, first=31) is None
    assert ready(cutter, 34.9, 40, 30, first=31) is None
    assert ready(cutter, 35, 40, 30, first=31) == ReadyWindow(40, (1,))


def test_a_rank_that_never_wrote_is_late_too() -> None:
    cutter = WindowCutter(WindowSize(steps=2), late_after_s=5)
    state = RanksState({0: {1, 2}}, {0: 2}, range(2))
    assert cutter.ready(state, now_s=0) is None
    assert cutter.ready(state, now_s=5) == ReadyWindow(2, (1,))


def test_several_windows_behind_become_one() -> None:
    """Where the analysis takes longer than a window, one of three times the length takes less time than three."""
    cutter = WindowCutter(WindowSize(steps=10), late_after_s=5)
    assert ready(cutter, 0, 37, 37) is None
    assert ready(cutter, 1, 37, 37) == ReadyWindow(30, ())


def test_a_window_of_seconds_ends_with_the_last_step_in_them_and_has_some_steps() -> None:
    cutter = WindowCutter(WindowSize(seconds=10, fewest=3), late_after_s=5)
    assert ready(cutter, 0, 1, 1) is None
    assert ready(cutter, 10, 2, 2) is None  # too few
    assert ready(cutter, 12, 3, 3) is None
    assert ready(cutter, 13, 4, 4) == ReadyWindow(3, ())
    assert ready(cutter, 22, 9, 9, first=4) is None  # it began at 13
    assert ready(cutter, 23, 9, 9, first=4) is None
    assert ready(cutter, 24, 9, 9, first=4) == ReadyWindow(9, ())


def test_the_rest_is_a_window_at_the_end() -> None:
    cutter = WindowCutter(WindowSize(steps=10), late_after_s=5)
    newest = {0: 22, 1: 21}
    assert cutter.rest(RanksState({0: {21, 22}, 1: {21}}, newest, range(2)), 0) == ReadyWindow(22, (1,))
    assert cutter.rest(RanksState({0: set(), 1: set()}, newest, range(2)), 0) is None


def test_a_window_loads_what_its_analysis_needs(written: WrittenRun, tmp_path: Path) -> None:
    written.run(range(1, 26), slow={3: 2.0})
    written.end()
    code = """
import sys
from pathlib import Path
from tracekit.live.run import LiveOptions, LiveRun
from tracekit.live.windows import WindowSize
run = LiveRun(LiveOptions(Path("run"), Path("jobs.store"), "job", WindowSize(steps=10)), lambda line: None)
run.poll()
run.finish()
print(run.counts.failed, run.counts.unanalysed, *(name for name in sys.modules if name.startswith("tracekit")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    failed, unanalysed, *loaded = done.stdout.split()
    assert (failed, unanalysed) == ("0", "0")
    assert 50 < len(loaded) <= 120
    others = "analysis.gpu", "analysis.metrics", "analysis.rl", "collectors.nccl", "commands", "dashboards"
    assert not [name for name in loaded if name.removeprefix("tracekit.").startswith(others)]
