"""Kernels that take longer than their card needs for what they compute and move."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.gpu_time import MOST_OF_A_KIND, candidate, plain, share_of
from tracekit.analysis.evidence.gpu_losses import host_time, idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.gpu.roofline import Card, bytes_of, element_count, find_unfused_attention, roofline_s, work_of
from tracekit.analysis.gpu.times import SHORT_S
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, numbered, of_each
from tracekit.analysis.whatif.interventions import LessTime
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import LossKind, Spent
from tracekit.trace.gpu_activity import KernelClass

#: Kernels of float32 that use no tensor cores.
_NO_TENSOR_CORES = re.compile(r"sgemm|_SB_|simt_s|_ffma_", re.IGNORECASE)


class KernelThresholds(Struct, frozen=True):
    """When kernels are slower than their card."""

    #: What good kernels reach of the peak. Definition of the finding.
    reachable: float = 0.7
    #: Share of the recording that an operator takes. Benchmark `one-gpu` finds injected slow and tiny kernels with it.
    share: float = 0.05
    #: How many times as long as it need. Benchmark `one-gpu`, as before.
    slow: float = 2.0
    #: Share of the recording without sizes of inputs. Chosen: nothing says that it can be faster.
    large_share: float = 0.2
    #: Elementwise kernels in a row that are a chain. Chosen: two are often a kernel and its cast.
    shortest_chain: int = 3


KERNELS = KernelThresholds()


class SlowKernels(Detector):
    """An operator's kernels take longer than the card needs at 70 % of its peaks, or than one fused kernel would.

    Paper: not seen. tracekit replays the recording with these kernels as fast as that, an upper bound.
    """

    kind = "slow-kernels"
    title = "Kernels are slower than the card"
    signature = "the operator takes twice as long as 70% of the card's peak for its sizes and type"
    refuted_by = "a library's best kernel takes as long on this card for these sizes"
    next_check = "ncu on the kernel; its type, layout and sizes (multiples of 8 or 64)"
    suggested_fix = "use a faster kernel: 16-bit types, tensor cores, fused operators, sizes that are multiples of 64"
    loss = LossKind.COMPUTE
    repair = Repair("faster-kernels", "Bring the kernels to 70% of the card's peak", "that speed")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        ops = job.ops
        if idle_gpu(job) is None:
            return
        on_gpu = ops["role"].eq("gpu") & ops["kind"].ne(str(KernelClass.COMMUNICATION))
        rows = np.flatnonzero(on_gpu.fill_null(value=False).to_numpy())
        table = job.columns("name", "kind", "duration", "start", "operator", "inputs", "shape", "occupancy")
        table = table.with_columns(lane=pl.Series(numbered(ops["rank"], ops["stream"])))[rows]
        priced = table["operator"].is_null().to_numpy()
        for find in (self._attention, self._layout):
            for whole, kernels in find(job, rows, table):
                yield whole
                priced = priced | kernels
        rows, table = rows[~priced], table.filter(~priced)
        below = list(self._below_peak(job, rows, table))
        yield from below
        named = [kernels.spent.name for kernels in below if kernels.change is not None and kernels.spent is not None]
        yield from self._small_grids(job, rows, table, table["operator"].is_in(named).to_numpy())
        yield from self._chains(job, rows, table)

    def _below_peak(self, job: RecordingSubject, rows: np.ndarray, table: pl.DataFrame) -> Iterator[Candidate]:
        """The operators whose kernels could be faster, the longest first."""
        card = Card.named(job.summary.gpu)
        longest = table.group_by("operator").agg(pl.col("duration").sum()).sort("duration", "operator", descending=True)
        for op, taken_s in longest.head(MOST_OF_A_KIND).iter_rows():
            if share_of(job, taken_s) < KERNELS.share:
                return
            of_op = table["operator"].eq(op).to_numpy()
            kernels = table.filter(of_op)
            took = kernels["duration"].to_numpy()
            need = of_each(partial(_needed_s, card, op), kernels["kind"], kernels["inputs"])
            names = _names(kernels, op)
            if np.isnan(need).all():
                if card is not None and share_of(job, taken_s) >= KERNELS.large_share:
                    yield self._unknown(job, rows[of_op], op, names, taken_s)
                continue
            less_s = np.nan_to_num(np.maximum(took - need / KERNELS.reachable, 0.0))
            if less_s.sum() < (1 - 1 / KERNELS.slow) * taken_s:
                continue
            slow = any(_NO_TENSOR_CORES.search(name) for name in names[1:])
            measured_s = _less_in_tf32_s(job.summary.gpu, kernels, took) if slow else None
            how = " in float32 without tensor cores" if slow else ""
            yield self._faster(
                job, rows[of_op], less_s if measured_s is None else measured_s, op, names, taken_s,
                f"{code_name(op)}{how} takes {share_of(job, taken_s):.0%} of the recording, at"
                f" {np.nansum(need) / took[~np.isnan(need)].sum():.0%} of the card's peak"
                f"{_occupied(kernels)}" + ("" if measured_s is None else _as_measured(measured_s, taken_s)),
                "allow TF32 (torch.set_float32_matmul_precision('high')), or compute in bfloat16 (torch.autocast)"
                if slow else plain(f"use faster kernels for {code_name(op)}: 16-bit types, other layouts, sizes that"
                                   " are multiples of 64, fused operators (torch.compile)"),
                most_s=measured_s,
            )  # fmt: skip

    def _small_grids(
        self, job: RecordingSubject, rows: np.ndarray, table: pl.DataFrame, priced: Bools
    ) -> Iterator[Candidate]:
        """Kernels with fewer blocks than the card has multiprocessors, which leave some of them idle.

        `priced`: kernels that have a price already, [kernels].
        """
        card = Card.named(job.summary.gpu)
        if card is None:
            return
        took = table["duration"].to_numpy()
        blocks = of_each(_blocks, table["shape"])
        small = np.flatnonzero((blocks > 0) & (blocks < card.processors) & (took >= SHORT_S) & ~priced)
        less_s = took[small] * (1 - blocks[small] / card.processors)
        if share_of(job, float(less_s.sum())) < KERNELS.share:
            return
        kernels = table[small]
        ops = kernels.group_by("operator").agg(pl.col("duration").sum()).sort("duration", "operator", descending=True)
        names, taken_s = tuple(ops["operator"].head(_MOST_NAMES).to_list()), float(took[small].sum())
        usual = float(np.average(blocks[small], weights=took[small]))
        yield self._faster(
            job, rows[small], less_s, names[0], names, taken_s,
            f"kernels of {code_name(names[0])}{f' and {ops.height - 1} more' if ops.height > 1 else ''} have"
            f" {usual:.0f} blocks in the mean for {card.processors} multiprocessors, and take"
            f" {share_of(job, taken_s):.0%} of the recording{_occupied(kernels)}",
            "give each kernel more to do at once (a larger batch, fused operators, products with split K), or run it"
            " at the same time as other work, on a stream of its own",
        )  # fmt: skip

    def _unknown(
        self, job: RecordingSubject, rows: np.ndarray, op: str, names: tuple[str, ...], taken_s: float
    ) -> Candidate:
        """An operator that takes long on a known card; what it need take is not known, and so it has no price."""
        lacks, remedy = "the sizes of its inputs are not recorded", "record with record_shapes=True"
        saved_s = np.zeros(job.ops.height)
        saved_s[rows] = job.ops["duration"].gather(rows).to_numpy() / 2
        half_s = job.unchanged_s - float(job.step_times((LessTime(saved_s),)).mean())
        return candidate(
            self.kind,
            job,
            Spent("kernel", op, "", names, len(rows), taken_s, f"{lacks}: {remedy}"),
            f"{code_name(op)} takes {share_of(job, taken_s):.0%} of the recording; twice as fast would save"
            f" {seconds(half_s)}; {lacks}",
            None,
            title="Kernels that may be slower than the card",
            suggested_fix=plain(f"see whether {code_name(op)} can be faster: {remedy}"),
        )

    def _attention(
        self, job: RecordingSubject, rows: np.ndarray, table: pl.DataFrame
    ) -> Iterator[tuple[Candidate, Bools]]:
        """Attention as separate products with a softmax in between, and which kernels it consists of, [kernels]."""
        attention = find_unfused_attention(table, table["lane"].to_numpy(), Card.named(job.summary.gpu))
        kernels, taken_s = attention.kernels, table["duration"].to_numpy()
        least_s, most_s = attention.less_s(taken_s, KERNELS.reachable)
        if share_of(job, float(least_s.sum())) < KERNELS.share:
            return
        inside = table.filter(kernels)
        named = inside["operator"].drop_nulls().to_list() or inside["name"].to_list()
        softmax = next(name for name in named if "softmax" in name.lower())
        math = _called_by(job, rows[kernels], _FUSED_OPERATOR)
        exact = bool((least_s == most_s).all())
        faster = self._faster(
            job, rows, least_s, softmax, tuple(dict.fromkeys([softmax, *named])), float(taken_s[kernels].sum()),
            f"attention runs as products and {code_name(softmax)}, whose scores go through memory:"
            f" {share_of(job, float(taken_s[kernels].sum())):.0%} of the recording"
            + ("" if exact else "; how fast a fused kernel is cannot be told without the card and the sizes of inputs"),
            _FUSE_MATH if math else "use torch.nn.functional.scaled_dot_product_attention, or flash attention",
            most_s=None if exact else most_s, count=int(kernels.sum()),
        )  # fmt: skip
        yield faster, kernels

    def _layout(
        self, job: RecordingSubject, rows: np.ndarray, table: pl.DataFrame
    ) -> Iterator[tuple[Candidate, Bools]]:
        """Convolutions whose inputs and outputs the library transposes, and which kernels do, [kernels]."""
        card, taken_s = Card.named(job.summary.gpu), table["duration"].to_numpy()
        to_last = of_each(lambda name: bool(_TO_CHANNELS_LAST.search(name)), table["name"]) > 0
        to_first = of_each(lambda name: bool(_TO_CHANNELS_FIRST.search(name)), table["name"]) > 0
        transposes = to_last | to_first
        less_s = np.where(transposes, taken_s, 0.0)
        share = share_of(job, float(less_s.sum()))
        if share < KERNELS.share:
            return
        # A convolution transposes both its inputs, and one output back.
        channels_first = np.count_nonzero(to_last) >= np.count_nonzero(to_first)
        most_s, between = None, ""
        if card is not None and channels_first:
            least_s = of_each(partial(_read_s, card), table["kind"], table["inputs"])
            most_s = np.where(np.isnan(least_s), less_s, np.maximum(taken_s - least_s, less_s))
            between = "; batch norms and activations in between may become faster, too"
        names = table.filter(transposes).select(pl.coalesce("operator", "name"))["operator"].unique(maintain_order=True)
        faster = self._faster(
            job, rows, less_s, "nchwToNhwc" if channels_first else "nhwcToNchw",
            (*names.head(_MOST_NAMES), *table.filter(transposes)["name"].unique(maintain_order=True).head(_MOST_NAMES)),
            float(less_s.sum()),
            f"{np.count_nonzero(transposes):,} kernels only transpose tensors between"
            f" {'NCHW and NHWC' if channels_first else 'NHWC and NCHW'} around convolutions: {share:.0%} of the"
            f" recording{between}",
            "keep model and input in channels_last: model.to(memory_format=torch.channels_last), and the same for the"
            " images" if channels_first else
            "tensors are channels_last, and convolutions of their type run in NCHW: compute in bfloat16"
            " (torch.autocast), or leave the layout as it was",
            most_s=most_s, count=int(np.count_nonzero(transposes)),
        )  # fmt: skip
        title = "Convolutions run in another layout than their tensors"
        yield structs.replace(faster, title=title, bound=False), transposes

    def _chains(self, job: RecordingSubject, rows: np.ndarray, table: pl.DataFrame) -> Iterator[Candidate]:
        """Elementwise kernels of one size in a row, which one kernel could do."""
        took = table["duration"].to_numpy()
        element_wise = table["kind"].eq(str(KernelClass.ELEMENT_WISE)).to_numpy()
        # The elements of each operator's largest input; 0 if unknown.
        size = of_each(lambda inputs: element_count(msgspec.json.decode(inputs)[0]) if inputs else 0, table["inputs"])
        order = np.lexsort((table["start"].to_numpy(), table["lane"].to_numpy()))
        size = np.where(element_wise, size, 0)[order]
        goes_on = (size > 0) & (size == np.append(-1, size[:-1]))
        chain = np.cumsum(~goes_on) - 1
        length = np.bincount(chain, minlength=1)
        longest = np.zeros(len(length))
        np.maximum.at(longest, chain, took[order])
        fused, first = length >= KERNELS.shortest_chain, ~goes_on
        in_chain = fused[chain]
        saved_s = np.where(in_chain, took[order], 0.0)
        total_s = float(took[order][in_chain].sum())
        saved_s[first] -= np.where(fused, longest, 0.0)[: int(first.sum())]
        if share_of(job, float(saved_s.sum())) < KERNELS.share:
            return
        totals = table[np.sort(order[in_chain])].group_by("operator").agg(pl.col("duration").sum())
        names = tuple(totals.sort("duration", descending=True)["operator"].head(_MOST_NAMES).to_list())
        less_s = np.zeros(len(order))
        less_s[order] = saved_s
        yield self._faster(
            job, rows, less_s, names[0], names, total_s,
            f"{np.count_nonzero(fused):,} chains of elementwise kernels such as {code_name(names[0])} take"
            f" {share_of(job, total_s):.0%} of the recording, which fused ones read and write once",
            "fuse them with torch.compile, or use fused operators (fused optimizer, fused norms and activations)",
        )  # fmt: skip

    def _faster(
        self,
        job: RecordingSubject,
        rows: np.ndarray,
        less_s: Floats,
        op: str,
        names: tuple[str, ...],
        taken_s: float,
        effect: str,
        action: str,
        *,
        most_s: Floats | None = None,
        count: int | None = None,
    ) -> Candidate:
        """The candidate of GPU ops `rows` that take `less_s` less, or at most `most_s` where that is not the same."""

        def change(each_s: Floats) -> LessTime:
            saved_s = np.zeros(job.ops.height)
            saved_s[rows] = each_s
            return LessTime(saved_s)

        spent = Spent("kernel", op, "", names, len(rows) if count is None else count, taken_s)
        return candidate(
            self.kind,
            job,
            spent,
            effect,
            change(less_s),
            suggested_fix=action,
            bound=most_s is None,
            most=None if most_s is None else change(most_s),
        )


#: Operators that choose a fused kernel themselves, where their inputs allow it.
_FUSED_OPERATOR = "scaled_dot_product_attention"
_FUSE_MATH = (
    "let scaled_dot_product_attention use a fused kernel: 16-bit types, a head size that is a multiple of 8, is_causal"
    " in place of a mask; torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) says what keeps it from that"
)
#: Kernels of cuDNN and MIOpen that change the layout of what convolutions read and write.
_TO_CHANNELS_LAST = re.compile(r"nchw_?(to|2)_?nhwc", re.IGNORECASE)
_TO_CHANNELS_FIRST = re.compile(r"nhwc_?(to|2)_?nchw", re.IGNORECASE)
#: Images have a batch, channels, height and width.
_OF_IMAGES = 4
_MOST_NAMES = 6


def _occupied(kernels: pl.DataFrame) -> str:
    """The mean occupancy of these kernels by time, as the end of a sentence; nothing if it was not recorded."""
    measured = kernels.filter(pl.col("occupancy").is_not_null())
    if measured.is_empty():
        return ""
    mean = np.average(measured["occupancy"].to_numpy(), weights=measured["duration"].to_numpy() + 1e-12)
    return f", with {mean:.0f}% occupancy"


def _blocks(shape: str | None) -> int:
    """The blocks of a kernel of this grid and block size; 0 if unknown."""
    sizes = (shape or "").partition("/")[0].split("x")
    return math.prod(map(int, sizes)) if all(map(str.isdecimal, sizes)) else 0


def _names(table: pl.DataFrame, op: str) -> tuple[str, ...]:
    """The operator, then the kernels that it launches, longest first."""
    kernels = table.group_by("name").agg(pl.col("duration").sum()).sort("duration", "name", descending=[True, False])
    return (op, *kernels["name"].head(_MOST_NAMES).to_list())


def _called_by(job: RecordingSubject, rows: Ints, operator: str) -> bool:
    """Whether one of these GPU ops was launched inside this operator."""
    launched_by = host_time(job).launched_by[rows]
    if "outer" not in job.ops.columns:
        return False
    outer = job.ops["outer"].gather(launched_by[launched_by >= 0]).cast(pl.String)
    return bool(outer.str.contains(operator, literal=True).any())


def _read_s(card: Card, kind: str, inputs: str | None) -> float:
    """The least time that an elementwise kernel of images takes: to read the first one; seconds, nan for others."""
    if kind != str(KernelClass.ELEMENT_WISE) or not inputs:
        return float("nan")
    dims, types = msgspec.json.decode(inputs)
    if not dims or not isinstance(dims[0], list) or len(dims[0]) != _OF_IMAGES or not types:
        return float("nan")
    return element_count(dims[:1]) * bytes_of(str(types[0])) / card.bytes_s


def _less_in_tf32_s(gpu: str | None, kernels: pl.DataFrame, took_s: Floats) -> Floats | None:
    """What TF32 saves of products in float32 by the passport of the card, seconds, [kernels]; None without one."""
    from tracekit.analysis.hardware.passport import known_passport  # few recordings have such products
    from tracekit.analysis.hardware.scaling import Scaling, works_of

    passport = known_passport(gpu)
    if passport is None or not passport.kernels["dtype"].eq("tf32").any():
        return None
    works = works_of(kernels.with_columns(role=pl.lit("gpu")), took_s)
    scaling = Scaling(passport, passport, "tf32")
    factor = np.array([min(scaling.of(work).factor, 1.0) for work in works.each])
    return np.asarray(took_s * (1 - factor[works.of_op]))


def _as_measured(less_s: Floats, taken_s: float) -> str:
    return f"; in TF32, such kernels take {1 - less_s.sum() / taken_s:.0%} as long on this card, as measured"


def _needed_s(card: Card | None, op: str, kind: str, inputs: str | None) -> float:
    """How long the card needs at its peak, seconds; nan if unknown: products by what they compute, others by bytes."""
    if card is None or not inputs:
        return float("nan")
    dims, types = msgspec.json.decode(inputs)
    flops, moved, _ = work_of(op, dims, types)
    if moved is None or (flops is None and kind != str(KernelClass.ELEMENT_WISE)):
        return float("nan")
    dtype = next((str(dtype) for dtype in types if str(dtype)), "")
    return roofline_s(flops or 0.0, moved, dtype, card)
