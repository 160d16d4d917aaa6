"""Where a step becomes something that is not finite: the operator, and what it is in fp64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from mantissa.doctor.finding import DOMAIN, OVERFLOW, Finding
from mantissa.doctor.outliers import Outlier, find_outlier
from mantissa.doctor.tape import Node, Outside, Tape
from mantissa.formats import FP32
from mantissa.step.batch import batch_key
from mantissa.step.replay import Replay, ReplayResult
from mantissa.step.trace import FORWARD, Op, Site, Trace
from mantissa.tensors import numbers_in

_MASKED = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "log_softmax", "softmax")
"""Operators that masks of -inf are meant for; they are NaN where all is masked."""
_CANDIDATES = 12
"""Operators that are tried out, one pass each."""


@dataclass(frozen=True)
class Origin:
    """The operator that makes a step not finite, and what is known of it."""

    replay: Replay
    """Replay of the step, at the loss scale that is not finite."""
    format: str
    """Format of the finding."""
    node: Node
    path: tuple[str, ...]
    """Modules and operators from it to the output that it spoils."""
    others: int
    """Operators that are the first of their chains, as this one is; 0: it is the only one."""
    opened: str
    """Fused attention that it is inside of, as torch's MATH kernel shows; empty: none."""

    @property
    def masks(self) -> list[Outside]:
        """Masks from outside that reach it."""
        return [root for root in self.node.roots() if root.is_mask]

    @property
    def from_outside(self) -> bool:
        """Whether what it is given is not finite, and is no mask that it can take."""
        roots = self.node.roots()
        meant = len(self.masks) == len(roots) and self.node.site.op.removeprefix("aten.") in _MASKED
        return bool(roots) and not meant

    @property
    def in_fp32(self) -> bool:
        """Whether it computes in fp32."""
        return self.replay.format.number is FP32

    @cached_property
    def recomputed(self) -> Recomputed:
        """What it is in fp64; taken once, by the first rule that asks."""
        return recompute(self.replay, self.node.number)

    @property
    def kind(self) -> str:
        """Kind of fault of the operator itself."""
        return self.recomputed.kind

    @property
    def is_forward_overflow(self) -> bool:
        """Whether a number of the forward pass is too large."""
        return self.kind == OVERFLOW and self.node.site.direction == FORWARD

    @cached_property
    def outlier(self) -> Outlier | None:
        """Sample that is far larger than others, from which the overflow may come."""
        return find_outlier(self.replay.step.microbatches) if self.is_forward_overflow else None

    @property
    def numbers(self) -> Iterator[str]:
        """What was measured, in words."""
        yield self.recomputed.numbers
        if self.masks:
            rows = ", ".join(map(str, self.masks[0].rows[:4]))
            yield f"{self.masks[0].name} masks all of it in rows {rows}"
        if self.outlier is not None:
            yield str(self.outlier)

    def finding(self, kind: str, details: Iterable[str], site: Site | None = None, **fields: Any) -> Finding:
        """Return the fault.

        Args:
            kind: of the fault.
            details: in words.
            site: where it is; None: at the operator.
            fields: more fields of a finding.
        """
        detail = "; ".join(details)
        if self.opened:
            detail += f"; inside {self.opened}, opened (fused kernels keep the scores in fp32)"
        return Finding.at(site or self.node.site, kind, self.format, detail=detail, path=self.path, **fields)


def locate(replay: Replay, format: str, opened: str = "") -> Origin | None:
    """Return the operator that makes a step not finite; None: none does.

    The tape is sliced from the step's outputs that are not finite. Where the slice has several first operators, each is
    repaired alone (its results that are not finite become ±1), and the one without which the outputs are finite is the
    cause.
    """
    # Everything that is not finite, and of it what reaches an output.
    data = [(batch_key(name), tensor) for batch in replay.step.microbatches for name, tensor in batch.items()]
    tape = Tape([*replay.model.named_parameters(), *replay.model.named_buffers()], data)
    with Trace(replay.model, tape.visit, lines=True):
        result = replay.run()
    slice_ = tape.behind(result.outputs[name] for name in result.nonfinite)
    if not slice_:
        return None

    # The first operator; of several, the one without which all is finite.
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    firsts = [next(nodes) for _, nodes in groupby(starts, key=lambda node: node.number)]
    alone = firsts if len(firsts) == 1 else [node for node in firsts[:_CANDIDATES] if _is_cured_by(replay, node)][:1]
    node = alone[0] if alone else firsts[0]
    path = _path(node, slice_, result)
    origin = Origin(replay, format, node, path, 0 if alone else len(starts), opened)

    # Fused attention hides its operators: torch's MATH kernel shows them.
    if "scaled_dot_product" in node.site.op and not opened and not origin.from_outside:
        with sdpa_kernel(SDPBackend.MATH):
            return locate(replay, format, node.site.op) or origin
    return origin


def _is_cured_by(replay: Replay, node: Node) -> bool:
    """Return whether the outputs are finite where the results of an operator are."""

    def repair(op: Op) -> None:
        for result in numbers_in(op.result) if op.number == node.number else ():
            result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))

    with Trace(None, repair):
        return not replay.run().nonfinite


def _path(cause: Node, slice_: Sequence[Node], result: ReplayResult) -> tuple[str, ...]:
    """Return what the fault passes through: the modules, or operators outside of them, and at last an output."""
    spoiled = result.nonfinite[0]  # the loss, else a gradient, else a buffer
    if cause.site.direction == FORWARD and spoiled == "loss":
        slice_ = [node for node in slice_ if node.site.direction == FORWARD]
    ways = {cause: [cause]}  # from the cause to each operator that it reaches, in order
    for node in slice_:
        sources = [source for source in node.sources if source in ways]
        if sources and node not in ways:
            ways[node] = [*ways[sources[-1]], node]
    _, *passed = [node.site for node in list(ways.values())[-1]]
    names = [name for name, _ in groupby(site.module or site.op.removeprefix("aten.") for site in passed)]
    if len(names) > 4:
        names = [*names[:2], "…", names[-1]]
    return (*names, f"gradient of {spoiled}" if spoiled in result.gradients else spoiled)


# --- what the operator does: the same one in fp64 ---


class Recomputed(NamedTuple):
    """What an operator does in fp64."""

    kind: str
    """``OVERFLOW``: its result is finite there; ``DOMAIN``: it is not."""
    numbers: str


def recompute(replay: Replay, number: int) -> Recomputed:
    """Compute the operator with a number again in fp64, from its own inputs."""
    # Its results, beside those in fp64.
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(op: Op) -> Any:
        if op.number != number:
            return op.run()
        wide = in_fp64(op)  # before the operator, which may change its inputs
        result = op.run()
        pairs.extend(zip([tensor.detach().clone() for tensor in numbers_in(result)], wide, strict=False))
        return result

    with Trace(None, run=compare):
        replay.run()

    # What the first of them says that is not finite.
    for low, wide in pairs:
        bad = ~torch.isfinite(low)
        if low.shape != wide.shape or not bool(bad.any()):
            continue
        reference = wide[bad]
        count = f"{int(bad.sum()):,} of {low.numel():,} elements"
        if bool(torch.isfinite(reference).all()):
            amax, largest = reference.abs().max().item(), torch.finfo(low.dtype).max
            if amax <= largest:
                detail = f"an intermediate result overflows; the reference has at most {amax:.6g}, {count}"
                return Recomputed(OVERFLOW, detail)
            return Recomputed(OVERFLOW, f"reference amax {amax:.6g} > {largest:.6g}, {count}")
        shown = sorted({f"{value:g}" for value in reference[~reference.isfinite()].tolist()})
        return Recomputed(DOMAIN, f"the reference is {', '.join(shown)} too, {count}")
    return Recomputed(DOMAIN, "the operator could not be computed again in fp64")


def in_fp64(op: Op) -> list[Tensor]:
    """Return the floating-point results of an operator, computed in fp64 from its inputs; none if it cannot be."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        return numbers_in(op.func(*tree_map(wide, op.args), **tree_map(wide, op.kwargs)))
    except (RuntimeError, NotImplementedError):
        return []
