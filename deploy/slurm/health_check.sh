#!/bin/bash
# Whether the last jobs of the store show this node's hardware at fault. Exits with 1 and one line if they do, with 0
# if they do not or if that is not known. It drains nothing: that is for whoever calls it to decide.
# With TEXTFILES (the folder of node_exporter's textfile collector), it writes the answer there, too.
set -uo pipefail
store=${TRACEKIT_STORE:?the store that collect or watch writes}
node=${SLURMD_NODENAME:-$(hostname -s)}
query="SELECT coalesce(string_agg(DISTINCT job, ' '), '') AS jobs FROM findings JOIN windows USING (job, \"window\")
  WHERE hosts = ['${node//\'/\'\'}'] AND findings.part IN ('compute', 'process', 'network') AND trustworthy
  AND findings.share >= 0.05 AND findings.confidence >= 0.9 AND added_at > now()::TIMESTAMP - INTERVAL ${HOURS:-24} HOUR"
jobs=$(timeout 60 tracekit store sql "$query" --store "$store" --csv 2>/dev/null | tail -n +2 | tr -d '"\r')
if [ -n "${TEXTFILES:-}" ]; then
  {
    echo "# HELP tracekit_node_at_fault 1 if the last jobs show this node's hardware at fault, else 0"
    echo "# TYPE tracekit_node_at_fault gauge"
    echo "tracekit_node_at_fault $([ -n "$jobs" ] && echo 1 || echo 0)"
  } >"$TEXTFILES/tracekit.prom.$$" && mv "$TEXTFILES/tracekit.prom.$$" "$TEXTFILES/tracekit.prom"
fi
[ -z "$jobs" ] && exit 0
echo "tracekit: $node was slow in $jobs"
exit 1
