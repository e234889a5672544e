"""The ways to compute attention that tests hold to the same rules: the oracle and each backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layouts import Placement, must_be_alone, place
from tests.problems import Batch, scoring
from tilewright import attention, attention_decode, attention_varlen, reference
from tilewright.operands import Operands

_FUNCTIONS = {
    "dense": attention,
    "varlen": attention_varlen,
    "used": attention_varlen,
    "cache": attention_decode,
    "paged": attention_decode,
}


@dataclass
class Results:
    """One tensor a sequence, shaped as in `OneSequence`; lse is (seqlen_q, heads_q)."""

    out: list[Tensor]
    lse: list[Tensor]
    dq: list[Tensor]
    dk: list[Tensor]
    dv: list[Tensor]
    dsink: list[Tensor]  # one, or none without a sink
    # out, dq, dk and dv, each (rows, heads, dim), where the storage belongs to no sequence
    outside: list[Tensor]

    def cpu(self) -> Results:
        return Results(**{name: [x.cpu() for x in parts] for name, parts in vars(self).items()})

    def named(self) -> list[tuple[str, list[Tensor]]]:
        names = ("out", "lse", "dq", "dk", "dv", "dsink")
        return [(name, getattr(self, name)) for name in names]


@dataclass(frozen=True)
class Path:
    """`name` is "oracle", "default" (the library chooses), or a backend's name."""

    name: str
    device: str = "cpu"

    def __str__(self) -> str:
        return self.name if self.device == "cpu" else f"{self.name}-{self.device}"

    @property
    def backend(self) -> str | None:
        """For the public functions' `backend`."""
        return None if self.name == "default" else self.name

    @property
    def usual_dtype(self) -> torch.dtype:
        """Of the operands of tests that do not ask for one."""
        return torch.bfloat16 if self.name == "fa3" else torch.float32

    def skip_what_it_refuses(self, dtype: torch.dtype, layout: str, *dims: int) -> None:
        """Here is once more what FA-3 takes, so that it cannot refuse more and be skipped."""
        if self.name != "fa3":
            return
        if dtype.itemsize != 2 or layout not in ("dense", "varlen", "used"):
            pytest.skip(f"FA-3 has no {dtype} and no layout but dense and varlen; this is {layout}")
        if any(dim % 8 or dim > 256 for dim in dims):
            pytest.skip(f"FA-3 has head dims in steps of 8 up to 256; these are {dims}")

    def run(self, batch: Batch, layout: str = "dense", **options: Any) -> Results:
        """Forward and backward of the batch, through storage that is NaN where nobody's rows lie.

        Sequences that the layout cannot hold together go one by one.
        """
        first = batch.sequences[0]
        self.skip_what_it_refuses(batch.dtype, layout, first.q.shape[-1], first.v.shape[-1])
        if self.name == "oracle":  # which is one in float64 only
            batch = batch.to(torch.float64)
        if must_be_alone(layout, batch):
            return _joined([self.run(x, layout, **options) for x in batch.alone()])
        placement = place(layout, batch)
        queries, keys = placement.queries, placement.keys
        sequences = batch.sequences
        q, dout = (queries.store([getattr(x, n) for x in sequences]) for n in ("q", "dout"))
        k, v = (keys.store([getattr(x, n) for x in sequences]) for n in ("k", "v"))
        dlse = None
        if sequences[0].dlse is not None:
            dlse = queries.store([x.dlse for x in sequences]).transpose(-1, -2)
        operands = Operands(q, k, v, batch.sink)
        compute = _ask_the_oracle if self.name == "oracle" else self._call
        out, lse, *grads = compute(layout, placement, operands, (dout, dlse), options)
        dq, dk, dv, dsink = grads
        owners = ((queries, out), (queries, dq), (keys, dk), (keys, dv))
        return Results(
            out=queries.parts_of(out),
            lse=queries.parts_of(lse.transpose(-1, -2)),
            dq=queries.parts_of(dq),
            dk=keys.parts_of(dk),
            dv=keys.parts_of(dv),
            dsink=[] if dsink is None else [dsink],
            outside=[side.outside(x) for side, x in owners],
        )

    def _call(
        self,
        layout: str,
        placement: Placement,
        operands: Operands,
        into: tuple[Tensor, Tensor | None],
        options: dict[str, Any],
    ) -> list[Tensor | None]:
        """The public function that takes this layout; everything comes back on the CPU."""
        tensors = (operands.q, operands.k, operands.v, operands.sink)
        leaves = [None if x is None else x.to(self.device).requires_grad_() for x in tensors]
        arguments = {name: x.to(self.device) for name, x in placement.arguments.items()}
        q, k, v, sink = leaves
        out, lse = _FUNCTIONS[layout](
            q, k, v, sink=sink, return_lse=True, backend=self.backend, **arguments, **options
        )
        results, into_results = ([out], [into[0]]) if into[1] is None else ([out, lse], [*into])
        wanted = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(results, wanted, [x.to(self.device) for x in into_results])
        everything = [out.detach(), lse.detach(), *grads, *([None] * (sink is None))]
        return [None if x is None else x.cpu() for x in everything]


# The oracle and the sizes of its terms take one thread of a CPU 130 ns a logit in float64, which
# is then most of a test; a GPU takes some hundred launches.
LOGITS_FOR_A_GPU = 1 << 16


def exact_device(batch: Batch) -> str:
    """Where to compute in float64: on a GPU, if there is one and enough for it to do."""
    logits = sum(x.q.shape[1] * x.q.shape[0] * x.k.shape[0] for x in batch.sequences)
    return "cuda" if logits >= LOGITS_FOR_A_GPU and torch.cuda.is_available() else "cpu"


def by_formula(
    batch: Batch, dtype: torch.dtype, with_gradients: bool = True, **options: Any
) -> Results:
    """The oracle on each sequence alone, its arithmetic in `dtype`; the results are on the CPU.

    What is not float64 is plain attention, the measure of what a dtype can do. That stays on the
    CPU: a GPU's products might sum in less than float32, and be too lenient a measure.
    """
    where = exact_device(batch) if dtype == torch.float64 else "cpu"
    batch = batch.to(where).to(dtype)
    return _joined([_one_by_formula(x, with_gradients, options).cpu() for x in batch.alone()])


def _one_by_formula(batch: Batch, with_gradients: bool, options: dict[str, Any]) -> Results:
    (x,) = batch.sequences
    operands = Operands(x.q[None], x.k[None], x.v[None], batch.sink)
    rule = scoring(x.q.shape[-1], options)
    out, lse = reference.forward(operands, rule)
    if not with_gradients:
        return Results([out[0]], [lse[0].T], [], [], [], [], [])
    dlse = None if x.dlse is None else x.dlse.T[None]
    *grads, dsink = reference.backward(operands, rule, x.dout[None], dlse)
    dq, dk, dv = (grad[0] for grad in grads)
    return Results([out[0]], [lse[0].T], [dq], [dk], [dv], [] if dsink is None else [dsink], [])


def _ask_the_oracle(
    layout: str,
    placement: Placement,
    operands: Operands,
    into: tuple[Tensor, Tensor | None],
    options: dict[str, Any],
) -> list[Tensor | None]:
    rule = scoring(operands.q.shape[-1], options)
    if layout == "dense":
        forward = reference.forward(operands, rule)
        return [*forward, *reference.backward(operands, rule, *into)]
    if layout == "paged":
        where = [placement.arguments[x].tolist() for x in ("block_table", "cache_seqlens")]
        forward = reference.forward_paged(operands, *where, rule)
        return [*forward, *reference.backward_paged(operands, *where, rule, *into)]
    if layout == "cache":
        return _oracle_of_cache(placement, operands, into, rule)
    rows = [[(s.start, s.stop) for (s,) in side.rows] for side in _sides(placement)]
    forward = reference.forward_varlen(operands, (rows[0], rows[1]), rule)
    backward = reference.backward_varlen(operands, (rows[0], rows[1]), rule, *into)
    return [*forward, *backward]


def _sides(placement: Placement) -> tuple[Any, Any]:
    return placement.queries, placement.keys


def _oracle_of_cache(
    placement: Placement, operands: Operands, into: tuple[Tensor, Tensor | None], rule: Any
) -> list[Tensor | None]:
    """A padded cache is a packed one in which each sequence has the room of the longest."""
    q, k, v = operands.q, operands.k, operands.v
    lengths = placement.arguments["cache_seqlens"].tolist()
    rows = [(b * q.shape[1], (b + 1) * q.shape[1]) for b in range(q.shape[0])]
    keys = [(b * k.shape[1], b * k.shape[1] + n) for b, n in enumerate(lengths)]
    packed = Operands(*(x.flatten(0, 1) for x in (q, k, v)), operands.sink)
    dlse = None if into[1] is None else into[1].transpose(0, 1).flatten(1, 2)
    out, lse = reference.forward_varlen(packed, (rows, keys), rule)
    *grads, dsink = reference.backward_varlen(
        packed, (rows, keys), rule, into[0].flatten(0, 1), dlse
    )
    out, dq, dk, dv = (
        x.unflatten(0, like.shape[:2]) for x, like in zip((out, *grads), (q, q, k, v), strict=True)
    )
    return [out, lse.unflatten(1, q.shape[:2]).transpose(0, 1), dq, dk, dv, dsink]


def _joined(results: list[Results]) -> Results:
    """Results of sequences that were computed one by one; what reaches the sink adds up."""
    lists = {name: [x for r in results for x in getattr(r, name)] for name in vars(results[0])}
    if lists["dsink"]:
        lists["dsink"] = [torch.stack(lists["dsink"]).sum(dim=0)]
    return Results(**lists)
