"""Fuzzing what stands beside the ops: metadata, the layout file, and texts that are typed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.fuzz.doors import analyse, ends_well
from tests.handmade import LAYOUT, published_columns, slow_frame, slow_trace
from tests.properties import examples
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.collectors.importers.published import read_mapping
from tracekit.commands.options import Condition, parse_layers, parse_steps
from tracekit.trace.canonical import METADATA_KEY, Trace

ODD = st.sampled_from([0, -1, 1, 2.5, 1e12, 10**12, 10**400, float("nan"), float("inf"), "", "a\ud800\x1b[31m\n", None])
JSON = st.recursive(
    ODD | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["0", "1", "model", "host", "gc"]) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
#: Keys of the free metadata that something reads, with what they are for most.
GPU = st.fixed_dictionaries({}, optional={"model": JSON, "host": JSON, "throttled": JSON, "reasons": JSON})
SERIES = st.fixed_dictionaries({}, optional={"ranks": JSON | st.just([0]), "time": JSON, "value": JSON})
MACHINES = st.dictionaries(st.text(max_size=3), SERIES | JSON, max_size=3)
FREE = st.fixed_dictionaries(
    {},
    optional={
        "gpus": JSON | st.dictionaries(st.sampled_from(["0", "1", "2", "x"]), GPU | JSON, max_size=4),
        "sampled": JSON | st.dictionaries(st.sampled_from(["DCGM_FI_DEV_SM_CLOCK", "x_total"]), JSON | MACHINES),
        "hosts": JSON | st.dictionaries(st.sampled_from(["0", "1", "2", "3", "-1", "x"]), JSON, max_size=4),
        "collect": JSON | st.dictionaries(st.just("nested"), JSON | st.dictionaries(st.just("gc"), JSON)),
        "layers": JSON | st.lists(ODD | st.integers(1, 2000), min_size=2, max_size=2),
        "time_unit": JSON | st.sampled_from(["s", "ms", "ns"]),
        "odd key \x1b": JSON,
    },
)
HEADER = st.fixed_dictionaries(
    {},
    optional={
        "schema_version": JSON | st.just(1),
        "name": JSON,
        "layout": JSON
        | st.dictionaries(st.sampled_from(["dp", "pp", "tp", "vpp", "world_size", "x"]), ODD | st.just(2)),
        "step_starts": JSON | st.dictionaries(st.sampled_from(["0", "1", "x", "-1"]), ODD | st.floats(), max_size=3),
        "metadata": JSON,
    },
)
#: Bits of YAML, and of it what may explode.
YAML_BITS = st.sampled_from(
    [
        "dp_size: 2\n",
        "pp_size: 2\n",
        "world_size: 4\n",
        "dp_size: ",
        "- ",
        "a: &a [x, x]\n",
        "b: &b [*a, *a]\n",
        "*b",
        "<<: ",
        "{",
        "}",
        "[",
        "]",
        "? ",
        ": ",
        "!!python/object:os.system ",
        "!!binary ",
        "1_000",
        "0x7f",
        "1:30:00",
        "2020-13-45",
        "\t",
        "\n",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "\x00",
        "\ufeff",
        "'",
        '"',
        "# ",
        "| \n ",
        "trial_name: 2001-01-01\n",
        "9" * 50,
        "~",
    ]
)
WORDS = st.sampled_from(
    [
        "all",
        "compute",
        "communication",
        "kind=",
        "kind=gc",
        "stage=",
        "stage=1",
        "worker=1,0",
        "worker=",
        "step=0-1",
        "steps=",
        "microbatch=1",
        "slowest=3%",
        "slowest=nan",
        "slowest=-1",
        "slowest=1e400",
        "and",
        "or",
        "not",
        "but",
        "(",
        ")",
        "=",
        "%",
        "9" * 30,
        "0-1000000",
        "0-1000000,0-1000000",
        "-1",
        ",",
        "dp=1",
        "dp_rank 0",
        "everything",
        "\x00",
        "ü",
        "٣",
        "stage=٣",
    ]
)
STRATEGIES: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "test_any_free_metadata_ends_in_a_report_or_one_error": (FREE,),
    "test_any_header_ends_in_a_report_or_one_error": (HEADER,),
    "test_any_layout_file_ends_in_sizes_or_one_error": (st.lists(YAML_BITS, max_size=14).map("".join) | st.text(),),
    "test_any_selection_ends_in_an_answer_or_one_error": (
        st.lists(WORDS, max_size=8).map(" ".join) | st.text(max_size=20),
    ),
    "test_any_text_of_an_option_ends_in_numbers_or_one_error": (
        st.text("0123456789,-.%<>= swalodnrpiecy_e", max_size=20)
        | st.lists(
            WORDS | st.sampled_from(["slowdown>", "waste>=", "1.1", "5%", "9,9", "1-", "12,40-45"]), max_size=5
        ).map("".join),
    ),
}
TRACE = slow_trace((0, 1, 2))
JOB = PipelineJob(TRACE)


@examples(15)
@given(*STRATEGIES["test_any_free_metadata_ends_in_a_report_or_one_error"])
def test_any_free_metadata_ends_in_a_report_or_one_error(free: dict[str, Any]) -> None:
    ends_well(lambda: analyse(PipelineJob(Trace.from_frame(TRACE.ops, LAYOUT, name="job", metadata=free))))


@examples(25)
@given(*STRATEGIES["test_any_header_ends_in_a_report_or_one_error"])
def test_any_header_ends_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.parquet"
    whole = {"schema_version": 1, "name": "job", "layout": LAYOUT.to_dict(), "metadata": {}} | header
    with path.open("wb") as file:
        slow_frame((0, 1)).write_parquet(file, metadata={METADATA_KEY: json.dumps(whole)})
    ends_well(lambda: analyse(tracekit.load(path)))


@examples(80)
@given(*STRATEGIES["test_any_layout_file_ends_in_sizes_or_one_error"])
def test_any_layout_file_ends_in_sizes_or_one_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    path, trace = folder / "any.yaml", folder / "published.parquet"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if not trace.exists():
        published_columns(slow_frame((0, 1))).write_parquet(trace)
    header = ends_well(lambda: read_mapping(path, "dp_size: 4"))
    if header is not None:
        ends_well(lambda: tracekit.load(trace, layout=path))


@examples(150)
@given(*STRATEGIES["test_any_selection_ends_in_an_answer_or_one_error"])
def test_any_selection_ends_in_an_answer_or_one_error(text: str) -> None:
    answer = ends_well(lambda: JOB.answer(text))
    assert answer is None or answer.step_time_s > 0


@examples(100)
@given(*STRATEGIES["test_any_text_of_an_option_ends_in_numbers_or_one_error"])
def test_any_text_of_an_option_ends_in_numbers_or_one_error(text: str) -> None:
    steps = ends_well(lambda: parse_steps(text, "--ignore-steps"))
    if steps is not None:
        ends_well(lambda: JOB.without_steps(steps))
    layers = ends_well(lambda: parse_layers(text))
    if layers is not None:
        ends_well(lambda: JOB.whatif(layers=layers))
    condition = ends_well(lambda: Condition(text))
    if condition is not None:
        assert isinstance(condition.holds(JOB.attribution), bool)
