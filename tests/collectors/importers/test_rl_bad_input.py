"""Logs of post-training as they are found: cut off, wrapped by consoles, of several runs, with words for times."""

import codecs
import gzip
import json
import os

import pytest

from tests.analysis.rl.logs import lines, write
from tests.cases import case
from tests.handmade import run
from tracekit.base.errors import FormatError
from tracekit.collectors.importers import rl_logs
from tracekit.collectors.importers.rl_logs import read_rl

#: Seconds of a step.
TIMES = {"gen": 30.0, "update_actor": 10.0, "step": 45.0}


def record(step, **times):
    return json.dumps({"step": step, "data": {f"timing_s/{name}": value for name, value in (TIMES | times).items()}})


def printed(step):
    return f"step:{step} - " + " - ".join(f"timing_s/{name}:{value}" for name, value in TIMES.items())


VERL = "".join(f"{record(step)}\n" for step in range(1, 4))
CONSOLE = "".join(f"{printed(step)}\n" for step in range(1, 4))


def test_a_log_in_another_wrapping_reads_the_same(tmp_path):
    prefixes = {"ray": "(TaskRunner pid=7, ip=10.0.0.1) ", "old ray": "(pid=7) ", "a clock": "2026-01-05T10:00:00Z "}
    wrapped = {name: "".join(f"{prefix}{line}\n" for line in CONSOLE.splitlines()) for name, prefix in prefixes.items()}
    configuration = "(TaskRunner pid=7) {'actor_rollout_ref': {'actor': {'ppo_epochs': 1}}}\n"
    for name, content in {
        **wrapped,
        "a byte order mark": codecs.BOM_UTF8.decode() + VERL,
        "Windows": VERL.replace("\n", "\r\n"),
        "progress bars": "".join(f"\r{step} of 3\r{line}" for step, line in enumerate(CONSOLE.splitlines(), 1)),
        "a configuration": configuration + CONSOLE,
        "a validation": '{"step": 0, "data": {"val-core/acc": 0.5}}\n' + VERL,
        "a line that is being written": VERL + record(4)[:-9],
        "no end of line": VERL + record(4).replace("}}", ', "kl": NaN}}'),
    }.items():
        with case(name):
            (tmp_path / "log").write_text(content)
            log = read_rl([tmp_path / "log"])
            assert set(log.step_s.tolist()) == {45.0}
            assert set(log.phases["generate"].tolist()) == {30.0}
            assert len(log.step_s) == (4 if name == "no end of line" else 3)


def test_a_process_that_was_killed_leaves_its_last_line_out(tmp_path):
    """Whichever file it is of several."""
    parts = [write(tmp_path / f"{part}.jsonl", lines()[part::2]) for part in (0, 1)]
    for cut, other in (parts, parts[::-1]):
        whole = cut.read_text()
        cut.write_text(whole.rstrip()[:-5])
        with case(cut.name):
            timeline = read_rl([cut, other])
            assert len(timeline.phases.step) + len(timeline.trajectories.step) == len(lines()) - 1
        cut.write_text(whole)


def test_what_cannot_be_read_is_named(tmp_path):
    openrlhf = "Global step 1: {'timing/generation': 3.0, 'timing/step_total': 4.0}\n"
    for name, content, message in (
        ("two frameworks", CONSOLE + openrlhf, "logs of openrlhf, verl; give the files of one run"),
        ("a word for a time", VERL + record(4, gen="30") + "\n", "step 4: gen is no number"),
        ("no time at all", VERL + record(4, gen=None) + "\n", "step 4: gen is no number"),
        ("a broken line", record(1)[:-9] + "\n" + VERL, "is no record of verl's FileLogger"),
        ("a cut file", record(1)[:-9], "an empty file"),
    ):
        with case(name):
            (tmp_path / "log").write_text(content)
            with pytest.raises(FormatError, match=f"{tmp_path / 'log'}.*{message}"):
                read_rl([tmp_path / "log"])


def test_trajectories_that_contradict_themselves_are_named(tmp_path):
    first = json.loads(
        next(line for line in write(tmp_path / "log", lines()).read_text().splitlines() if "tokens" in line)
    )
    for change, message in (
        ({"end": first["start"] - 1}, "trajectory '0-0' of step 0 ends at -1.0 s, before it starts at 0.0 s"),
        ({"end": 10.0, "tool_s": 10.2}, "trajectory '0-0' of step 0 takes 10.0 s, of which 10.2 s in tools"),
        ({"tokens": 0}, "no trajectory has tokens"),
    ):
        with case(message), pytest.raises(FormatError, match=f"{tmp_path / 'log'}: {message}"):
            read_rl([write(tmp_path / "log", [first | change])])
    read_rl([write(tmp_path / "log", [first | {"end": 10.0, "tool_s": 10.05}])])  # clocks agree to 1 %


def test_a_compressed_log_says_what_to_do(tmp_path):
    (tmp_path / "log.gz").write_bytes(gzip.compress(VERL.encode()))
    with pytest.raises(FormatError, match="compressed; unpack it first"):
        read_rl([tmp_path / "log.gz"])


def test_a_folder_stands_for_its_records(tmp_path):
    with pytest.raises(FormatError, match="a folder without"):
        read_rl([tmp_path])
    for part in (0, 1):
        write(tmp_path / f"{part}.jsonl", lines()[part::2])
    (tmp_path / "notes.txt").write_text("not a log")
    assert len(read_rl([tmp_path]).trajectories.step) == 12


def test_a_pipe_is_refused_unread(tmp_path):
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    ran = run("rl", tmp_path / "pipe")
    assert (ran.code, ran.out) == (2, "")
    assert "a pipe or a device, not a file" in ran.message


def test_errors_name_the_file_and_its_line(tmp_path):
    good, bad = write(tmp_path / "good.jsonl", lines()), write(tmp_path / "bad.jsonl", lines()[:2])
    bad.write_text(bad.read_text() + '{"phase": 7}\n')
    with pytest.raises(FormatError, match=rf"{bad}, line 3: "):
        read_rl([good, bad])


def test_a_line_that_is_no_record_among_those_of_a_file_logger_is_named(tmp_path):
    """The line of step 2 was broken right after its brace, and its rest is a line of its own."""
    records = [json.dumps({"step": step, "data": {"timing_s/gen": 2.0, "timing_s/step": 3.0}}) for step in range(4)]
    records[2] = "{ garbage\n" + records[2][1:]
    log = tmp_path / "verl.jsonl"
    log.write_text("\n".join(records))
    with pytest.raises(FormatError, match=rf"{log}, line 3: '{{ garbage' is no record of verl's FileLogger"):
        read_rl([log])


def test_a_line_of_nothing_but_punctuation_takes_no_time(tmp_path):
    """Time that grows with the square of its length would take hours."""
    (tmp_path / "log").write_text("=" * 1_000_000 + "{" * 1_000_000 + "\n" + CONSOLE)
    assert len(read_rl([tmp_path / "log"]).step_s) == 3


def test_the_format_can_be_stated(tmp_path):
    (tmp_path / "log").write_text("{'timing/generation': 1}\n" + VERL)
    assert json.loads(run("rl", tmp_path / "log", "--format", "verl", "--json").out)["job"]["steps"] == 3


@pytest.mark.parametrize("gen", ["1e308", "1e400", "9" * 400])
def test_a_time_beyond_all_reason_is_one_error(tmp_path, gen):
    (tmp_path / "log").write_text(VERL.replace("30.0", gen))
    with pytest.raises(
        FormatError, match=r"step 1: gen took \S+ s; expected a time of at least 0 and at most 1e\+12 s"
    ):
        read_rl([tmp_path / "log"])


def test_a_log_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_logs, "_LARGEST_FILE", 4000)
    path = tmp_path / "log"
    path.write_text(VERL)
    assert read_rl([path]).steps.tolist() == [1, 2, 3]
    path.write_text(VERL + "a line\n" * 1000)
    with pytest.raises(FormatError, match="log: larger than 0 GiB; give fewer steps"):
        read_rl([path])


def test_a_step_beyond_all_numbers_is_one_error(tmp_path):
    (tmp_path / "log").write_text(f"step:{1 << 31} - timing_s/gen:60.0 - timing_s/step:100.0\n")
    with pytest.raises(FormatError, match="step 2147483648; expected a number of at least 0 and below 2147483648"):
        read_rl([tmp_path / "log"])
    (tmp_path / "log").write_text(VERL.replace('"step": 1,', '"step": 1e400,'))
    with pytest.raises(FormatError, match=r"line 1: .* is no record of verl's FileLogger"):
        read_rl([tmp_path / "log"])
