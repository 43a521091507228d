"""Two writers and three readers of one store, each killed again and again at one of its file operations.

`python -m tests.faults.crowd FOLDER DEATHS` with the library of `shim.c` preloaded: until writers have died so often,
whoever dies is followed by another one. A reader finds every window that was confirmed before it began. Prints, as
JSON, what was confirmed, what readers have read, and who died how often.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.forks import start, sure
from tests.faults.shim import CHANGES, Fault, Group, What, arm
from tests.faults.sweep import FINDINGS, warm_up
from tests.handmade import slow_trace
from tracekit.store import Incoming, Store
from tracekit.store.care import damages

WRITER = Fault(What.KILL, CHANGES)
READER = Fault(What.KILL, Group.READ | Group.LOOK | Group.LOCK)
#: Within so many file operations, whoever has this fault dies.
LIVES = {WRITER: 400, READER: 4000}
REPLACED = "replaced"
Confirm = Callable[[str, int], None]


def job(name: str, first: int) -> Incoming:
    return Incoming(slow_trace((first, first + 1), name=name), name, "by hand", FINDINGS[0])


def appends(store: Store, name: str, confirm: Confirm) -> None:
    """Append a window whose steps tell its number."""
    number = len(store.windows(name))
    assert store.append(job(name, 2 * number)) == number
    confirm(name, number)


def writes_windows(store: Store, confirm: Confirm) -> None:
    appends(store, "one", confirm)


def writes_and_replaces(store: Store, confirm: Confirm) -> None:
    appends(store, "two", confirm)
    version = steps(store, REPLACED, 0)[0] + 1
    store.add([job(REPLACED, version)], replace=True)
    confirm(REPLACED, version)


def steps(store: Store, name: str, number: int) -> list[int]:
    """The steps of a window, read from its ops."""
    return sorted(store.load(name, number).ops["step"].unique())


def check(store: Store, confirmed: Mapping[str, int], chosen: Callable[[int], int]) -> None:
    """Everything confirmed is there, in a consistent state."""
    for name in ("one", "two"):
        numbers = [window.number for window in store.windows(name)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > confirmed[name], (name, len(numbers), confirmed)
        number = chosen(len(numbers))
        assert steps(store, name, number) == [2 * number, 2 * number + 1]
        assert store.report(name, number) == FINDINGS[0].report
        assert store.workers(name, number) is not None
    version, last = steps(store, REPLACED, 0)
    assert version >= confirmed[REPLACED]
    assert last == version + 1
    assert not [line for line in damages(store) if "no window names it" not in line]


def confirmed(file: Path) -> dict[str, int]:
    """The last number of each job that a writer was told of."""
    last: dict[str, int] = {}
    for name, number in map(str.split, file.read_text().splitlines()):
        last[name] = max(int(number), last.get(name, 0))
    return last


def main(folder: Path, deaths: int) -> None:
    """Let them live and die."""
    warm_up(folder)
    root, file, said = folder / "crowd", folder / "confirmed", folder / "said-by"
    root.mkdir()
    said.mkdir()
    store = Store(root / "jobs.store")
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def confirm(name: str, number: int) -> None:
        os.write(log, f"{name} {number}\n".encode())

    def begin() -> None:
        store.add([job(name, 0) for name in ("one", "two", REPLACED)])
        for name in ("one", "two", REPLACED):
            confirm(name, 0)

    def reads(store: Store, _: Confirm) -> None:
        check(store, confirmed(file), chosen.randrange)
        os.write(rounds, b".")

    def lives(role: int) -> int:
        fault, work = roles[role]
        nth = chosen.randrange(1, LIVES[fault])

        def live() -> None:
            arm(nth, fault, root)
            while True:
                work(store, confirm)

        return start(live, said / str(role))

    sure(begin)
    chosen = random.Random(0)
    rounds = os.open(folder / "rounds", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    roles = [(WRITER, writes_windows), (WRITER, writes_and_replaces), *[(READER, reads)] * 3]
    living = {lives(role): role for role in range(len(roles))}
    died = Counter[str]()
    while died["writers"] < deaths:
        process, status = os.wait()
        role = living.pop(process)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.stderr.write((said / str(role)).read_text())
            sys.exit(1)
        died["writers" if roles[role][0] is WRITER else "readers"] += 1
        living[lives(role)] = role
    for process in living:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    sure(lambda: check(store, confirmed(file), lambda count: count - 1))
    sure(lambda: store.append(job("one", 2 * len(store.windows("one")))))
    sure(lambda: check(store, confirmed(file), lambda _: 0))
    left = sure(lambda: list(damages(store)))
    files = sure(lambda: sum(len(window.files) for name in ("one", "two", REPLACED) for window in store.windows(name)))
    found = len(list(store.path.glob("jobs/*/*")))
    read = (folder / "rounds").stat().st_size
    print(
        json.dumps({"died": died, "confirmed": confirmed(file), "read": read, "damages": left, "files": [files, found]})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
