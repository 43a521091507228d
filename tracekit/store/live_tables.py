"""The tables that alerts, metrics and the history of a job need.

In: a connection to a catalogue, and the findings of a window. Out: rows, incidents, the history of a job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
from msgspec.json import encode

from tracekit.costs import ClaimedCosts, stored_costs
from tracekit.report.conclusions import SMALLEST_ALARMING_SHARE
from tracekit.report.findings import Findings
from tracekit.report.report import Report
from tracekit.store.catalogue_file import insert, naive
from tracekit.store.catalogue_rows import GPUS, WrittenWindow, frame, stored_account
from tracekit.store.incidents import CLEAR_WINDOWS, Incident
from tracekit.trace.model import EARLIEST_S

if TYPE_CHECKING:
    import duckdb

#: The number of a window's causes in the catalogue; its report has all of them.
MOST_CULPRITS = 4
#: Columns of `culprits`, and fields of `Account`.
_OF_CULPRITS = ("kind", "part", "ranks", "hosts", "gpu_uuids", "cost_s", "share", "confidence")
#: Columns of `incidents`, and fields of `Incident`.
_OF_INCIDENTS = ("opened_at", "opened_window", "seen_window", "clear", "closed_at", "closed_window")
_OR_REPLACE = "INSERT OR REPLACE"

#: The free metadata of a window as JSON, and the tokens of its mean step and its last loss there.
_METADATA = "CASE WHEN json_valid(metadata) THEN metadata::JSON ELSE '{}'::JSON END"
_TOKENS = "try_cast(coalesce(facts->>'tokens_per_step', facts->>'label_tokens_per_step') AS DOUBLE)"
_LOSS = "try_cast(facts->>'loss' AS DOUBLE)"
_HISTORY = f"""
SELECT * EXCLUDE facts, {_TOKENS} / recorded_s AS tokens_per_s, {_LOSS} AS loss
FROM (
    SELECT windows.number, windows.first_step, windows.last_step, epoch(windows.added_at) AS added_at,
           windows.started_at, windows.ended_at, windows.slowdown, windows.recorded_s, windows.trustworthy,
           windows.problem, findings.verdict, findings.headline, findings.share, {_METADATA} AS facts
    FROM windows JOIN jobs USING (job_id) LEFT JOIN findings USING (job_id, number)
    WHERE jobs.name = $name AND ($last IS NULL OR windows.number <= $last)
    ORDER BY windows.number DESC LIMIT $most
) ORDER BY number DESC
"""  # noqa: S608 - our own expressions
#: The newest windows around a given one: half of them after it, more if there are few before it.
_LAST_AROUND = """
WITH numbers AS (SELECT number FROM windows JOIN jobs USING (job_id) WHERE jobs.name = $name)
SELECT max(number) FROM (
    (SELECT number FROM numbers WHERE number >= $around ORDER BY number LIMIT $half)
    UNION ALL
    (SELECT number FROM numbers ORDER BY number LIMIT $most)
)
"""
_INCIDENTS = """
SELECT incident_id, jobs.name, cause, opened_at, opened_window, seen_window, clear, closed_at, closed_window,
       CASE WHEN watches.job_id IS NULL OR watches.ended_at IS NOT NULL
            THEN coalesce(ending, CASE WHEN watches.ended_at IS NOT NULL THEN 'ended' END) END AS ending,
       beginnings.first_step, since, seen.ended_at + coalesce(seen.recorded_s, 0) - coalesce(since, opened.started_at),
       seen.last_step - coalesce(beginnings.first_step, opened.first_step) + 1
FROM incidents JOIN jobs USING (job_id) LEFT JOIN watches USING (job_id) LEFT JOIN endings USING (job_id)
     LEFT JOIN beginnings USING (incident_id)
     LEFT JOIN windows AS opened ON opened.job_id = jobs.job_id AND opened.number = opened_window
     LEFT JOIN windows AS seen ON seen.job_id = jobs.job_id AND seen.number = seen_window
WHERE ($name IS NULL OR jobs.name = $name) AND (closed_at IS NULL OR NOT $open)
    AND (closed_at IS NULL OR incident_id > $after OR list_contains($numbers::INTEGER[], incident_id))
QUALIFY $most IS NULL OR row_number() OVER (PARTITION BY closed_at IS NULL ORDER BY incident_id DESC) <= $most
ORDER BY incident_id DESC
"""
#: Incidents that a window closed and that are not settled (`Incident.settled`).
_UNSETTLED = """
SELECT incident_id FROM incidents JOIN jobs USING (job_id)
WHERE jobs.name = $name AND closed_window IS NOT NULL AND clear < greatest($clear, seen_window - opened_window + 1)
"""
#: Every window, oldest first, with when its job was watched and how that ended.
_ALL_WINDOWS = """
SELECT jobs.name AS job, windows.* EXCLUDE (job_id, added_at), epoch(windows.added_at) AS added_s,
       epoch(watches.began_at) AS began_s, epoch(watches.ended_at) AS watched_until_s, endings.ending
FROM windows JOIN jobs USING (job_id) LEFT JOIN watches USING (job_id) LEFT JOIN endings USING (job_id)
WHERE $name IS NULL OR jobs.name = $name
ORDER BY windows.job_id, windows.number
"""
_COSTS = """
SELECT jobs.name, costs.number, costs.content FROM costs JOIN jobs USING (job_id)
WHERE ($name IS NULL OR jobs.name = $name) AND ($number IS NULL OR costs.number = $number)
"""
_COUNTED_INCIDENTS = "SELECT count(*) FILTER (closed_at IS NULL), count(closed_at) FROM incidents"
#: One row per job, of its newest window, with totals over all windows.
_LIVE_JOBS = """
SELECT jobs.name, newest.number, newest.slowdown, newest.waste,
       newest.recorded_s, newest.trustworthy, newest.lost_gpu_hours_per_day, epoch(newest.added_at) AS added_at,
       newest.started_at, newest.ended_at, counted.windows, counted.lost_gpu_hours,
       newest.metadata, findings.verdict, findings.confidence,
       findings.saved_gpu_hours_per_day, findings.ranks_missing, findings.dropped_records,
       watches.job_id IS NOT NULL AND watches.ended_at IS NULL AS watched, endings.ending
FROM jobs
JOIN (SELECT job_id, max(number) AS number, count(*) AS windows,
             sum(greatest(coalesce(lost_gpu_hours, 0), 0)) AS lost_gpu_hours
      FROM windows GROUP BY job_id) AS counted USING (job_id)
JOIN windows AS newest ON newest.job_id = jobs.job_id AND newest.number = counted.number
LEFT JOIN findings ON findings.job_id = jobs.job_id AND findings.number = counted.number
LEFT JOIN watches ON watches.job_id = jobs.job_id
LEFT JOIN endings ON endings.job_id = jobs.job_id
ORDER BY jobs.job_id
"""

#: The windows of a job that overlap a time, in parts of about as many windows each: how `_SPANS` and `_LOSSES` begin.
#: A part also ends where no window is for longer than the `most`th part of the range, so there are at most 2 x `most`.
_PARTS = f"""
WITH told AS (
    SELECT windows.*, ended_at + coalesce(recorded_s, 0) AS end_s, {_METADATA} AS facts
    FROM windows JOIN jobs USING (job_id)
    WHERE jobs.name = $name AND started_at >= $earliest
), tiles AS (
    SELECT told.*, ntile($most) OVER (ORDER BY number) AS tile,
           coalesce(lag(facts->>'attempt') OVER (ORDER BY number) <> facts->>'attempt', false) AS restarted,
           $most * (started_at - lag(end_s) OVER (ORDER BY number))
               > max(end_s) OVER () - min(started_at) OVER () AS gap
    FROM told WHERE end_s >= $since AND started_at <= $until
), runs AS (
    SELECT tiles.*, count(*) FILTER (gap) OVER (ORDER BY number) AS run FROM tiles
), parts AS (
    SELECT runs.*, dense_rank() OVER (ORDER BY tile, run) AS span FROM runs
)
"""  # noqa: S608 - our own expressions
_SPANS = f"""
SELECT span, min(number) AS number, max(number) AS last, count(*) AS windows, min(started_at) AS start_s,
       max(end_s) AS end_s, min(first_step) AS first_step, max(last_step) AS last_step, bool_or(restarted) AS restarted,
       sum(recorded_s * steps) / sum(steps) FILTER (recorded_s IS NOT NULL) AS recorded_s,
       sum(steps) FILTER (recorded_s IS NOT NULL) AS steps, any_value({GPUS}) AS gpus, sum(ops)::BIGINT AS ops,
       any_value(coalesce(facts->>'gpu_model', facts->>'label_gpu_model')) AS gpu_model,
       sum({_TOKENS} * steps) FILTER (recorded_s IS NOT NULL)
           / sum(recorded_s * steps) FILTER ({_TOKENS} IS NOT NULL)
           * sum(recorded_s * steps) / sum(steps) FILTER (recorded_s IS NOT NULL) AS tokens,
       max_by({_LOSS}, number) AS loss,
       any_value(try_cast(coalesce(facts->>'flops_per_step', facts->>'label_flops_per_step') AS DOUBLE)) AS flops,
       any_value(try_cast(coalesce(facts->>'flops_per_token', facts->>'label_flops_per_token') AS DOUBLE))
           AS flops_per_token
FROM parts GROUP BY span ORDER BY span
"""  # noqa: S608 - our own expressions
_LOSSES = """
SELECT span, cause AS kind, sum((seconds + planned_s) * steps) AS lost_s
FROM (
    SELECT span, steps, unnest(from_json(json_extract(content, '$.losses'), '[{
        "cause": "VARCHAR", "seconds": "DOUBLE", "planned_s": "DOUBLE"}]'), recursive := true)
    FROM parts JOIN costs USING (job_id, number) WHERE json_valid(content)
)
GROUP BY ALL ORDER BY ALL
"""

#: The share of the step that each window of these jobs loses, in order.
_TRENDS = """
SELECT jobs.name, list(findings.share ORDER BY number)
FROM jobs JOIN findings USING (job_id)
WHERE list_contains($names::VARCHAR[], jobs.name)
GROUP BY jobs.name
"""

#: The last jobs of each host or GPU, and those in which a trusted window had a cause on it alone. `place`: index of a
#: job in the order of their newest windows; `blamed_on`: a list of `culprits`.
_MACHINES = """
WITH newest AS (
    SELECT job_id, max(epoch(added_at)) AS added_at, row_number() OVER (ORDER BY max(added_at), job_id) AS place
    FROM windows GROUP BY job_id
), blamed AS (
    SELECT job_id, {blamed_on}[1] AS machine,
           string_agg(DISTINCT culprits.kind, ', ' ORDER BY culprits.kind) AS kinds,
           max_by(number, share) AS number
    FROM culprits JOIN windows USING (job_id, number)
    WHERE len({blamed_on}) = 1 AND share >= $share AND windows.trustworthy
    GROUP BY ALL
), machines AS ({machines}), history AS (
    SELECT machine, max(place, $last) AS places, max_by(host, place) AS host
    FROM machines JOIN newest USING (job_id)
    GROUP BY machine
    HAVING contains(machine, $text) OR contains(coalesce(max_by(host, place), ''), $text)
), seen AS (
    SELECT machine, host, unnest(places) AS place FROM history
)
SELECT machine, any_value(host) AS host, count(*) AS jobs, max(added_at) AS added_at, count(kinds) AS blamed,
       list(struct_pack(job := jobs.name, kinds := kinds, number := number) ORDER BY place DESC)
           FILTER (kinds IS NOT NULL) AS culprit_in, count(*) OVER () AS found
FROM seen JOIN newest USING (place) JOIN jobs USING (job_id) LEFT JOIN blamed USING (job_id, machine)
GROUP BY machine
ORDER BY blamed DESC, added_at DESC, machine
LIMIT $most
"""
_HOSTS = _MACHINES.format(
    blamed_on="culprits.hosts", machines="SELECT job_id, host AS machine, NULL::VARCHAR AS host FROM hosts"
)
#: Only GPUs that have ever been the culprit.
_GPUS = _MACHINES.format(
    blamed_on="culprits.gpu_uuids",
    machines="SELECT job_id, gpu AS machine, host FROM gpus WHERE gpu IN (SELECT machine FROM blamed)",
)


#: The newest windows of the jobs that ran on a host, and what causes on it alone cost each.
_ON_HOST = """
WITH blamed AS (
    SELECT job_id, number, max(share) AS share, list(DISTINCT kind ORDER BY kind) AS kinds
    FROM culprits WHERE hosts = [$host] GROUP BY ALL
)
SELECT jobs.name AS job, number, coalesce(started_at, epoch(added_at)) AS at_s,
       CASE WHEN trustworthy THEN coalesce(share, 0.0) END AS share, kinds
FROM hosts JOIN jobs USING (job_id) JOIN windows USING (job_id) LEFT JOIN blamed USING (job_id, number)
WHERE hosts.host = $host
ORDER BY at_s DESC LIMIT $most
"""


@dataclass(frozen=True, slots=True)
class LiveTables:
    """Those tables in an open catalogue."""

    connection: duckdb.DuckDBPyConnection

    # ---- reading

    def history(self, name: str, most: int, around: int | None = None) -> pl.DataFrame:
        """The last `most` windows of a job, oldest first: number, steps, times, S, findings, tokens a second and loss.

        `around`: instead of the last windows, those before and after this window, as many of each as fit.
        """
        last = None
        if around is not None:
            parameters = {"name": name, "around": around, "half": most // 2, "most": most}
            last = self.connection.execute(_LAST_AROUND, parameters).fetchall()[0][0]
        rows = self.connection.sql(_HISTORY, params={"name": name, "most": most, "last": last})
        return frame(rows).reverse()

    def incidents(
        self,
        name: str | None = None,
        *,
        only_open: bool = False,
        after: int = 0,
        numbers: Collection[int] = (),
        most: int | None = None,
    ) -> tuple[Incident, ...]:
        """The incidents of one job or of all, newest first: open ones, those after number `after`, and those with these
        `numbers`.

        `most`: limit for the open ones, and for the closed ones.
        """
        which = {"name": name, "open": only_open, "after": after, "numbers": list(numbers), "most": most}
        rows = self.connection.execute(_INCIDENTS, which).fetchall()
        return tuple(
            Incident(
                number, job, cause, _utc(opened_at), first, last, clear, closed and _utc(closed), closed_by, *fields
            )
            for number, job, text, opened_at, first, last, clear, closed, closed_by, *fields in rows
            if (cause := stored_account(text)) is not None  # a reader's `left_out` names others
        )  # fmt: skip

    def unsettled(self, name: str) -> tuple[Incident, ...]:
        """The incidents of a job that are open or may open again."""
        numbers = self.connection.execute(_UNSETTLED, {"name": name, "clear": CLEAR_WINDOWS}).fetchall()
        last = 1 << 30  # none is new
        incidents = self.incidents(name, after=last, numbers=[number for (number,) in numbers])
        return tuple(incident for incident in incidents if not incident.settled)

    def is_watched(self, name: str) -> bool:
        """Whether a job is or was cut into windows, even if it has none."""
        query = "SELECT 1 FROM watches JOIN jobs USING (job_id) WHERE jobs.name = $name"
        return bool(self.connection.execute(query, {"name": name}).fetchall())

    def end(self, name: str) -> tuple[datetime, str] | None:
        """When and how a job that was cut into windows ended; None while it runs, and for other jobs."""
        rows = self.connection.execute(
            "SELECT watches.ended_at, coalesce(ending, 'ended') FROM watches JOIN jobs USING (job_id)"
            " LEFT JOIN endings USING (job_id) WHERE jobs.name = $name AND watches.ended_at IS NOT NULL",
            {"name": name},
        ).fetchall()
        return (_utc(rows[0][0]), rows[0][1]) if rows else None

    def count_incidents(self) -> tuple[int, int]:
        """The number of open incidents, and of closed ones."""
        (counted,) = self.connection.execute(_COUNTED_INCIDENTS).fetchall()
        return counted[0], counted[1]

    def live_jobs(self) -> pl.DataFrame:
        """One row per job for metrics: its newest window, and totals over all."""
        return frame(self.connection.sql(_LIVE_JOBS))

    def all_windows(self, name: str | None = None) -> pl.DataFrame:
        """One row per window of one job or of every job: its place in time, and that of the watch of its job."""
        return frame(self.connection.sql(_ALL_WINDOWS, params={"name": name}))

    def costs(self, name: str | None = None, number: int | None = None) -> dict[tuple[str, int], ClaimedCosts]:
        """The costs of the mean step of each window, by job and number: of one job, one window of it, or all."""
        rows = self.connection.execute(_COSTS, {"name": name, "number": number}).fetchall()
        return {(job, number): costs for job, number, text in rows if (costs := stored_costs(text)) is not None}

    def trends(self, names: Collection[str]) -> dict[str, list[float]]:
        """The share of the step that each analysed window of these jobs loses, oldest first, by job."""
        return dict(self.connection.execute(_TRENDS, {"names": list(names)}).fetchall())

    def spans(self, name: str, most: int, since: float = 0.0, until: float = math.inf) -> pl.DataFrame:
        """The life of a job between two times, seconds since the epoch, in at most `most` parts: rows of `span`, its
        windows `number` to `last`, `start_s`, `end_s`, steps, `recorded_s` (mean step time, null if not analysed),
        whether it begins with, or has, a `restarted` attempt, and, null if unknown, the `tokens` of the mean step, the
        last `loss`, the `flops` of a step, and `flops_per_token`.
        """
        return self._parts_in_range(_SPANS, name, most, since, until)

    def losses(self, name: str, most: int, since: float = 0.0, until: float = math.inf) -> pl.DataFrame:
        """The losses of the steps of those parts by `kind` of cause, as on their bill: `span`, `kind`, `lost_s` in
        seconds, summed over the steps. Windows that cannot be trusted have no known losses.
        """
        return self._parts_in_range(_LOSSES, name, most, since, until)

    def _parts_in_range(self, query: str, name: str, most: int, since: float, until: float) -> pl.DataFrame:
        parameters = {"name": name, "most": most, "since": since, "until": until, "earliest": EARLIEST_S}
        return frame(self.connection.sql(_PARTS + query, params=parameters))

    def host_history(self, text: str, *, last: int, most: int) -> pl.DataFrame:
        """The hosts with `text` in their name, at most `most`, the most frequent culprits first.

        `machine`: the name. `jobs`: the number of its last `last` jobs; `blamed`: how many of them it was the culprit
        in; `culprit_in`: these jobs, newest first, as structs of `job`, `kinds` of alarming causes on this host alone,
        and `number` of the window that shows the costliest. `added_at`: of the newest window. `found`: the number of
        hosts found.
        """
        return self._alarming(_HOSTS, text, last, most)

    def gpu_history(self, text: str, *, last: int, most: int) -> pl.DataFrame:
        """The same for GPUs that were ever the culprit, by UUID; `host`: of its newest job, null if unknown.

        `text`: in the UUID or in the name of that host.
        """
        return self._alarming(_GPUS, text, last, most)

    def on_host(self, host: str, most: int) -> pl.DataFrame:
        """The last `most` windows of jobs that ran on a host, newest first: `job`, `number`, `at_s` (when it began,
        else when it was stored, seconds since the epoch), the `share` of its step that the costliest cause on this host
        alone takes (null if it is not to be trusted), and the `kinds` of these causes.
        """
        return frame(self.connection.sql(_ON_HOST, params={"host": host, "most": most}))

    def _alarming(self, query: str, text: str, last: int, most: int) -> pl.DataFrame:
        parameters = {"text": text, "last": last, "most": most, "share": SMALLEST_ALARMING_SHARE}
        return frame(self.connection.sql(query, params=parameters))

    # ---- writing

    def add_findings(self, windows: Sequence[WrittenWindow]) -> None:
        """Store the findings of windows that have been written; nothing for one without."""
        analysed = [(window, window.item.findings) for window in windows if isinstance(window.item.findings, Findings)]
        rows: dict[str, list[dict[str, Any]]] = {"findings": [], "costs": [], "culprits": []}
        for window, findings in analysed:
            verdict, answer = findings.report.verdict, findings.report.answer
            metadata = window.item.trace.metadata
            row = {
                "verdict": verdict.kind,
                **{column: getattr(verdict, column) for column in ("share", "confidence")},
                **{column: getattr(answer, column) for column in ("headline", "trust", "fix")},
                "saved_gpu_hours_per_day": findings.report.saved_gpu_hours_per_day,
                "ranks_missing": _count(metadata.get("missing_ranks")),
                "dropped_records": _number(metadata.get("dropped_records")),
            }
            rows["findings"].append(window.key | row)
            rows["costs"].append(window.key | _costs(findings.report, window.item.trace.step_starts))
            costliest = sorted(answer.accounts, key=lambda sighting: -sighting.cost_s)[:MOST_CULPRITS]
            rows["culprits"] += [
                window.key | {column: getattr(culprit, column) for column in _OF_CULPRITS} for culprit in costliest
            ]
        for table, table_rows in rows.items():
            insert(self.connection, table, *table_rows)

    def put_incident(self, job_id: int, incident: Incident) -> None:
        """Insert or update an incident."""
        number = incident.incident_id or self.connection.execute("SELECT nextval('incident_id')").fetchall()[0][0]
        row = {
            "incident_id": number,
            "job_id": job_id,
            "kind": incident.cause.kind,
            "cause": encode(incident.cause).decode(),
            **{column: getattr(incident, column) for column in _OF_INCIDENTS},
        }
        insert(self.connection, "incidents", row, verb=_OR_REPLACE)
        if incident.first_step is not None:
            began = {"incident_id": number, "job_id": job_id, "first_step": incident.first_step}
            insert(self.connection, "beginnings", {**began, "since": incident.since}, verb=_OR_REPLACE)

    def watch_begins(self, job_id: int, began_at: datetime) -> None:
        """Note that the job is cut into windows from now on."""
        insert(self.connection, "watches", {"job_id": job_id, "began_at": began_at, "ended_at": None}, verb=_OR_REPLACE)

    def watch_ends(self, job_id: int, ended_at: datetime, ending: str | None) -> None:
        """Note that the job has ended, which closes its incidents. `ending`: how, None if unknown."""
        if ending is not None:
            insert(self.connection, "endings", {"job_id": job_id, "ending": ending}, verb=_OR_REPLACE)
        row = {"job": job_id, "at": naive(ended_at)}
        self.connection.execute("UPDATE watches SET ended_at = $at WHERE job_id = $job", row)
        self.connection.execute("UPDATE incidents SET closed_at = $at WHERE job_id = $job AND closed_at IS NULL", row)


def _costs(report: Report, step_starts: Mapping[int, float]) -> dict[str, str]:
    from tracekit.costs.of_report import costs_of  # it knows the detectors, which no reader needs

    return {"content": msgspec.json.encode(costs_of(report, step_starts)).decode()}


def _count(value: object) -> int:
    return len(value) if isinstance(value, Sequence) else 0


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC)
