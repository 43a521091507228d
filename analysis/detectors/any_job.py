"""Kinds of findings that pipelines as well as op graphs or recordings of GPUs have: their words, and who looks where.

In: a job. Out: the candidates of functions that each look in one kind of job; modules of other kinds are not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from msgspec import structs

from tracekit.analysis.detectors.detector import SLOW_RANK, Advice, Candidate, Detector, Repair, Treatment
from tracekit.analysis.evidence.subject import MACHINE, SPEED_OF_PEERS, Cause, JobKind, Plan, Subject
from tracekit.report.finding import LossKind
from tracekit.trace.model import OpKind


class _InSeveralKinds(Detector):
    """A kind of finding in several kinds of jobs. `finders`: the module and function for each of them."""

    finders: ClassVar[Mapping[JobKind, str]]

    def find(self, job: Subject) -> Iterator[Candidate]:
        for kind, finder in self.finders.items():
            if kind in job.kind:
                yield from _function(finder)(self.kind, job)


def _function(name: str) -> Any:
    module, function = name.split(".")
    return getattr(import_module(f"tracekit.analysis.detectors.{module}"), function)


class BadWorker(_InSeveralKinds):
    """A worker that computes slower than its peers of the same stage, always or at times.

    Paper: finds it by M_W, the share of the loss saved by idealising the slowest 3 % of the workers (by min(S_dp,
    S_pp)). tracekit names the workers themselves, from the median ratio of their forwards, and of their backwards, to
    those of the same stage and microbatch in each step. 4 %: half the effect of an idle neighbour or a warmer rack on a
    GPU, ten times the differences between healthy ones. Chance: a log-likelihood ratio that noise reaches in one
    healthy job of a thousand, for any number of workers and step patterns; the noise is that of the run, with its
    memory from step to step (see `significance`). The price comes from a replay in which the worker runs like its peers
    in the steps in which it is slow. M_W cannot single out one worker of a DP rank that is slow as a whole.
    """

    kind = "bad-worker"
    title = "Worker computes slower than its peers"
    signature = "forwards, backwards or both of one worker take longer, on all microbatches of the steps it is slow in"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = Advice(
        gpu="DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host:"
        " PSI, steal, run queue",
        cpu="its cores: clocks (turbostat), other processes (top); host: PSI, steal, run queue",
    )
    suggested_fix = SLOW_RANK
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES
    repair = Repair("replace-workers", "Make the rank as fast as its peers", SPEED_OF_PEERS, excludes=MACHINE)
    finders: ClassVar = {JobKind.GRAPH: "late_rank.slower_computes", JobKind.PIPELINE: "slow_computes.bad_workers"}

    def review(self, job: Any, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Leave out workers that are slow because their processes are stopped, and those whose slowness costs nothing
        once all other findings are gone.
        """
        if not any(candidate.kind == self.kind and candidate.where.workers for candidate in candidates):
            return candidates
        reviewed: Sequence[Candidate] = _function("slow_computes.only_costly")(self.kind, job, candidates)
        return reviewed


class DataSkew(_InSeveralKinds):
    """A DP rank has more data than the others: its ops take longer on all stages, in proportion.

    Paper: no signature; finds sequence lengths by the correlation of forwards and backwards, which a slow worker raises
    as well. tracekit separates what the stages of a DP rank share from what a worker adds, so it still names a bad
    worker next to the skew. Machines that are slow as a whole show in their optimizer, which does not depend on tokens.
    The rule needs a pipeline: with one stage, data and machine cannot be separated.
    """

    kind = "data-skew"
    title = "A DP rank gets more data than the others"
    signature = (
        "forwards and backwards of one DP rank take longer by one factor on all its stages; its optimizer does not"
    )
    refuted_by = "its microbatches have as many tokens, and as long sequences, as those of other DP ranks"
    next_check = "tokens and sum of squared sequence lengths per DP rank and step; the sampler's shards"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by count"
    part = "workload"
    label = "uneven work"
    treatment = Treatment.BALANCE_DATA
    repair = Repair("even-work", "Give the rank the same work as its peers", "the same work as its peers")
    finders: ClassVar = {JobKind.GRAPH: "late_rank.more_computes", JobKind.PIPELINE: "uneven_work.ranks_with_more_work"}


class SlowNetworkCard(_InSeveralKinds):
    """The network card of a worker's host is slow in sending, in receiving, or in both.

    Paper: no signature. A card carries the transfers to both neighbouring stages and the collectives of its stage. So a
    slow card shows in all transfers of one side (three times the usual), and in the ring of its stage, which is as slow
    as its slowest card: one and a half times the rings of the other stages. If members of a ring are recorded until
    they themselves are done, a member that takes half as long again as its peers is evidence enough. A ring that is
    slow on all members alike, without transfers that identify one of them, blames nobody.
    """

    kind = "slow-nic"
    title = "Network card of a worker is slow"
    signature = "all transfers of one side of a card, and the collectives of its stage; or those of one worker alone"
    refuted_by = "one of the links over the same card is as fast as usual"
    next_check = Advice(
        gpu="node_infiniband_port_transmit_wait_total, symbol_error_total, hw_counters/np_cnp_sent of its network card;"
        " DCGM_FI_DEV_PCIE_REPLAY_COUNTER; NCCL Inspector's coll_busbw_gbs of its ranks",
        cpu="errors, drops and speed of its network card (ethtool -S, ip -s link); iperf3 from its host to others",
    )
    suggested_fix = (
        "have the network card of {hosts} checked: cable, port, PCIe slot (symbol errors, transmit_wait, PCIe replays);"
        " if it has errors, swap the node for a spare"
    )
    part = "network"
    repair = Repair(
        "repair-nic",
        "Repair the network card, so that all that passes it is as fast as elsewhere",
        "the speed of other cards afterwards",
    )
    finders: ClassVar = {JobKind.GRAPH: "late_rank.behind_in_a_part", JobKind.PIPELINE: "network.slow_cards"}


class LateData(_InSeveralKinds):
    """A step waits for its data.

    Paper: excludes launch delays from the replay, and discards jobs in which they exceed 5 % of the step. tracekit
    keeps them per op: delays of the first forwards, and of the first gathering of parameters, are data loading, priced
    by a replay without them. If the loading itself was recorded, its duration is the wait, and a delay after it has
    another cause.
    """

    kind = "late-data-loading"
    title = "Steps wait for their data"
    signature = "long data loading, or a launch delay before the first ops where loading was not recorded"
    refuted_by = "the delay stays when the loader's workers and prefetch depth are doubled"
    next_check = "the loader's queue depth at the start of a step; host: PSI io, page cache, storage latency"
    suggested_fix = (
        "raise num_workers and prefetch_factor of the data loader on {ranks} until steps no longer wait for it; if that"
        " does not help, see to the storage that it reads from"
    )
    part = "data-loading"
    loss = LossKind.INPUT
    repair = Repair("prefetch-data", "Prefetch data, so that no forward waits for it")
    finders: ClassVar = {
        JobKind.RECORDING: "gpu_host.late_loader",
        JobKind.GRAPH: "late_rank.behind_in_a_part",
        JobKind.PIPELINE: "host_work.late_data",
    }


class SlowHostCode(_InSeveralKinds):
    """The training thread of a worker takes longer between its ops than those of its peers.

    Paper: ignores launch delays. tracekit compares what the script does between the ops of a worker (launch delays,
    host work, the time between a forward and its backward) with its peers, beyond their noise and beyond what a worker
    that computes slower takes longer there too, and reports the place in the step.
    """

    kind = "slow-host-code"
    title = "Host code of a worker takes longer than its peers'"
    signature = "one worker is late at the same place of each step, with nothing recorded before that it waited for"
    refuted_by = "a CPU profile of the rank shows the same time at that place as one of its peers"
    next_check = (
        "a CPU profile of the rank's training thread at that place (py-spy record): user code, logging, evaluation,"
        " data preparation; run queue and steal of its cores"
    )
    suggested_fix = (
        "record the training thread of {ranks} (py-spy record), and move what runs only there off that thread:"
        " logging, evaluation, data preparation"
    )
    part = "host"
    repair = Repair("speed-up-host-code", "Make the host code as fast as that of its peers", SPEED_OF_PEERS)
    finders: ClassVar = {JobKind.GRAPH: "late_rank.behind_in_a_part", JobKind.PIPELINE: "host_work.slow_code"}


class HostBound(_InSeveralKinds):
    """Launch delays and host work between ops: Python or kernel launches cannot keep up with the GPUs.

    Paper: as for late data; above 5 %, the job's replay is not trusted. tracekit names it if it takes at least 4 % of
    the step, not counting waits for data and what single workers take longer than their peers.
    """

    kind = "host-bound-launch"
    title = "The host cannot keep up: launch delays and host work between ops"
    signature = "launch delays and host work between ops that together make up a large share of the step"
    refuted_by = "CUDA graphs or larger microbatches leave the gaps as they are"
    next_check = "a CPU profile of the launching thread; host: run queue, steal, CPU frequency; gaps in a Kineto trace"
    suggested_fix = (
        "launch less: CUDA graphs or torch.compile(mode='reduce-overhead'), no .item() or logging within the step; pin"
        " the launching threads to cores"
    )
    part = "host"
    loss = LossKind.HOST
    explains_delays = False  # its whole signature is launch delays, and waits that the graph lacks look the same
    repair = Repair(
        "hide-launch-delays", "Remove launch delays and host work between ops", assumes="all launch delays go"
    )
    finders: ClassVar = {JobKind.RECORDING: "gpu_host.launch_bound", JobKind.PIPELINE: "host_work.launches_and_code"}

    def fixes(self, job: Subject, finding: Cause) -> Iterator[Plan]:
        """See `Detector.fixes`. Of one GPU, the price is that of a graph."""
        for plan in super().fixes(job, finding):
            graph = {"assumes": "one launch for all kernels"}
            yield plan if finding.spent is None else structs.replace(plan, details=graph)


class GarbageCollection(_InSeveralKinds):
    """Python's garbage collector stops a worker between its ops or during a forward.

    Paper: pauses hit forwards only (backwards are launched from C++), on different workers at different steps, and can
    get longer over time; found by hand. tracekit names collections that were recorded as ops, and pauses of forwards
    that spare backwards too often for chance (see `evidence.pauses`).
    """

    kind = "python-gc"
    title = "Python garbage collection stops workers"
    signature = (
        "recorded collections; or single long forwards, on other workers each time, whose backwards are not long"
    )
    refuted_by = "pauses also in backwards, or at the same microbatch on all workers"
    next_check = "gc.callbacks with a timer, or gc.freeze() and gc.disable() for a hundred steps: do the pauses go?"
    suggested_fix = "call gc.disable() on all ranks, then gc.collect() on all of them in the same step, every N steps"
    part = "python-gc"
    loss = LossKind.STALLS
    stragglers_where_few = True
    by_chance = True
    repair = Repair("planned-gc", "Collect garbage on all ranks in the same steps", "none in other steps")
    finders: ClassVar = {
        JobKind.RECORDING: "gpu_host.collections_between_launches",
        JobKind.GRAPH: "late_rank.behind_in_a_part",
        JobKind.PIPELINE: "pauses.collections_of_workers",
    }

    def fixes(self, job: Subject, finding: Cause) -> Iterator[Plan]:
        """Collect garbage on all ranks in the same steps, at an interval that costs little."""
        planned: Iterator[Plan] | None = _function("pauses.planned_collections")(job, finding)
        yield from super().fixes(job, finding) if planned is None else planned


class Checkpoints(_InSeveralKinds):
    """Checkpoints stop workers while all others wait, or stop the whole job.

    Paper: leaves out steps with a checkpoint. tracekit names checkpoints that were recorded as ops and prices them by a
    replay without them. An unrecorded checkpoint shows as time in which no rank does anything, before anybody begins a
    step or between two steps: a tenth of the usual step or more, in some steps but not in most. Or all ranks, or the
    first DP rank alone, are late with the first ops of every n-th step (`evidence/pipeline_subject.py`). Data that is
    late for all ranks is late in every step, or in irregular ones. A period makes the stall a checkpoint (or an
    evaluation); without one, time in which no rank does anything is still named, with less confidence.
    """

    kind = "checkpoint-stalls"
    title = "Checkpoints stop the job"
    signature = "recorded checkpoints that make up a large share of the time; or all ranks stand still every n steps"
    refuted_by = "the steps stay as long with checkpoints off"
    next_check = "how long a rank writes and to where; bandwidth of the storage; whether all ranks wait for one"
    suggested_fix = (
        "write checkpoints in the background (torch.distributed.checkpoint.async_save), each rank its own shard"
    )
    part = "checkpoint"
    loss = LossKind.STALLS
    stragglers_where_few = True
    lost_to = "go to checkpoints"
    planned = OpKind.CHECKPOINT
    repair = Repair("async-checkpoint", "Write checkpoints asynchronously")
    finders: ClassVar = {JobKind.PIPELINE: "stops.checkpoint_stalls", JobKind.RECORDING: "gpu_host.checkpoints_on_host"}

    def fixes(self, job: Subject, finding: Cause) -> Iterator[Plan]:
        """See `Detector.fixes`. Workers that take longer than their peers are to be as fast as these."""
        for plan in super().fixes(job, finding):
            goal = {"kind": "even-checkpoints", "title": "Make checkpoints as fast as those of the peers"}
            yield structs.replace(plan, **goal) if finding.where.workers else plan
