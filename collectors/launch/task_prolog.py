"""Switches recording on from Slurm's TaskProlog, for jobs whose commands nobody changes (deploy/slurm).

In: the folder for the run. Out: lines `export NAME=value`, which Slurm puts into the environment of the task; at the
end, `tracekit import FOLDER` makes the trace. Whatever fails, the task runs, unrecorded. Imports the standard library
only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tracekit.collectors.launch.launcher import prepare_run
from tracekit.collectors.launch.record import stacks_allowed
from tracekit.collectors.record.wire_format import ENV_DIRECTORY, ENV_OPTIONS, RuntimeOptions


def main() -> None:
    """Print the variables. On failure, print a line for the task's output instead."""
    parser = argparse.ArgumentParser(prog="python -m tracekit.collectors.launch.task_prolog", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run, which all its nodes see")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="record one step in N")
    asked = parser.parse_args()
    try:
        options = RuntimeOptions(every=asked.every, stacks=stacks_allowed())
        environment = prepare_run(asked.folder.absolute(), options, ["TaskProlog"])
    except Exception as error:  # a prolog that fails ends the job
        sys.stdout.write(f"print tracekit: not recorded: {' '.join(str(error).split())}\n")
        return
    for name in ("PYTHONPATH", ENV_DIRECTORY, ENV_OPTIONS):
        sys.stdout.write(f"export {name}={environment[name]}\n")


if __name__ == "__main__":
    main()
