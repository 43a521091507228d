"""Samples where the training thread of a rank is, when a watch asks.

In: the request of a watch, a small file in the folder of the attempt. Out, next to it: how often each line of code was
on the stack of the training thread. Apart from the watch for hangs, because most jobs have none.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from types import CodeType

from .session import Session
from .small_file import FollowedFile, write_whole
from .wire_format import STACK_REQUEST, STACK_SAMPLES_SUFFIX, StackRequest, rank_stem

#: Frames of a stack that are read, and lines of code that an answer has: the most frequent.
MOST_FRAMES, MOST_LINES = 64, 500
OWN_FILES = "/tracekit/collectors/record/"


class StackSampler:
    """The sampler of one rank; `look` is called several times a second, on any thread but the training thread.

    A thread of its own reads the stack, so that the training thread never stops for it.
    """

    def __init__(self, session: Session, directory: Path) -> None:
        self._session = session
        self._request = FollowedFile(directory / STACK_REQUEST)
        self._answered: int | None = None
        self._answer = directory / f"{rank_stem(session.rank)}{STACK_SAMPLES_SUFFIX}"

    def look(self) -> None:
        """Begin to answer a new request that names this rank."""
        content = None
        with contextlib.suppress(OSError):  # the next look tries again
            content = self._request.new_content()
        if content is None:
            return
        request = StackRequest.parse(content)
        if self._session.rank in request.ranks and request.id != self._answered:
            self._answered = request.id
            sampling = ("stack-samples", self._sample, request)
            threading.Thread(
                target=self._session.attempt_hook, args=sampling, name="tracekit-stacks", daemon=True
            ).start()

    def _sample(self, request: StackRequest) -> None:
        counts: dict[tuple[CodeType, int], list[int]] = {}
        samples, started_at, step = 0, time.monotonic(), self._session.step
        while samples < request.samples and time.monotonic() < started_at + request.seconds:
            frames = stack_of(self._session.thread_id)
            depths = {line: len(frames) - inner for inner, line in enumerate(frames)}  # the outermost of a recursion
            for line, depth in depths.items():
                counts.setdefault(line, [0, depth])[0] += 1
            samples += bool(frames)
            time.sleep(request.seconds / request.samples)
        lines = [
            (code.co_filename, number, code.co_name, count, depth) for (code, number), (count, depth) in counts.items()
        ]
        lines.sort(key=lambda line: -line[3])
        steps = self._session.step - step
        answer = {"id": request.id, "samples": samples, "steps": steps, "lines": lines[:MOST_LINES]}
        write_whole(self._answer, json.dumps(answer).encode())


def stack_of(thread: int) -> list[tuple[CodeType, int]]:
    """Code and line of the frames of a thread, innermost first, without those of the recorder."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  there is no public way
    frames: list[tuple[CodeType, int]] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append((frame.f_code, frame.f_lineno))  # not the frame, which keeps its variables
        frame = frame.f_back
    return [(code, line) for code, line in frames if OWN_FILES not in code.co_filename]
