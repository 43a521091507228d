"""Every operation that changes a store, with a fault at each of its file operations in turn.

A process that has imported everything, and started no thread, forks for each of them: the operation runs in one fork,
and what is left is judged in another one, which knows nothing of the first. `python -m tests.faults.sweep FOLDER
[OPERATION/FAULT ...]` with the library of `shim.c` preloaded prints a line of JSON for each operation and fault.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.forks import forked, import_all, sure
from tests.faults.power import COPY, POWER, unsynced
from tests.faults.shim import FAULTS, Fault, What, arm, disarm
from tests.handmade import findings_of, slow_trace
from tests.older_stores import as_version_6
from tests.reports import hang_with
from tracekit import cli
from tracekit.analysis.hang.hang_report import HangReport
from tracekit.base.errors import StoreError, TracekitError
from tracekit.report.findings import AppliedFix, Findings
from tracekit.store import Incoming, Store, WindowPart
from tracekit.store.care import DROPPED, damages, repair
from tracekit.store.incidents import IncidentChange

State = dict[tuple[Any, ...], tuple[Any, ...]]
DAMAGED = "damaged"
#: The job, and the words, of those who write next.
NEXT = "next"
#: The part of a temporary file's name that is another one each time.
_RANDOM = re.compile(r"(?<=-)[0-9a-f]{8}(?=$|\.)")


@dataclass(frozen=True)
class Place:
    """The folders of one try: `store` changes, `outside` lies beside it and has the traces."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "jobs.store"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def said(self) -> Path:
        return self.root.parent / "said"

    @property
    def log(self) -> Path:
        return self.root.parent / "log"


@dataclass(frozen=True)
class Operation:
    """One way to change a store.

    `spoil`: what is done to the store beforehand. `steps`: it is done in several steps, each whole or not at all; what
    is neither before nor after must be a mixture of both. `leaves`: what it could not read stays, with a line, and it
    ends well.
    """

    run: Callable[[Place], object]
    spoil: Callable[[Place], object] = lambda _: None
    steps: bool = False
    leaves: bool = False


@dataclass
class Outcome:
    """What became of an operation: `tries` with a fault, and the faults that it survived by `ending`."""

    operation: str
    fault: str
    tries: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    repaired: int = 0
    wrong: list[str] = field(default_factory=list)


# ---- what a store holds


def state(path: Path) -> State:
    """Everything that readers of a store see but times, and the bytes of its files."""
    store = Store(path)
    if not store.is_store():
        return {}
    found: State = {}
    with store.reading() as catalogue:
        assert {job.name for job in catalogue.jobs()} == {window.job for window in catalogue.windows()}
        for window in catalogue.windows():
            key = (window.job, window.number)
            found["window", *key] = (window.kind, window.first_step, window.last_step, window.ops, window.problem)
            for part, file in window.files.items():
                content = store.folder().file(window.job_id, window.number, part).read_bytes()
                whole = (len(content), zlib.crc32(content)) == (file.bytes, file.crc32)
                found[part, *key] = (file.crc32 if whole else DAMAGED,)
        for incident in store.incidents():
            number = incident.incident_id
            found["incident", number] = (incident.job, incident.cause.what, incident.closed_because)
            for place, change in enumerate(store.handled(number)):
                found["handled", number, place] = (change.by, change.owner, change.note)
        for job in catalogue.jobs():
            if (WindowPart.OPS, job.name, 0) in found:
                assert store.load(job.name, 0).ops.height == found["window", job.name, 0][3]
        found |= {("watched", name): () for name in ("old", "other", "new", "hung") if catalogue.live.is_watched(name)}
    try:
        found |= {("hang", hang.job, hang.lines): (json.dumps(hang.report.to_dict()),) for hang in store.hangs()}
    except StoreError:
        found["hang", DAMAGED] = ()
    for fix in store.applied():
        found["applied", fix.before, fix.title] = (fix.after,)
    return found


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """What is in the files of a folder, with their modes and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (at.st_mode, at.st_mtime_ns, content)
    return found


# ---- operations


def command(*arguments: str | Path) -> NoReturn:
    """Run a command of tracekit."""
    sys.argv = ["tracekit", *map(str, arguments)]
    cli.main()
    raise AssertionError("a command ends the process")


def told(call: Callable[[], object]) -> None:
    """Run what only the library does, with the exit codes and the line of a command."""
    try:
        call()
    except TracekitError as error:
        print(f"tracekit: {error}", file=sys.stderr)
        sys.exit(2)


FINDINGS: list[Findings] = []


def item(name: str, first: int = 0) -> Incoming:
    return Incoming(slow_trace((first, first + 1), name=name), name, "by hand", FINDINGS[0])


def fix(title: str) -> AppliedFix:
    return AppliedFix(1.0, "me", "old", "other", "bad-worker", title, "step", 0.1, 0.01, 0.1, 0.0, 0.2, 5.0)


def hang(rank: int) -> tuple[list[str], HangReport]:
    return [f"HANG  rank {rank}"], hang_with({"rank": rank})


def watch_ends(place: Place) -> None:
    told(lambda: Store(place.store).end_watch("old", "ended with exit code 1"))


def damage(place: Place) -> None:
    """A damaged report, a file that no window names, and a damaged report on a hang."""
    jobs = place.store / "jobs"
    first = next(jobs.glob("1/0.report.json"))
    first.write_bytes(first.read_bytes()[:-100])
    (jobs / "1" / "77.parquet").write_bytes(b"nobody's")
    (place.store / "hangs" / "20260101-000000-000000-damaged.json").write_text("{")


def lose_catalogue(place: Place) -> None:
    (place.store / "catalog.duckdb").unlink()


OPERATIONS = {
    "first import": Operation(
        lambda place: command("import", place.outside / "new.parquet", "--no-analysis", "--store", place.store),
        lambda place: shutil.rmtree(place.store),
    ),
    "import": Operation(
        lambda place: command(
            "import", place.outside / "new.parquet", place.outside / "hung.parquet", "--store", place.store
        )
    ),
    "replace": Operation(
        lambda place: command("import", place.outside / "other.parquet", "--replace", "--store", place.store)
    ),
    "append": Operation(lambda place: told(lambda: Store(place.store).append(item("old", 4)))),
    "begin a watch": Operation(lambda place: told(lambda: Store(place.store).begin_watch("new", "by hand"))),
    "end a watch": Operation(watch_ends),
    "prune": Operation(lambda place: command("store", "prune", place.store, "--max-size", "0")),
    "prune by age": Operation(lambda place: command("store", "prune", place.store, "--older-than", "0m"), steps=True),
    "repair": Operation(lambda place: command("store", "repair", place.store), damage, steps=True, leaves=True),
    "repair of an older store": Operation(
        lambda place: command("store", "repair", place.store),
        lambda place: as_version_6(Store(place.store)),
        steps=True,
    ),
    "repair without a catalogue": Operation(
        lambda place: command("store", "repair", place.store), lose_catalogue, steps=True
    ),
    "handle": Operation(
        lambda place: command("store", "handle", "1", "--store", place.store, "--owner", "B", "--note", "second")
    ),
    "hang": Operation(lambda place: told(lambda: Store(place.store).add_hang("hung", *hang(2))), steps=True),
    "note a fix": Operation(lambda place: told(lambda: Store(place.store).note_applied(fix("second")))),
}


def base(place: Place) -> None:
    """A store with something of everything, and traces beside it."""
    place.outside.mkdir(parents=True)
    for name in ("new", "hung", "other"):
        slow_trace((7, 8), name=name).write_parquet(place.outside / f"{name}.parquet")
    (place.outside / "folder").mkdir()
    (place.outside / "folder" / "file").write_text("stays")
    store = Store(place.store)
    store.begin_watch("old", "by hand")
    store.append(item("old"))
    store.append(item("old", 2))
    store.append(item("other"))
    store.add_hang("old", *hang(1))
    store.handle(1, IncidentChange(1.0, "me", "A", None, "first"))
    store.note_applied(fix("first"))


# ---- the judgement


class Sweep:
    """One operation with all faults, in a folder of its own."""

    def __init__(self, folder: Path, operation: str) -> None:
        self.name, self.operation = operation, OPERATIONS[operation]
        self.start, self.place = Place(folder / "start"), Place(folder / "try")
        sure(lambda: base(self.start))
        sure(lambda: self.operation.spoil(self.start))
        self.outside = everything(self.start.outside)
        self.renew()
        self._judged: dict[tuple[bool, int], list[str]] = {}
        self.before: State = {}
        if operation != "repair without a catalogue":
            self.before = sure(lambda: state(self.place.store))
        code, count = self.run(0, FAULTS["killed"])
        assert code == 0, self.place.said.read_text()
        assert count, "no file operation was counted"
        self.after: State = sure(lambda: state(self.place.store))
        assert self.after != self.before or operation.startswith("prune")

    def renew(self) -> None:
        shutil.rmtree(self.place.root, ignore_errors=True)
        shutil.copytree(self.start.root, self.place.root)

    def run(self, nth: int, fault: Fault) -> tuple[int, int | None]:
        """Run the operation; returns its exit code, and the operations counted unless it was killed."""

        def run() -> int:
            log = os.open(self.place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            arm(nth, fault, self.place.root, log)
            try:
                self.operation.run(self.place)
            except SystemExit as left:
                if left.code:
                    sys.stderr.flush()
                    print(f"\n{disarm()}", end="", file=sys.stderr)
                    raise
            return disarm()

        code, count = forked(run, self.place.said)
        if count is None and code > 0 and (words := self.place.said.read_text().rpartition("\n"))[2].isdecimal():
            count = int(words[2])
            self.place.said.write_text(words[0])
        return code, count

    def with_fault(self, name: str, every: int = 1) -> Outcome:
        """All operations of the kind, or each `every`-th, fail once."""
        outcome, nth = Outcome(self.name, name), 1
        while True:
            self.renew()
            code, count = self.run(nth, FAULTS[name])
            if count is not None and count < nth:
                return outcome
            outcome.tries += 1
            ending = "killed" if code == -signal.SIGKILL else f"exit code {code}"
            outcome.endings[ending] = outcome.endings.get(ending, 0) + 1
            problems, repaired = self.judge(code)
            outcome.repaired += repaired
            hit = self.place.log.read_text().splitlines()[0].replace(f"{self.place.store}/", "")
            if code == 0 and FAULTS[name].what is What.FAIL and hit.startswith("sync\t") and ".wal" not in hit:
                problems.append("says that all went well")
            outcome.wrong += [f"n={nth}, {hit!r}: {ending}: {problem}" for problem in problems]
            nth += every

    def judge(self, code: int) -> tuple[list[str], bool]:
        """What is wrong after the operation ended with `code`, and whether the store needed a repair."""
        problems = []
        words = self.place.said.read_text()
        if code == 2 and len(words.strip().splitlines()) != 1:
            problems.append(f"not one sentence: {words!r:.800}")
        if code not in (0, 2, -signal.SIGKILL):
            problems.append(f"ended with {code}: {words!r:.1500}")
        if everything(self.place.outside) != self.outside:
            problems.append("something outside the store changed")
        if {path.name for path in self.place.root.iterdir()} - {"jobs.store", "outside"}:
            problems.append(f"left beside the store: {sorted(path.name for path in self.place.root.iterdir())}")
        judged = self._judged.get(key := (code == 0, self.digest()))
        if judged is None:
            judged_code, judged = forked(lambda: list(self.left(code)), self.place.said)
            if judged is None:
                judged = [f"cannot be judged: {judged_code}: {self.place.said.read_text()[-1500:]}"]
            self._judged[key] = judged
        return [*problems, *(line for line in judged if line != "repaired")], "repaired" in judged

    def digest(self) -> int:
        """A number for what is in the store; an unfinished copy of the catalogue differs in its times each time."""
        files = sorted(
            (_RANDOM.sub("", name), mode, len(content) if COPY in name else content)
            for name, (mode, _, content) in everything(self.place.store).items()
        )
        return hash(tuple(files))

    def left(self, code: int) -> Iterator[str]:
        """What is wrong with the store, read by a process that knows nothing of the operation."""
        store = Store(self.place.store)
        lost_catalogue = self.name == "repair without a catalogue" and not self.catalogue().exists()
        if not lost_catalogue:
            found = state(self.place.store)
            yield from self.compared(found, code, "")
            if store.is_store():
                list(damages(store))
            yield from self.next_writers(store, hangs=("hang", DAMAGED) not in found)
        if self.name.startswith("repair") or list(damages(store)):
            repair(store, findings_of)
            yield "repaired"
            if problems := list(damages(store)):
                yield f"repair leaves: {problems}"
        found = {key: value for key, value in state(self.place.store).items() if NEXT not in (*key, *value)}
        yield from self.compared(found, code, "after the next writers, ")
        names = {path.name for path in self.place.store.iterdir()}
        expected = {"tracekit-store", ".catalog.duckdb.lock", "catalog.duckdb", "jobs", "hangs", "handled", "left-out"}
        if names - expected:
            yield f"files left in the store: {sorted(names - expected)}"

    def next_writers(self, store: Store, *, hangs: bool) -> Iterator[str]:
        """Whatever is written next is there, and nothing that a killed writer left becomes a part of it.

        `hangs`: whether the reports on hangs can be read.
        """
        store.append(Incoming(slow_trace(name=NEXT), NEXT, "by hand"))
        store.add_hang(NEXT, [NEXT], hang_with(hang=False))
        store.note_applied(fix(NEXT))
        for incident in store.incidents():
            store.handle(incident.incident_id, IncidentChange(2.0, "me", None, None, NEXT))
            if store.handled(incident.incident_id)[-1].note != NEXT:
                yield "the next change of an incident is lost"
        if store.applied()[-1].title != NEXT:
            yield "the next fix is lost"
        if hangs and not any(hang.job == NEXT for hang in store.hangs()):
            yield "the next report on a hang is lost"

    def catalogue(self) -> Path:
        return self.place.store / "catalog.duckdb"

    def compared(self, found: State, code: int, when: str) -> Iterator[str]:
        """What is neither as before nor as after the operation."""
        wanted = [self.after] if code == 0 and not self.operation.leaves else [self.before, self.after]
        if found in wanted:
            return
        out = {zlib.crc32(file.read_bytes()) for file in self.place.store.glob("left-out/*/*/*")}
        moved = {key[1:] for key, value in self.after.items() if key[0] == WindowPart.OPS and value[0] in out}
        bare = {key[1:] for key, value in found.items() if key[0] == "window" and value[-1] == DROPPED}
        for key in sorted({*found, *self.before, *self.after}, key=str):
            if key[1:] in bare and key[0] in ("window", WindowPart.REPORT, WindowPart.WORKERS):
                continue  # a repair has dropped its report, and the next one makes it anew
            if key[1:] in moved and key not in found:  # a repair could not read its ops: they are there, and named
                continue
            values = [one.get(key) for one in wanted]
            if found.get(key) not in values or (not self.operation.steps and found.get(key) != values[0]):
                yield f"{when}{key}: is {found.get(key)!r:.200}, not {' or '.join(f'{one!r:.200}' for one in values)}"

    def without_power(self) -> Outcome:
        """What a power failure may take: whatever is not synced when the catalogue names it, or at the end."""
        self.renew()
        code, count = self.run(0, FAULTS["killed"])
        assert code == 0
        wrong = unsynced(self.place.log.read_text().splitlines(), self.place.store)
        return Outcome(self.name, POWER, count or 0, {"exit code 0": 1}, wrong=list(wrong))


def warm_up(folder: Path) -> None:
    """Import what the operations import, and analyse the hand-made job once."""

    def pilot() -> tuple[set[str], Findings]:
        from tracekit.analysis.job.pipeline import PipelineJob

        before = set(sys.modules)
        findings = PipelineJob(slow_trace()).stored()
        assert isinstance(findings, Findings)
        FINDINGS.append(findings)
        place = Place(folder / "pilot")
        base(place)
        state(place.store)
        for operation in ("import", "prune", "repair"):
            with suppress(SystemExit):
                OPERATIONS[operation].run(place)
        return set(sys.modules) - before, findings

    code, result = forked(pilot, folder / "said")
    assert code == 0, (folder / "said").read_text()
    modules, findings = result
    FINDINGS.append(findings)
    import_all(modules)


def main(folder: Path, chosen: list[str], every: int) -> None:
    """Print the outcome of each pair of an operation and a fault."""
    warm_up(folder)
    for name in OPERATIONS:
        faults = [
            fault for fault in (POWER, *FAULTS) if not chosen or f"{name}/{fault}" in chosen or f"{name}/" in chosen
        ]
        if faults:
            (folder / name).mkdir()
            sweep = Sweep(folder / name, name)
            for fault in faults:
                outcome = sweep.without_power() if fault == POWER else sweep.with_fault(fault, every)
                print(json.dumps(asdict(outcome)), flush=True)
            shutil.rmtree(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
