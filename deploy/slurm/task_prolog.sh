#!/bin/bash
# TaskProlog (slurm.conf): records the jobs of users who ask for it with `export TRACEKIT_TRACES=/shared/traces`, and
# changes nothing of their commands. Whatever goes wrong, the task runs.
[ -n "${TRACEKIT_TRACES:-}" ] || exit 0
timeout 10 "${TRACEKIT_PYTHON:-python3}" -m tracekit.collectors.launch.task_prolog \
  --every "${TRACEKIT_EVERY:-10}" "$TRACEKIT_TRACES/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" 2>/dev/null ||
  echo "print tracekit: not recorded: ${TRACEKIT_PYTHON:-python3} has no tracekit-collect"
exit 0
