"""Search for a job, rank, worker or host by part of its name: the field behind `/`.

In: text, and the open job, if any. Out: a few links as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import flask

from tracekit.base.errors import NotStoredError
from tracekit.base.text import short
from tracekit.dashboards.browser.data.worker_view import WorkerView, choose_worker, comma
from tracekit.dashboards.browser.ui.components import href
from tracekit.dashboards.browser.ui.context import results
from tracekit.dashboards.figures.worker_map import WorkerMap

#: Most links of an answer, and most hosts among them.
MOST_FOUND, MOST_HOSTS = 12, 4
LONGEST_QUERY = 300


def search() -> flask.Response:
    """Links to what the query names. Raises StoreError."""
    query = " ".join(flask.request.args.get("q", "").split())[:LONGEST_QUERY]
    return flask.jsonify(list(islice(_found(query, flask.request.args.get("job")), MOST_FOUND)))


def _found(query: str, job: str | None) -> Iterator[dict[str, str]]:
    """Yield matches in the open job first, then jobs, the costliest first."""
    if job is not None and query:
        with suppress(NotStoredError):  # removed meanwhile, or without workers: there are still jobs to find
            yield from _in_job(results().worker_map(job), job, query.casefold())
    names = results().jobs()["name"]
    matching = names.filter(names.str.to_lowercase().str.contains(query.lower(), literal=True))
    for name in matching.head(MOST_FOUND):
        yield {"text": short(name), "kind": "job", "href": href("/job", job=name)}


def _in_job(workers: WorkerMap, job: str, query: str) -> Iterator[dict[str, str]]:
    cell = choose_worker(workers, query, WorkerView()).cell
    if cell is not None:
        where = href("/workers", job=job, worker=comma(workers.worker(cell)))
        yield {"text": workers.full_name(cell), "kind": "worker", "href": where}
    hosts = [host for host in workers.hosts if query in host.casefold()]
    for host in hosts[:MOST_HOSTS]:
        yield {"text": short(host), "kind": "host", "href": href("/workers", job=job, host=host)}
