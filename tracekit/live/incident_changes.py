"""Changes of a store since the last look: new windows, and incidents that opened, opened again or closed.

In: a store that any process writes. Out: `Changes`. So the process that adds windows and the one that reports them are
independent and can run on different machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit.store import Incident, Store


@dataclass(frozen=True, slots=True)
class Changes:
    """`windows`: job -> rows of `LiveTables.history`, oldest first."""

    windows: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    opened: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()


class StoreChanges:
    """The changes of one job, or of all. The contents of the store at the first look are not news."""

    def __init__(self, store: Store, job: str | None = None) -> None:
        self._store, self._job = store, job
        self._state: str | None = None
        self._newest: dict[str, int] = {}
        self._open: set[int] = set()
        self._last = 0
        self._begun = False

    def look(self) -> Changes:
        """Return the changes since the last look. Raises StoreError."""
        if not self._store.is_store():
            self._begun = True  # everything added to it from now on is news
            return Changes()
        state = self._store.state()
        if state == self._state:
            return Changes()
        with self._store.reading() as catalogue:
            rows = catalogue.live.live_jobs().select("name", "number").rows()
            newest = {name: number for name, number in rows if self._job in (None, name)}
            windows = {
                name: catalogue.live.history(name, number - self._newest.get(name, -1)).to_dicts()
                for name, number in newest.items()
                if self._begun and number > self._newest.get(name, -1)
            }
            # Not all of them: a job that is watched for weeks has many closed ones.
            incidents = catalogue.live.incidents(self._job, after=self._last, numbers=self._open)
        new = [
            one
            for one in incidents
            if one.incident_id > self._last or (one.closed_at is None and one.incident_id not in self._open)
        ]
        incident_ids = self._open | {one.incident_id for one in new}
        closed = [one for one in incidents if one.closed_at is not None and one.incident_id in incident_ids]
        changes = Changes(windows, tuple(reversed(new)), tuple(reversed(closed))) if self._begun else Changes()
        self._state, self._newest, self._begun = state, newest, True
        self._open = {one.incident_id for one in incidents if one.closed_at is None}
        self._last = max([self._last, *(one.incident_id for one in incidents)])
        return changes
