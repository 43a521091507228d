"""Where a training thread is, as another thread samples it."""

import json
import threading
import types

import pytest

from tracekit.collectors.record.small_file import write_whole
from tracekit.collectors.record.wire_format import STACK_REQUEST, StackRequest


def waits_here(begun, end):
    begun.set()
    end.wait()


def recurs(depth, begun, end):
    return recurs(depth - 1, begun, end) if depth else waits_here(begun, end)


@pytest.fixture
def sampler(tmp_path):
    """The sampler of rank 3, whose training thread waits in a named function."""
    from tracekit.collectors.record.stack_samples import StackSampler

    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=recurs, args=(3, begun, end))
    thread.start()
    begun.wait()
    failures = []

    def attempt_hook(_name, body, *arguments):
        try:
            body(*arguments)
        except Exception as error:
            failures.append(error)

    session = types.SimpleNamespace(
        rank=3, thread_id=thread.ident, step=7, attempt_hook=attempt_hook, failures=failures
    )
    yield StackSampler(session, tmp_path)
    end.set()
    thread.join()


def asked(sampler, folder, content):
    """Ask, and wait for what answers."""
    write_whole(folder / STACK_REQUEST, content)
    sampler._request._due = 0.0
    sampler.look()
    for thread in threading.enumerate():
        if thread.name == "tracekit-stacks":
            thread.join()
    path = folder / "rank-000003.lines"
    return json.loads(path.read_text()) if path.exists() else None


def test_the_lines_of_the_training_thread_are_counted_once_a_sample(sampler, tmp_path):
    sampler.look()  # nobody has asked
    answer = asked(sampler, tmp_path, b'{"id": 1, "ranks": [0, 3], "samples": 5, "seconds": 5e-3}')
    assert (answer["id"], answer["steps"]) == (1, 0)
    assert 1 <= answer["samples"] <= 5
    lines = {function: (hits, depth) for file, _, function, hits, depth in answer["lines"] if file == __file__}
    assert {hits for hits, _ in lines.values()} == {answer["samples"]}  # however deep it recurses
    assert lines["waits_here"][1] > lines["recurs"][1]


def test_a_request_is_answered_once_and_by_the_ranks_that_it_names(sampler, tmp_path):
    assert asked(sampler, tmp_path, b'{"id": 1, "ranks": [0, 1], "samples": 1, "seconds": 1e-3}') is None
    assert asked(sampler, tmp_path, b'{"id": 2, "ranks": [3], "samples": 1, "seconds": 1e-3}')["id"] == 2
    (tmp_path / "rank-000003.lines").unlink()
    assert asked(sampler, tmp_path, b'{"id": 2, "ranks": [3], "samples": 1, "seconds": 1e-3}') is None


def test_an_answer_that_cannot_be_written_reaches_nobody(sampler, tmp_path):
    (tmp_path / ".rank-000003.lines").mkdir()
    assert asked(sampler, tmp_path, b'{"id": 1, "ranks": [3], "samples": 1, "seconds": 1e-3}') is None
    assert len(sampler._session.failures) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"[",
        b"{}",
        b'{"id": 1, "ranks": [3], "samples": 1001, "seconds": 1}',
        b'{"id": 1, "ranks": [3], "samples": 0, "seconds": 1}',
        b'{"id": 1, "ranks": [3], "samples": 1, "seconds": 61}',
        b'{"id": 1, "ranks": [3], "samples": 1, "seconds": NaN}',
    ],
)
def test_what_is_no_request_is_refused(content):
    with pytest.raises((ValueError, TypeError)):
        StackRequest.parse(content)
