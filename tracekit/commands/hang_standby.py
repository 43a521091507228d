"""The process that `tracekit collect --hang-after` keeps ready to write reports: answers of stuck ranks in, reports
out.

It imports the analysis in advance. In, on stdin: a line of JSON per report, with the `folder` for it and the `attempt`
whose answers to gather there first (null: the dumps are there already); `ended_ns` is when processes were seen to end.
It ends with its input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tracekit.analysis.hang.hang_culprits import find_hang
from tracekit.collectors.importers.flight_recorder import read_flight_records
from tracekit.collectors.launch.hang_answers import gather
from tracekit.commands.hang import write_report
from tracekit.dashboards.terminal.hang_lines import report_lines


def main() -> None:
    """Write reports until there is no more input."""
    for line in sys.stdin:
        about = json.loads(line)
        folder = Path(about["folder"])
        if about["attempt"] is not None:
            gather(Path(about["attempt"]), folder, dict(about["ended_ns"]))
        report = find_hang(read_flight_records(folder))
        write_report(folder, list(report_lines(report)), report.to_dict())


if __name__ == "__main__":
    main()
