"""Plans and their times by the definitions alone, in plain Python: what `tracekit.analysis.plans` is compared with.

Models are JSON objects, as in a model file. Nothing here imports the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from typing import Any

Model = dict[str, Any]


def draw(seed: int, *, layers: int, stages: int, memory: float | None = None, **changes: Any) -> Model:
    """A random job. `memory`: the limit over what the plan in use needs; `changes`: of the model."""
    pick = random.Random(seed)
    heavy, slow_link = pick.choice((1.0, 4.0)), pick.choice((0.1, 1.0, 10.0))
    model: Model = {
        "model_version": 1,
        "layers": [
            {
                "forward_s": [pick.uniform(0, 2e-3), pick.uniform(1e-3, 5e-3)],
                "backward_s": [pick.uniform(0, 2e-3), pick.uniform(2e-3, 1e-2)],
                "state_gb": pick.uniform(0.5, 1.5),
                "gradient_mb": pick.uniform(1, 60) * heavy,
                "activation_gb": pick.uniform(0.1, 0.7),
                "boundary_gb": pick.uniform(0.02, 0.06),
            }
            for _ in range(layers)
        ],
        "stages": stages,
        "replicas": pick.choice((1, 4)),
        "samples": 16,
        "transfer_s": [pick.uniform(0, 2e-3) * slow_link, pick.uniform(0, 3e-4) * slow_link],
        "reduce": {"fixed_s": pick.uniform(0, 6e-3), "per_mb_s": pick.uniform(1e-4, 1e-3)},
        "optimizer_s": 0.003,
        "space": {
            "schedule": ["gpipe", "1f1b"],
            "microbatches": [2, 4, 8, 16],
            "recompute": "stages",
            "split": "free",
            "buckets": "free",
        },
    }
    split = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    model["now"] = {
        "split": split,
        "schedule": "1f1b",
        "microbatches": 8,
        "recompute": [False] * stages,
        "buckets": [[count] for count in split],
    }
    model.update(changes)
    if memory is not None:
        model["memory_gb"] = memory * memory_gb(model, model["now"])
    return model


def step_time_s(model: Model, plan: Model) -> float:
    """What a step of this plan takes, compute by compute."""
    microbatches, stages = plan["microbatches"], len(plan["split"])
    samples = model["samples"] / microbatches
    forward, backward = (
        [_line(layer[key], samples) for layer in model["layers"]] for key in ("forward_s", "backward_s")
    )
    begins = [sum(plan["split"][:stage]) for stage in range(stages)]
    layers = [range(begin, begin + count) for begin, count in zip(begins, plan["split"], strict=True)]
    again = [[forward[at] * plan["recompute"][stage] for at in layers[stage]] for stage in range(stages)]
    slowness = model.get("slowness") or [1.0] * stages
    takes = {
        "F": [sum(forward[at] for at in layers[stage]) * slowness[stage] for stage in range(stages)],
        "B": [
            (sum(backward[at] for at in layers[stage]) + sum(again[stage])) * slowness[stage] for stage in range(stages)
        ],
    }
    waiting = [_order(plan["schedule"], stages, stage, microbatches) for stage in range(stages)]
    free, ended = [0.0] * stages, {}
    last = [0.0] * stages
    while any(waiting):
        for stage in range(stages):
            while waiting[stage]:
                kind, microbatch = waiting[stage][0]
                before = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= before < stages:
                    if (kind, before, microbatch) not in ended:
                        break
                    ready = ended[kind, before, microbatch] + _line(model["transfer_s"], samples)
                last[stage] = max(free[stage], ready)
                free[stage] = ended[kind, stage, microbatch] = last[stage] + takes[kind][stage]
                waiting[stage].pop(0)
    ends = list(free)
    for stage in range(stages if model["replicas"] > 1 else 0):
        works = [(backward[at] + again[stage][at - begins[stage]]) * slowness[stage] for at in layers[stage]]
        sizes = [model["layers"][at]["gradient_mb"] for at in layers[stage]]
        buckets = reduced(works, sizes, plan["buckets"][stage], model["reduce"])
        ends[stage] = max(ends[stage], last[stage] + buckets[-1]["copied"])
    return max(ends) + model["optimizer_s"]


def reduced(works: list[float], sizes: list[float], counts: list[int], reduce: Model) -> list[dict[str, float]]:
    """Each bucket of a backward, from event to event: `mb`, seconds `alone` and `beside` the backward, and when it is
    `ready`, reduced, `end`, and `copied`.

    `works`: seconds of the layers alone. Backward and reduction slow down while both run.
    """
    now, queue, done, behind = 0.0, [], [], len(works)
    while behind or queue:
        computes = sum(works[behind - counts[len(done)] : behind]) if behind else 0.0
        while computes > 1e-12 or (not behind and queue):
            served = queue[: reduce.get("at_once", 1)]
            speed = reduce.get("compute_rate", 1) if served else 1
            share = (reduce.get("reduce_rate", 1) if behind else 1) / max(len(served), 1)
            lasts = min([computes / speed] * bool(behind) + [bucket["work"] / share for bucket in served])
            now, computes = now + lasts, computes - lasts * speed
            for bucket in served:
                bucket["work"] -= lasts * share
                bucket["beside" if behind else "alone"] += lasts / len(served)
                bucket["end"] = now
            queue = [bucket for bucket in queue if bucket["work"] > 1e-12]
        if behind:
            mb = sum(sizes[behind - counts[len(done)] : behind])
            behind -= counts[len(done)]
            work = reduce["fixed_s"] + reduce["per_mb_s"] * mb
            done.append({"mb": mb, "work": work, "alone": 0.0, "beside": 0.0, "ready": now, "end": now})
            queue.append(done[-1])
    copied = done[-1]["ready"]
    for bucket in done:
        copied = bucket["copied"] = max(copied, bucket["end"]) + reduce.get("copy_per_mb_s", 0.0) * bucket["mb"]
    return done


def memory_gb(model: Model, plan: Model) -> float:
    """The memory of the fullest stage."""
    samples, fullest, begin = model["samples"] / plan["microbatches"], 0.0, 0
    for stage, count in enumerate(plan["split"]):
        layers = model["layers"][begin : begin + count]
        begin += count
        held = plan["microbatches"]
        if plan["schedule"] == "1f1b":
            held = min(held, len(plan["split"]) - stage)
        used = sum(layer["state_gb"] for layer in layers)
        if plan["recompute"][stage]:
            used += sum(layer["boundary_gb"] for layer in layers) * samples * held
            used += max(layer["activation_gb"] for layer in layers) * samples
        else:
            used += sum(layer["activation_gb"] for layer in layers) * samples * held
        fullest = max(fullest, used)
    return fullest


def splits(layers: int, stages: int) -> Iterator[list[int]]:
    """Every way to cut so many layers into so many runs."""
    for cuts in combinations(range(1, layers), stages - 1):
        bounds = [0, *cuts, layers]
        yield [end - begin for begin, end in pairwise(bounds)]


def best_of_all(model: Model) -> tuple[float | None, int]:
    """The shortest step of every plan that fits, by trying all; and the number of plans before memory."""
    space, best, count = model["space"], None, 0
    stages = len(model["now"]["split"])
    for split, schedule, microbatches, recompute in product(
        splits(len(model["layers"]), stages),
        space["schedule"],
        space["microbatches"],
        product((False, True), repeat=stages),
    ):
        count += 1
        plan = {"split": split, "schedule": schedule, "microbatches": microbatches, "recompute": recompute}
        if memory_gb(model, plan) > model.get("memory_gb", float("inf")):
            continue
        plan["buckets"] = [[length] for length in split]
        if model["replicas"] > 1 and space["buckets"] == "free":
            # Buckets delay no compute, so each stage has its own best ones.
            plan["buckets"] = [best_buckets(model, plan, stage) for stage in range(stages)]
        taken = step_time_s(model, plan)
        best = taken if best is None else min(best, taken)
    return best, count


def best_buckets(model: Model, plan: Model, stage: int) -> list[int]:
    """The buckets of one stage whose reductions end first, of all 2^(n-1)."""
    count = plan["split"][stage]
    begin = sum(plan["split"][:stage])
    alone = {**model, "layers": model["layers"][begin : begin + count], "optimizer_s": 0.0}
    if model.get("slowness"):
        alone["slowness"] = [model["slowness"][stage]]
    tries = (buckets for runs in range(1, count + 1) for buckets in splits(count, runs))

    def taken(buckets: list[int]) -> float:
        plan_alone = {**plan, "split": [count], "recompute": [plan["recompute"][stage]], "buckets": [buckets]}
        return step_time_s(alone, plan_alone)

    return min(tries, key=taken)


def _line(line: list[float], samples: float) -> float:
    return line[0] + line[1] * samples


def _order(schedule: str, stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    warm = microbatches if schedule == "gpipe" else min(stages - 1 - stage, microbatches)
    order = [("F", number) for number in range(warm)]
    for number in range(microbatches - warm):
        order += [("F", warm + number), ("B", number)]
    return order + [("B", number) for number in range(microbatches - warm, microbatches)]
