"""Variants of one kernel against each other, for whoever tunes it.

A bundle holds the variants, each compiled from a spec of its own; entries of other sources count
too, so that a kernel can be timed beside what it was. On a machine with the compiler,

    python -m tilewright.bench.sweep --bundle DIR --case "grid d128 causal 8k" \\
        --make --vary tile_kv=112,128 --vary overlap=true,false

fills it with all combinations, and on one with the GPU the same without --make and --vary times
them in turns, beside peers and cuBLAS.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.bench import power
from tilewright.bench.cases import Case
from tilewright.bench.command import PlainScreen
from tilewright.bench.gpu import cases as gpu_cases
from tilewright.bench.gpu import run
from tilewright.bench.gpu.contenders import CONTENDERS, Attend, Operands, Way
from tilewright.bench.gpu.records import CUBLAS, Record
from tilewright.bench.timing import Watch
from tilewright.jit.cache import Entry, Folder, Rejected
from tilewright.jit.key import key_of
from tilewright.jit.loader import produce
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.launch import device, fa3

TENSOR_FLOPS = 4096  # of one SM in one cycle, in half precision on sm_90
HEADER = ("variant", "TFLOP/s", "ms", "least", "to cuDNN", "to cuBLAS", "of peak", "MHz", "W")
REQUIRED = (
    "dtype",
    "head_dim",
    "head_dim_v",
    "bounded_left",
    "bounded_right",
    "has_softcap",
    "packed",
)


def spec_of(case: Case) -> ForwardSpec:
    """What the dispatcher compiles for a case whose head dims are a tile's."""
    mask = case.mask
    return catalog.tiled(
        ForwardSpec(
            dtype=case.dtype,
            head_dim=case.head_dim,
            head_dim_v=case.dim_v,
            bounded_left=mask.left is not None,
            bounded_right=mask.right is not None,
            packed=bool(case.lengths),
        ),
        case.seqlen_q,
    )


def varied(spec: ForwardSpec, choices: Iterable[str]) -> list[ForwardSpec]:
    """All combinations of choices such as "tile_kv=112,128" that are legal.

    Raises ValueError for a field that a spec does not have.
    """
    known = {entry.name for entry in fields(spec)} - set(REQUIRED)
    named: dict[str, list[Any]] = {}
    for choice in choices:
        name, _, values = choice.partition("=")
        if name not in known or not values:
            raise ValueError(f"--vary {choice}: want FIELD=VALUE,VALUE with one of {sorted(known)}")
        named[name] = [json.loads(value.lower()) for value in values.split(",")]
    made = [replace(spec, **dict(zip(named, row, strict=True))) for row in product(*named.values())]
    return [variant for variant in made if variant.why_illegal() is None]


def make(bundle: Path, specs: Sequence[ForwardSpec]) -> None:
    for spec in specs:
        kernel = catalog.Kernel(catalog.FA3_FORWARD, spec, fa3.ARCH)
        entry = Folder(bundle).make(key_of(kernel), lambda kernel=kernel: produce(kernel))
        print(f"{entry.name} {entry.facts}", flush=True)


def fitting(bundles: Iterable[Path], case: Case) -> dict[str, Entry]:
    """The bundles' entries that compute a case, named by what sets them apart from each other."""
    wanted = asdict(spec_of(case))
    entries: list[Entry] = []
    for bundle in bundles:
        for entry in Folder(bundle).entries():
            if isinstance(entry, Rejected):
                raise ValueError(f"--bundle {bundle}: {entry}")
            spec = entry.identity["spec"]
            if all(spec.get(name) == wanted[name] for name in REQUIRED):
                entries.append(entry)
    marks = [{**e.identity["spec"], "sources": e.identity["sources"][:6]} for e in entries]
    names = dict.fromkeys(name for mark in marks for name in mark)
    apart = [name for name in names if len({str(mark.get(name)) for mark in marks}) > 1]
    return {
        " ".join(f"{key}={mark[key]}" for key in apart if key in mark) or entry.name: entry
        for entry, mark in zip(entries, marks, strict=True)
    }


def variant(function: Callable[..., Any]) -> Way:
    """A contender from a compiled forward kernel, launched as the dispatcher would."""

    def make(case: Case, operands: Operands) -> Attend:
        where = operands.q.device
        mask, bounds = case.mask, [operands.bounds] * 4
        left, right = (fa3.NO_BOUND if side is None else side for side in (mask.left, mask.right))
        rest = (case.head_dim**-0.5, 0.0, left, right, 0, device.processors(where))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            *batch, rows, heads, _ = q.shape
            out = torch.empty(*batch, rows, heads, v.shape[-1], dtype=q.dtype, device=where)
            lse = torch.empty(*batch, heads, rows, dtype=torch.float32, device=where)
            sink, counter = device.no_sink(where, heads), device.tile_counter(where)
            function(q, k, v, out, lse, sink, *bounds, counter, *rest)
            return out

        return attend

    return make


def table(records: Sequence[Record], processors: int) -> list[tuple[str, ...]]:
    """The fastest first. `of peak` is of the tensor cores at the clock that was sampled."""
    speeds = {record.contender: record.tflops for record in records}
    rows = []
    for r in sorted(records, key=lambda record: record.tflops or 0.0, reverse=True):
        if r.tflops is None:
            rows.append((r.contender, *["-"] * (len(HEADER) - 1)))
            continue
        others = (speeds.get("cudnn"), speeds.get(CUBLAS))
        ratios = [_form(other and r.tflops / other, ".3f") for other in others]
        peak = r.mhz and processors * TENSOR_FLOPS * r.mhz / 1e6
        share = _form(peak and r.tflops / peak, ".3f")
        times = (f"{r.tflops:.1f}", _form(r.ms, ".4f"), _form(r.ms_min, ".4f"))
        load = (_form(r.mhz, ".0f"), _form(r.watts, ".0f"))
        rows.append((r.contender, *times, *ratios, share, *load))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    asked = _parser()
    options = asked.parse_args(arguments)
    chosen = [c for c in gpu_cases.cases() if options.case in gpu_cases.name(c)]
    try:
        if options.make:
            for case in chosen:
                make(options.bundle[0], varied(spec_of(case), options.vary))
            return
        found = [(case, fitting(options.bundle, case)) for case in chosen]
    except ValueError as error:
        asked.error(str(error))
    if not any(entries for _, entries in found):
        asked.error(f"no variant for --case {options.case!r} is in {options.bundle}")
    where = torch.device("cuda", torch.cuda.current_device())
    with power.sampler(where) as watch:
        for case, entries in found:
            records = sweep(case, entries, options, watch)
            _show(case, records, device.processors(where))
            if options.out is not None:
                _append(options.out, records)


def sweep(
    case: Case, entries: Mapping[str, Entry], options: argparse.Namespace, watch: Watch
) -> list[Record]:
    ways = {name: variant(_load(entry)) for name, entry in entries.items()}
    ways |= {name: CONTENDERS[name] for name in options.peers.split(",") if name}
    plan = replace(run.PLAN, seconds=options.seconds, batch_ms=options.batch_ms)
    return list(run.run_case(case, "forward", watch, plan, ways))


def _append(path: Path, records: Sequence[Record]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def _show(case: Case, records: Sequence[Record], processors: int) -> None:
    screen = PlainScreen()
    screen.table(gpu_cases.name(case), HEADER, table(records, processors))
    if reasons := [f"{r.contender}: {r.why_none}" for r in records if r.why_none]:
        screen.lines(reasons)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m tilewright.bench.sweep", description=__doc__)
    add = made.add_argument
    add("--bundle", type=Path, action="append", required=True, help="may stand several times")
    add("--case", required=True, help='part of a name, as "grid d128 causal 8k"')
    add("--make", action="store_true", help="compile the variants into the bundle, and stop")
    add("--vary", action="append", default=[], metavar="FIELD=VALUE,VALUE", help="with --make")
    add("--peers", default="cudnn", help="cudnn,fa2,flex,fa4; cudnn by default")
    add("--seconds", type=float, default=run.PLAN.seconds, help="for each variant")
    add("--batch-ms", type=float, default=run.PLAN.batch_ms, help="200 gives each its own watts")
    add("--out", type=Path, help="append JSON lines to this file")
    return made


def _load(entry: Entry) -> Callable[..., Any]:
    import tvm_ffi

    return tvm_ffi.load_module(str(entry.library)).get_function(entry.name)


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
