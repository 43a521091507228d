#!/bin/bash
# The end of a job that task_prolog.sh recorded: makes the trace and stores it. Run it where the store can be written,
# such as in a job with --dependency=afterany:JOB. Exits with the code of `tracekit import`: nothing is drained.
# Usage: epilog.sh JOB_ID [RESTART]
set -uo pipefail
traces=${TRACEKIT_TRACES:?a folder that all nodes see}
run=$traces/${1:?the id of the job}-${2:-0}
[ -d "$run" ] || exit 0 # nobody asked for a recording
exec tracekit import "$run" --store "$traces/tracekit.store" --name "$(basename "$run")"
