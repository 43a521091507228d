"""A job in another dialect of torch.profiler is the same job: same matches, same rank, same cause, same price."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from judges.kinetosim import Job, Trouble
from tests.analysis.gpu.jobs import loaded, on_a_rank
from tests.kineto_files import write

Document = dict[str, Any]
JOB = Job(ranks=4, layers=6, bucket=2, host_us=30.0, seed=3, troubles=(Trouble(2, host=1.5),))
GPU = ("kernel", "gpu_memcpy")
HOST_ONLY = ("cpu_op", "user_annotation")


def events(document: Document, *categories: str) -> list[dict[str, Any]]:
    return [one for one in document["traceEvents"] if one["cat"] in categories]


def drop(document: Document, unwanted: Callable[[dict[str, Any]], bool]) -> None:
    document["traceEvents"] = [one for one in document["traceEvents"] if not unwanted(one)]


def transfers(document: Document) -> list[dict[str, Any]]:
    return sorted((one for one in events(document, "kernel") if "nccl" in one["name"]), key=lambda one: one["ts"])


def is_step(event: dict[str, Any], number: int | None = None) -> bool:
    return str(event["name"]).startswith(f"ProfilerStep#{'' if number is None else number}")


def kernels_of_2023(document: Document, rank: int) -> None:
    for one in transfers(document):
        one["name"] = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"


def kernels_say_nothing(document: Document, rank: int) -> None:
    for one in transfers(document):
        one["name"] = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
        for key in [key for key in one["args"] if key[0].isupper() or key == "dtype"]:
            del one["args"][key]


def no_head(document: Document, rank: int) -> None:
    for key in set(document) - {"traceEvents"}:
        del document[key]


def streams_and_devices_of_their_own(document: Document, rank: int) -> None:
    for one in events(document, *GPU):
        one["args"]["stream"] = one["tid"] = one["tid"] + 14 * rank
        one["args"]["device"] = one["pid"] = rank


def numbers_as_text(document: Document, rank: int) -> None:
    for one in document["traceEvents"]:
        one["args"] = {key: str(value) if type(value) is int else value for key, value in one["args"].items()}


def threads_that_operators_do_not_know(document: Document, rank: int) -> None:
    for one in events(document, "cuda_runtime"):
        one["tid"] = one["tid"] * 7919 + (1 << 31)


def clocks_of_other_hosts(document: Document, rank: int) -> None:
    for one in document["traceEvents"]:
        one["ts"] += 1_000_000.0 * rank


def annotations_of_the_gpu_as_the_users(document: Document, rank: int) -> None:
    compute = [one for one in events(document, "kernel") if "nccl" not in one["name"]]
    for one in [one for one in events(document, "user_annotation") if is_step(one)]:
        document["traceEvents"].append({**one, "pid": 0, "tid": compute[0]["tid"], "ts": one["ts"] + 200.0})


def numbered_collectives(document: Document, rank: int) -> None:
    for number, one in enumerate(transfers(document)):
        one["args"] |= {"Seq": 70 + number, "Comms Id": (1 << 64) - 1 - 7919 * number}


def numbered_collectives_from_the_first_launch_on(document: Document, rank: int) -> None:
    numbered_collectives(document, rank)
    for one in transfers(document)[: 1 + rank]:
        del one["args"]["Seq"], one["args"]["Comms Id"]


def an_id_of_the_communicator(document: Document, rank: int) -> None:
    for one in transfers(document):
        one["args"]["Comms Id"] = 17_774_125


def no_steps(document: Document, rank: int) -> None:
    drop(document, is_step)


def no_host_events(document: Document, rank: int) -> None:
    drop(document, lambda one: one["cat"] in HOST_ONLY)


def last_step_unmarked(document: Document, rank: int) -> None:
    drop(document, lambda one: is_step(one, 7))


def last_step_unmarked_on_one_rank(document: Document, rank: int) -> None:
    drop(document, lambda one: rank == 0 and is_step(one, 7))


def other_events(document: Document, rank: int) -> None:
    """Of Python, of memory, of gloo, and flows of other kinds."""
    first = document["traceEvents"][0]
    group = {"Process Group Name": "9", "Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4, "Rank": rank}
    for category, name, args in (
        ("python_function", "train.py(3): step", {"Python id": 1}),
        ("cpu_instant_event", "[memory]", {"Bytes": -512}),
        ("user_annotation", "gloo:all_reduce", {}),
        ("cpu_op", "record_param_comms", {"Collective name": "allreduce", **group}),
        ("fwdbwd", "fwdbwd", {}),
    ):
        document["traceEvents"].append({**first, "cat": category, "name": name, "tid": 99, "dur": 3.0, "args": args})


SAME = (
    kernels_of_2023, kernels_say_nothing, no_head, streams_and_devices_of_their_own, numbers_as_text,
    threads_that_operators_do_not_know, clocks_of_other_hosts, annotations_of_the_gpu_as_the_users,
    numbered_collectives, numbered_collectives_from_the_first_launch_on, an_id_of_the_communicator, other_events,
    no_steps, no_host_events, last_step_unmarked, last_step_unmarked_on_one_rank,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    """What each rank wrote, and the microseconds that the trouble costs."""
    job, healthy = JOB.run(), Job(ranks=4, layers=6, bucket=2, host_us=30.0, seed=3).run()
    return [json.dumps(job.document(rank)) for rank in range(JOB.ranks)], job.took_us - healthy.took_us


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", SAME, ids=lambda rewrite: rewrite.__name__)
def test_a_dialect_changes_nothing(tmp_path, recorded, rewrite):
    """The price is what the job takes longer than without the trouble; without marks, what lies behind the first anchor
    of it: of three steps, two and some.
    """
    texts, lost = recorded
    for rank, text in enumerate(texts):
        document = json.loads(text)
        rewrite(document, rank)
        write(tmp_path / f"rank{rank}_trace.json", document)
    report = loaded(tmp_path).whatif()
    assert report.collectives
    assert (report.collectives.matched, report.collectives.unmatched) == (9, 0)
    assert report.trust.replay_error == pytest.approx(0, abs=1e-6)
    leading = on_a_rank(report)[0]
    assert (leading.kind, leading.where.ranks) == ("slow-host-code", (2,))
    assert report.verdict.culprit is not None
    least = 0.6 if rewrite in (no_steps, no_host_events) else 0.9
    assert least * lost < report.verdict.culprit.saved_s * 1e6 < 1.1 * lost
