"""What a function that gathers evidence has in common with all others: it knows which jobs have what it needs.

In: a function of one kind of job. Out: the same for any job: None for jobs of other kinds, and computed once per job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Protocol, TypeVar, cast, overload

from tracekit.analysis.evidence.subject import Subject

J = TypeVar("J", bound=Subject)
T_co = TypeVar("T_co", covariant=True)
J_contra = TypeVar("J_contra", bound=Subject, contravariant=True)


class Evidence(Protocol[J_contra, T_co]):
    """Evidence on a job."""

    @overload
    def __call__(self, job: J_contra, /) -> T_co: ...
    @overload
    def __call__(self, job: Subject, /) -> T_co | None: ...


def evidence(kind: type[J]) -> Callable[[Callable[[J], T_co]], Evidence[J, T_co]]:
    """Return a decorator for a function that needs a job of this kind.

    The result answers for any job, with None where the job is of another kind. It is computed once per job, and kept
    with it.
    """

    def decorated(gather: Callable[[J], T_co]) -> Evidence[J, T_co]:
        @wraps(gather)
        def gathered(job: Subject) -> T_co | None:
            if not isinstance(job, kind):
                return None
            memo = vars(job).setdefault("_evidence", {})
            if gathered not in memo:
                memo[gathered] = gather(job)
            return cast("T_co", memo[gathered])

        return cast("Evidence[J, T_co]", gathered)

    return decorated
