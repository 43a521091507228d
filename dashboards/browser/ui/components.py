"""Building blocks of the pages: panels, tables, controls, figures that our assets draw, terms defined.

Every text is a child or a prop, never markup: names of jobs and hosts are untrusted. Labels of controls are HTML
labels, so that clicks and screen readers find the control.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Final, ParamSpec
from urllib.parse import quote, urlencode

import plotly.graph_objects as go
import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.errors import NotStoredError, TracekitError
from tracekit.dashboards.browser.ui.context import chosen_range, chosen_window, prefixed
from tracekit.dashboards.browser.ui.sentences import Tone
from tracekit.dashboards.words import figure_columns
from tracekit.report.tables import safe_csv
from tracekit.trace.gpu_activity import IdleReason

Children = Component | str | None | Sequence[Any]
_Arguments = ParamSpec("_Arguments")

#: Most rows in the table of a figure; its CSV has all of them.
MOST_ROWS = 200
#: What began a gap of the GPU, by its name in a report.
GAP_BEGINS: Final[dict[str, str]] = {
    "synchronise": "a call that waited for the GPU",
    "host": "the host late with its next launch",
    "queued": "work held up on the GPU",
    "unknown": "work whose launch was not recorded",
}


def href(path: str, **state: object) -> str:
    """A link to a page with its state, without the parameters that are None. Links from the page of a window to other
    pages of that job keep window and range, unless `window` or `since` is given.
    """
    if isinstance(job := state.get("job"), str):
        if "window" not in state:
            state["window"] = chosen_window(job)
        if "since" not in state and (chosen := chosen_range(job)) is not None:
            state |= {"since": chosen.begin or None, "until": chosen.end or None}
    parameters = {name: value for name, value in state.items() if value is not None}
    return prefixed(f"{path}?{urlencode(parameters)}" if parameters else path)


def attributes(**values: str) -> dict[str, Any]:
    """HTML attributes whose names are not Python identifiers: `aria_label` becomes `aria-label`."""
    return {name.replace("_", "-"): value for name, value in values.items()}


def named(id: str | None) -> dict[str, Any]:  # noqa: A002 - Dash's name
    """The `id` of a component, if it has one: Dash does not accept None."""
    return {} if id is None else {"id": id}


def term(word: str, label: str | None = None) -> Component:
    """A word of the glossary that shows its definition on hover or focus (assets/tips.js)."""
    return html.Span(label or word, className="term", tabIndex=0, **attributes(data_tip=GLOSSARY[word]))


def badge(content: Children, tone: Tone, *, loud: bool) -> Component:
    """A judgement in the colour of its tone, `loud` on full colour; readable in both themes."""
    return html.Span(content, className=f"badge {tone}{' loud' if loud else ''}")


def panel(title: Children, *children: Any, id: str | None = None, extra: Children = None) -> Component:  # noqa: A002 - Dash's name
    """A framed part of a page with a heading."""
    body = html.Div(list(children), **named(id))
    head = html.Div([html.H2(title), html.Div(extra, className="panel-extra")], className="panel-head")
    return html.Section([head, body], className="panel")


def folded(title: str, *children: Any) -> Component:
    """Details that most readers skip."""
    return Folded(children=[html.Summary(title), *children], className="folded")


def folded_panel(title: str, *children: Any, opened: bool = False) -> Component:
    """A part of a page that most readers skip: its heading, which opens it."""
    return Folded(children=[html.Summary(html.H2(title)), *children], className="panel", open=opened)


def halves(*parts: Any) -> Component:
    """These parts, two in a row; below each other on narrow screens."""
    return html.Div([html.Div(part, className="half") for part in parts], className="row")


def thirds(wide: Any, narrow: Any) -> Component:
    """Two parts in a row, the first twice as wide; below each other on narrow screens."""
    return html.Div([html.Div(wide, className="twothirds"), html.Div(narrow, className="third")], className="row")


def facts_table(facts: Mapping[str, Any], style: str = "plain about") -> Component:
    """Values, each after its name."""
    rows = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in facts.items()]
    return html.Table(html.Tbody(rows), className=style)


def note(text: Children) -> Component:
    """A placeholder for missing content, with the reason."""
    return html.P(text, className="note")


def problem(message: str, *, title: str = "This cannot be shown", link: Component | None = None) -> Component:
    """An error message that the user can act on. `link`: a link to a page that works."""
    return html.Div([html.B(title), html.P(message), link], className="problem", role="alert")


def guarded(build: Callable[_Arguments, Any]) -> Callable[_Arguments, Any]:
    """Wrap a page or panel so that errors appear in its place, never as a stack trace."""

    @wraps(build)
    def safely(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
        try:
            return build(*args, **kwargs)
        except Exception as error:
            return error_message(error)

    return safely


def error_message(error: Exception) -> Component:
    """The message for an error. Errors of tracekit itself are logged with a traceback."""
    if isinstance(error, NotStoredError):
        return problem(str(error), link=dcc.Link("All jobs", href=href("/")))
    if isinstance(error, TracekitError):
        return problem(str(error))
    logging.getLogger(__name__).error("a part of a page failed", exc_info=error)
    return problem("An error of tracekit itself; the server's log has the details.", title="Something broke")


def figure_panel(
    title: Children,
    fig: go.Figure,
    *,
    label: str,
    table: pl.DataFrame,
    csv: str | None = None,
    id: str | None = None,  # noqa: A002 - Dash's name
    extra: Children = None,
    width: int | None = None,
) -> Component:
    """A figure with its data as a table below it. `label`: text for screen readers; `csv`: link to all rows; `width`:
    of a figure that scrolls where it does not fit, pixels.
    """
    graph, below = figure_parts(fig, label=label, table=table, csv=csv, id=id)
    if width is not None:
        sized = html.Div(graph, style={"width": f"{width}px"})
        graph = html.Div(sized, className="table-wide", tabIndex=0, role="region", **attributes(aria_label=label))
    return panel(title, graph, below, extra=extra)


def figure_parts(
    fig: go.Figure,
    *,
    label: str,
    table: pl.DataFrame,
    csv: str | None = None,
    id: str | None = None,  # noqa: A002 - Dash's name
    most: int = MOST_ROWS,
) -> list[Component]:
    """The figure and its table, of at most `most` rows, without a frame around them."""
    graph = Chart(figure=drawing(fig), **named(id))
    return [html.Div(graph, role="group", **attributes(aria_label=label)), as_table(table, csv=csv, most=most)]


def as_table(table: pl.DataFrame, *, csv: str | None = None, most: int = MOST_ROWS) -> Component:
    """The data of a figure as a table, collapsed at first."""
    links = [html.A("CSV", href=csv, download="")] if csv else []
    more = f", the first {most} of {table.height:,} rows" if table.height > most else ""
    return Folded(
        children=[
            html.Summary(["Data table", more]),
            html.Div(links, className="table-links"),
            html.Div(
                plain_table(table.head(most)),
                className="table-scroll",
                tabIndex=0,
                role="region",
                **attributes(aria_label="The figure as numbers"),
            ),
        ],
        className="as-table",
    )


def html_table(
    heads: Sequence[Any],
    rows: Sequence[Any],
    numbers: Collection[int] = (),
    *,
    style: str = "",
    chosen: Collection[int] = (),
) -> Component:
    """A table. `rows`: lists of cells, which become `Td` or `Th` unless they are, or ready-made rows.

    `numbers`: the positions of columns that hold figures; `chosen`: of rows that stand out.
    """

    def row(kind: Any, cells: Sequence[Any], place: int = -1) -> Component:
        styles = ["number" if column in numbers else "" for column in range(len(cells))]
        styled = zip(cells, styles, strict=True)
        return html.Tr(
            [cell if isinstance(cell, html.Td | html.Th) else kind(cell, className=css) for cell, css in styled],
            className="chosen" if place in chosen else "",
        )

    body = [cells if isinstance(cells, html.Tr) else row(html.Td, cells, place) for place, cells in enumerate(rows)]
    return html.Table([html.Thead([row(html.Th, heads)]), html.Tbody(body)], className=f"plain {style}".strip())


def row_table(
    heads: Sequence[Any],
    rows: Sequence[Any],
    label: str,
    numbers: Collection[int] = (),
    *,
    style: str = "",
    chosen: Collection[int] = (),
    id: str | None = None,  # noqa: A002 - Dash's name
) -> Component:
    """A table as `html_table` makes it; without room for its columns (assets/tables.js), each row becomes a block in
    which every cell names its column. `label`: its content, for screen readers.
    """
    heads = [head[:1].upper() + head[1:] if isinstance(head, str) else head for head in heads]
    whole_table = html_table(heads, rows, numbers, style=style, chosen=chosen)
    names = [_text_of(head).removesuffix(" \u2193") for head in heads]
    for row in (*whole_table.children[0].children, *whole_table.children[1].children):
        for name, cell in zip(names, row.children, strict=False):  # a cell may span several columns
            setattr(cell, "data-head", name)
    frame = named(id) | attributes(aria_label=label)
    return html.Div(whole_table, className="table-wide stacked", tabIndex=0, role="region", **frame)


def sorting_head(name: str, path: str, *, sorts: bool) -> Component:
    """The heading of a column that sorts its table; an arrow marks the one that does."""
    return dcc.Link(f"{name} \u2193" if sorts else name, href=path)


def _text_of(content: Any) -> str:
    """The text of a component and of its children."""
    if isinstance(content, Component):
        return _text_of(getattr(content, "children", None))
    if isinstance(content, list | tuple):
        return "".join(map(_text_of, content))
    return "" if content is None else str(content)


def inline_csv(table: pl.DataFrame) -> str:
    """A link that contains a small table itself, for data without a download on the server."""
    return f"data:text/csv;charset=utf-8,{quote(safe_csv(table))}"


def plain_table(frame: pl.DataFrame) -> Component:
    """A frame as an HTML table; numbers have four digits."""
    rows = [[shown(value) for value in row] for row in frame.iter_rows()]
    first = [0] if frame.width and frame.dtypes[0].is_numeric() else []
    return html_table(frame.columns, rows, [*first, *figure_columns(rows)])


def shown(value: Any) -> str | Component:
    """Format a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return value if isinstance(value, Component) else str(value)


def text_field(
    name: str,
    label: Any,
    value: str,
    *,
    placeholder: str = "",
    wait_s: float | bool = False,
    style: str = "",
    suggestions: Sequence[str] = (),
    sent_as: str = "",
) -> Component:
    """A text field. `wait_s`: delay from the last key to sending; True: send on Enter or on leaving the field.

    `suggestions`: those of the browser; any other text is allowed too. `sent_as`: its name in the form around it.
    """
    offered = html.Datalist([html.Option(value=text) for text in suggestions], id=f"{name}-known")
    line = dcc.Input(
        id=name,
        value=value,
        type="text",
        placeholder=placeholder,
        debounce=wait_s,
        autoComplete="off",
        spellCheck=False,
        name=sent_as or None,
        list=f"{name}-known" if suggestions else None,
    )
    parts = [html.Span(label, className="field-label"), line, *([offered] if suggestions else [])]
    return html.Label(parts, className=f"text-field {style}")


def choice(name: str, label: str, options: Mapping[Any, str], value: str | Sequence[str]) -> Component:
    """Radio buttons; checkboxes if `value` is a list. `options`: label by value."""
    buttons = Choice(id=name, options=_items(options), value=value)
    return html.Fieldset([html.Legend(label, className="field-label"), buttons], className="choice")


def menu(name: str, label: str, options: Mapping[str, str], value: str) -> Component:
    """A drop-down list."""
    select = Menu(id=name, options=_items(options), value=value)
    return html.Label([html.Span(label, className="field-label"), select], className="menu")


def _items(options: Mapping[Any, str]) -> list[dict[str, str]]:
    return [{"value": str(value), "label": label} for value, label in options.items()]


def scale(name: str, label: str, maximum: int, value: int) -> Component:
    """A slider from 0 to `maximum` that sends its value while dragged. `label`: text for screen readers."""
    knob = dcc.Input(id=name, type="range", min=0, max=maximum, step=1, value=value)
    return html.Label([html.Span(label, className="unseen"), knob], className="scale")


class _ReactComponent(Component):
    """A component of `assets/`, with these properties."""

    _namespace: str
    _type: str
    _properties: ClassVar[tuple[str, ...]]

    def __init__(self, **values: Any) -> None:
        self._children_props: list[str] = []
        self._base_nodes: list[str] = []
        self._prop_names = self.available_properties = list(self._properties)
        self._valid_wildcard_attributes: list[str] = []
        self.available_wildcard_properties: list[str] = []
        super().__init__(**values)


def _component_class(namespace: str, name: str, *properties: str) -> type[_ReactComponent]:
    definition = {"_namespace": namespace, "_type": name, "_properties": properties}
    return type(name, (_ReactComponent,), {"__module__": __name__, **definition})


#: A figure (assets/chart_view.js). `figure`: of `drawing`; `clickData`: the points last clicked.
Chart = _component_class("tracekit_chart", "Chart", "id", "figure", "clickData")
#: A select, and radio buttons or, if `value` is a list, checkboxes (assets/components.js). `options`: value and label.
Menu = _component_class("tracekit_components", "Menu", "id", "options", "value")
Choice = _component_class("tracekit_components", "Choice", "id", "options", "value")
#: A `details` of HTML (assets/components.js). `children`: its summary, then what a browser draws once it is opened.
Folded = _component_class("tracekit_components", "Folded", "children", "className", "open")
#: The named views of a table (assets/components.js). `query`: the view that is shown; `name`: that in the address.
Views = _component_class("tracekit_components", "Views", "id", "query", "name")


def drawing(figure: go.Figure) -> dict[str, Any]:
    """Return the traces and layout of a figure for the browser, without the template, which the assets contain."""
    sent: dict[str, Any] = figure.to_plotly_json()
    sent["layout"].pop("template", None)
    return sent


GLOSSARY: Final[dict[str, str]] = {
    "costs alone": "The share of a step that is lost with only this as recorded and all else like its peers, exact.",
    "summed": "What each of these workers alone costs, summed: what they cost together if costs add up.",
    "launch delays": "Host-side time (data loading, Python, kernel launches) between an op being ready and its start.",
    "GPU-hours a day": "Assumes that all GPUs of the layout run all day as in the traced steps.",
    "lost": "What goes with the causes, and what stragglers cost beyond them, by the verdict of each job.",
    "recorded": "Mean step time as recorded in the trace.",
    "original": "Mean step time of the replay without launch delays.",
    "ideal": "Mean step time if every compute op took the mean and every communication op the median of its kind.",
    "trust": "Whether the replay explains the recording: replay error and launch delays both at most 5%.",
    "replay error": "How far the replay with launch delays is from the recorded step time.",
    "worker": "One data-parallel rank x pipeline stage cell, with all its tensor- and context-parallel ranks.",
    "stage": "Pipeline stage, pp_rank: a slice of the model's layers, or several with interleaving: its model chunks.",
    "op kind": "What an operation does: forward-compute, backward-send, grads-reduce-scatter ...",
    "peers": "Ops of the same kind on other workers and microbatches of the step.",
    "fix": "What to do about it; its price is the step time of a replay, with its error.",
    "assumes": "What the price takes for granted and the trace does not show.",
    "sure": "How sure it is that the cause exists where it is named: 50% where the weakest figure of its evidence is"
    " at its threshold, at most 99%. Not a share of the loss.",
    "at most": "A bound: the fix saves at most this, how much of it is reached is open.",
}

#: What a finding on a GPU is about, by its reason: why the GPU is idle, or what else takes time.
GPU_REASONS: Final[dict[str, str]] = {
    IdleReason.LOADER: "the data loader has no batch ready",
    IdleReason.GC: "Python collects garbage",
    IdleReason.SYNCHRONISE: "a call waits for the GPU",
    IdleReason.ALLOCATION: "GPU memory is allocated or freed",
    IdleReason.RUNTIME_CALL: "another call of the GPU's runtime",
    IdleReason.OPERATOR: "an operator prepares its launch",
    IdleReason.PYTHON: "Python runs between operators",
    IdleReason.LAUNCH_CALL: "the call that launches",
    IdleReason.LAUNCH_LATENCY: "launched, and on its way to the GPU",
    IdleReason.QUEUED: "launched long before, and held up on the GPU",
    IdleReason.UNKNOWN: "its launch was not recorded",
    IdleReason.CHECKPOINT: "a checkpoint is written",
    "kernel": "kernels below what the card can do",
    "transfer": "copies that nothing hides",
    "launch-bound": "kernels that end before the next is launched",
}
