"""Variants of one kernel against each other, for whoever tunes it.

A bundle holds the variants, each compiled from a spec of its own; entries of other sources count
too, so that a kernel can be timed beside what it was. With `--pass backward` they are of the
backward's main kernel, else of the forward's. On a machine with the compiler,

    python -m tilewright.bench.sweep --bundle DIR --case "grid d128 causal 8k" \\
        --make --vary tile_kv=112,128 --vary overlap=true,false

fills it with all combinations, and on one with the GPU the same without --make and --vary times
them in turns, beside peers and cuBLAS. An order is given as words, with spaces between them:
--vary "order=lse S add dK P dP dV delta dS write dQ,lse S dK add P dP dV delta dS write dQ".

Of the backward, the whole pass is timed. The forward before it, and the kernels before and after
the main one, are what any call would load: from TILEWRIGHT_BUNDLE, the cache or the compiler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from tilewright.bench import power
from tilewright.bench.cases import Case
from tilewright.bench.command import PlainScreen
from tilewright.bench.gpu import cases as gpu_cases
from tilewright.bench.gpu import run, variants
from tilewright.bench.gpu.contenders import CONTENDERS, Way
from tilewright.bench.gpu.records import CUBLAS, Record
from tilewright.bench.timing import Watch
from tilewright.jit.cache import Entry, Folder, Rejected
from tilewright.jit.key import key_of
from tilewright.jit.loader import produce
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.launch import device, fa3

TENSOR_FLOPS = 4096  # of one SM in one cycle, in half precision on sm_90
HEADER = ("variant", "TFLOP/s", "ms", "least", "to cuDNN", "to cuBLAS", "of peak", "MHz", "W")
FAMILIES = {"forward": catalog.FA3_FORWARD, "backward": catalog.FA3_BACKWARD}
Spec = ForwardSpec | BackwardSpec
SpecT = TypeVar("SpecT", bound=Spec)
# What the case asks for. A backward that sums in a fixed order is a variant like any other.
REQUIRED = (
    "dtype",
    "head_dim",
    "head_dim_v",
    "bounded_left",
    "bounded_right",
    "has_softcap",
    "packed",
)


def spec_of(case: Case, direction: str) -> Spec:
    """What the dispatcher compiles for a pass of a case whose head dims are a tile's.

    `direction` is "forward", or "backward" for the backward's main kernel.
    """
    features: dict[str, Any] = {
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "head_dim_v": case.dim_v,
        "bounded_left": case.mask.left is not None,
        "bounded_right": case.mask.right is not None,
        "packed": bool(case.lengths),
    }
    if direction == "backward":
        return catalog.tiled_backward(BackwardSpec(**features))
    return catalog.tiled(ForwardSpec(**features), case.seqlen_q)


def varied(spec: SpecT, choices: Iterable[str]) -> list[SpecT]:
    """All combinations of choices such as "tile_kv=112,128" that are legal.

    Raises ValueError for a field that a spec does not have.
    """
    known = {entry.name for entry in fields(spec)} - set(REQUIRED)
    named: dict[str, list[Any]] = {}
    for choice in choices:
        name, _, values = choice.partition("=")
        if name not in known or not values:
            raise ValueError(f"--vary {choice}: want FIELD=VALUE,VALUE with one of {sorted(known)}")
        is_words = isinstance(getattr(spec, name), tuple)
        named[name] = [
            tuple(value.split()) if is_words else json.loads(value.lower())
            for value in values.split(",")
        ]
    made = [replace(spec, **dict(zip(named, row, strict=True))) for row in product(*named.values())]
    return [variant for variant in made if variant.why_illegal() is None]


def make(bundle: Path, family: str, specs: Sequence[Spec]) -> None:
    for spec in specs:
        kernel = catalog.Kernel(family, spec, fa3.ARCH)
        entry = Folder(bundle).make(key_of(kernel), lambda kernel=kernel: produce(kernel))
        print(f"{entry.name} {entry.facts}", flush=True)


def fitting(bundles: Iterable[Path], case: Case, direction: str) -> dict[str, Entry]:
    """The bundles' entries that compute a pass of a case, named by what sets them apart.

    Raises ValueError for an entry that is damaged.
    """
    wanted = asdict(spec_of(case, direction))
    entries: list[Entry] = []
    for bundle in bundles:
        for entry in Folder(bundle).entries():
            if isinstance(entry, Rejected):
                raise ValueError(f"--bundle {bundle}: {entry}")
            family, spec = entry.identity["family"], entry.identity["spec"]
            fits = all(spec.get(name) == wanted[name] for name in REQUIRED)
            if family == FAMILIES[direction] and fits:
                entries.append(entry)
    marks = [{**e.identity["spec"], "sources": e.identity["sources"][:6]} for e in entries]
    names = dict.fromkeys(name for mark in marks for name in mark)
    apart = [name for name in names if len({str(mark.get(name)) for mark in marks}) > 1]
    return {
        " ".join(f"{key}={_words(mark[key])}" for key in apart if key in mark) or entry.name: entry
        for entry, mark in zip(entries, marks, strict=True)
    }


def way(function: Callable[..., Any], entry: Entry, direction: str) -> Way:
    """A contender from the loaded function of an entry that fits."""
    if direction == "forward":
        return variants.forward(function)
    # Other sources may have had other fields; those that a launch looks at have always been there.
    known = {field.name for field in fields(BackwardSpec)}
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry.identity["spec"].items()
        if name in known
    }
    return variants.backward(function, BackwardSpec(**told))


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
    direction = options.direction
    chosen = [c for c in gpu_cases.cases() if options.case in gpu_cases.name(c)]
    try:
        if options.make:
            for case in chosen:
                specs = varied(spec_of(case, direction), options.vary)
                make(options.bundle[0], FAMILIES[direction], specs)
            return
        found = [(case, fitting(options.bundle, case, direction)) for case in chosen]
    except ValueError as error:
        asked.error(str(error))
    if not any(entries for _, entries in found):
        asked.error(f"no {direction} variant for --case {options.case!r} is in {options.bundle}")
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
    direction = options.direction
    ways = {name: way(_load(entry), entry, direction) for name, entry in entries.items()}
    ways |= {name: CONTENDERS[name] for name in options.peers.split(",") if name}
    plan = replace(run.PLAN, seconds=options.seconds, batch_ms=options.batch_ms)
    return list(run.run_case(case, direction, watch, plan, ways))


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
    add(
        "--pass",
        dest="direction",
        choices=tuple(FAMILIES),
        default="forward",
        help="whose kernel; of the backward the main one",
    )
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


def _words(value: Any) -> Any:
    """A spec's value as --vary takes it."""
    return " ".join(value) if isinstance(value, list) else value


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
