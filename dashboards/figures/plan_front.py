"""Plans of a job: step time against memory, the plan in use, and the bound as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from tracekit.dashboards.figures.base import figure
from tracekit.report.plans import FrontPlan, OptimizedPlan, Optimum

if TYPE_CHECKING:
    from tracekit.dashboards.figures.theme import Theme


def plan_front(optimum: Optimum, theme: Theme) -> go.Figure:
    """The fastest plans by memory or, if that is unknown, by microbatches; the plan in use; the bound."""
    plans: Sequence[FrontPlan | OptimizedPlan] = optimum.front or sorted(optimum.plans, key=_across)
    memory = optimum.now.memory_gb is not None
    drawn = figure(theme, x="memory of the fullest stage, GB" if memory else "microbatches", y="step, ms", legend=True)
    bound_s = min(plan.bound_s for plan in optimum.plans)
    now = optimum.now
    ends = [_across(plan) for plan in (*plans, now)]
    for name, points, mode, colour in (
        ("fastest plans", [(_across(plan), plan.step_time_s, _words(plan)) for plan in plans], "markers", theme.ideal),
        ("plan in use", [(_across(now), now.step_time_s, _words(now))], "markers", theme.recorded),
        ("bound", [(end, bound_s, "no plan is faster") for end in (min(ends), max(ends))], "lines", theme.dimmed),
    ):
        drawn.add_scatter(
            x=[x for x, _, _ in points],
            y=[step_s * 1e3 for _, step_s, _ in points],
            text=[words for _, _, words in points],
            mode=mode,
            line={"color": colour, "dash": "dash"},
            marker={"color": colour, "size": 9},
            hovertemplate="%{text}<br>%{y:.1f} ms<extra></extra>",
            name=name,
        )
    return drawn


def _across(plan: FrontPlan | OptimizedPlan) -> float:
    return float(plan.microbatches) if plan.memory_gb is None else plan.memory_gb


def _words(plan: FrontPlan | OptimizedPlan) -> str:
    return f"{','.join(map(str, plan.split))}, {plan.schedule}, {plan.microbatches} microbatches"
