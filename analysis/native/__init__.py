"""Compiled kernels for the work that touches every op of a job.

In: C-contiguous arrays. Out: the same arrays, filled. Each kernel checks the types of its arguments, trusts their
values (callers have validated them) and releases the GIL, so that threads run in parallel. The kernels are C against
Python's stable ABI, compiled when tracekit is built: one library serves every Python from 3.11 on, and nothing is
compiled or cached at run time.
"""

from tracekit.analysis.native._native import *  # noqa: F403
