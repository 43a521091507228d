"""A user's sitecustomize, run behind the one of `tracekit collect`: says so, and breaks what SABOTAGE names.

hooks: every hook's body raises. disk: the recorder's segments refuse to be written.
"""

import os
import sys

with open(os.environ["SITECUSTOMIZE_SAYS"], "a") as file:
    file.write(f"{os.getpid()}\n")

if "tracekit.collectors.runtime.bootstrap" in sys.modules:
    from tracekit.collectors.runtime import bootstrap

    start = bootstrap._start

    def sabotaged(rank, world_size):
        session = start(rank, world_size)
        if session is not None and os.environ.get("SABOTAGE") == "hooks":

            def broken(*args, **kwargs):
                raise LookupError("sabotage")

            for name in (
                "begin_op",
                "name",
                "record",
                "record_compute",
                "hold",
                "flush_held",
                "optimizer_begins",
                "optimizer_ended",
            ):
                setattr(session, name, broken)
        if session is not None and os.environ.get("SABOTAGE") == "disk":

            def full():
                raise OSError(28, "No space left on device")

            session.recorder._open_segment = full
        return session

    bootstrap._start = sabotaged
