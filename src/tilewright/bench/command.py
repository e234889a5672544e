"""The benchmark's command line, which needs no terminal library: `python -m tilewright.bench`.

`tilewright bench` takes the same options and shows the same tables through rich.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, Protocol

PROGRAM = "python -m tilewright.bench"
FORWARD, BACKWARD = "forward", "backward"


class Screen(Protocol):
    """Where a person looks on."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def lines(self, lines: Sequence[str]) -> None: ...


class PlainScreen:
    """Tables on standard output, progress on standard error."""

    def progress(self, what: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"\n{title}")
        for row in (header, *rows):
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            print("  ".join([row[0].ljust(widths[0]), *cells]))

    def lines(self, lines: Sequence[str]) -> None:
        print("\n" + "\n".join(lines))


def parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        program, description="Time tilewright beside its peers, in turns, on this machine."
    )
    add = made.add_argument
    add("--device", choices=("cpu", "cuda"), help="the GPU by default, if there is one")
    add("--cases", type=_words, default=(), help="parts of names, as gqa,varlen")
    add("--longest", type=int, help="leave out sequences longer than this")
    add("--seconds", type=float, help="about how long each way runs in a case")
    add("--out", type=Path, help="write results into ROOT/cpu, or ROOT/<gpu>", metavar="ROOT")
    add("--json", action="store_true", help="print JSON instead of tables")
    on_cpu = made.add_argument_group("on a CPU")
    on_cpu.add_argument("--dtype", default="", help="float32 or bfloat16; both by default")
    on_gpu = made.add_argument_group("on a GPU")
    add = on_gpu.add_argument
    add("--pass", dest="direction", choices=(FORWARD, BACKWARD, "both"), default=FORWARD)
    add("--dim", type=_numbers, default=(), help="head dims, as 64,128")
    add("--mask", type=_words, default=(), help="full, causal, window")
    add("--seqlen", type=_numbers, default=(), help="sequence lengths, as 512,8192")
    add("--without", type=_words, default=(), help="contenders to leave out, as flex,fa2")
    add("--resume", action="store_true", help="leave out cases that ROOT has, and add to its files")
    add("--quick", action="store_true", help="seqlens 1k and 8k of the grid, and less time a case")
    add("--render", type=Path, metavar="FOLDER", help="make page and plots of its *.jsonl again")
    return made


def main(
    arguments: Sequence[str] | None = None, program: str = PROGRAM, screen: Screen | None = None
) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    asked = parser(program)
    options = asked.parse_args(arguments)
    screen = screen or PlainScreen()
    if options.render is not None:
        return _render(asked, options.render, screen)
    import torch

    options.command = " ".join([program, *arguments])
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        asked.error("--device cuda: PyTorch sees no CUDA device")
    (_on_gpu if device == "cuda" else _on_cpu)(asked, options, screen)


def _on_cpu(asked: argparse.ArgumentParser, options: argparse.Namespace, screen: Screen) -> None:
    from tilewright.bench import cases, report
    from tilewright.bench import run as runner

    longest = options.longest or 8192
    chosen = [
        case
        for case in cases.dense_cases() + cases.other_cases()
        if (not options.cases or case.group.startswith(options.cases))
        and case.dtype.startswith(options.dtype)
        and max(case.seqlen_q, case.seqlen_k) <= longest
    ]
    if not chosen:
        asked.error(f"no case has a group {options.cases}, dtype {options.dtype!r} up to {longest}")
    done = iter(range(len(chosen)))

    def on_case(case: cases.Case) -> None:
        what = f"{case.group} {case.dtype} {case.mask} {case.seqlen_q}x{case.seqlen_k}"
        screen.progress(what, next(done), len(chosen))

    seconds = 4.0 if options.seconds is None else options.seconds
    rows = list(runner.run(chosen, on_case, seconds))
    machine = cpu_facts(options.command)
    if options.out is not None:
        folder = options.out / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        runner.write_jsonl(folder / "results.jsonl", machine, rows)
        (folder / "README.md").write_text(report.markdown(rows, machine), encoding="utf-8")
    if options.json:
        print(json.dumps({"machine": machine, "rows": [row.to_dict() for row in rows]}, indent=2))
        return
    title = "SDPA's time over tilewright's: above 1, tilewright is faster"
    screen.table(title, report.HEADER, report.table(rows))
    screen.lines(report.summary(rows))


def _on_gpu(asked: argparse.ArgumentParser, options: argparse.Namespace, screen: Screen) -> None:
    import torch

    from tilewright.bench import power
    from tilewright.bench.gpu import cases
    from tilewright.bench.gpu.contenders import CONTENDERS, OURS
    from tilewright.bench.gpu.output import Output, facts
    from tilewright.bench.gpu.run import plan, run

    choice = cases.Choice(
        options.cases, options.dim, options.mask, options.seqlen, options.longest, options.quick
    )
    chosen = cases.cases(choice)
    if not chosen:
        asked.error(f"no case is in {choice}")
    unknown = set(options.without) - (CONTENDERS.keys() - {OURS})
    if unknown:
        asked.error(f"--without {','.join(sorted(unknown))}: no such contender, or tilewright")
    ways = {name: way for name, way in CONTENDERS.items() if name not in options.without}
    directions = (FORWARD, BACKWARD) if options.direction == "both" else (options.direction,)
    if options.resume and options.out is None:
        asked.error("--resume: want --out ROOT, to go on with its files")
    output = Output(options.out, facts(options.command))
    left = {}
    for direction in directions:
        there = output.resume(direction) if options.resume else set()
        left[direction] = [case for case in chosen if cases.name(case) not in there]
    total = sum(len(some) + 1 for some in left.values())
    done = iter(range(total))
    with power.sampler(torch.device("cuda", torch.cuda.current_device())) as watch:
        for direction in directions:
            records = run(
                left[direction],
                direction,
                lambda what: screen.progress(what, next(done), total),
                watch,
                plan(options.seconds, options.quick),
                ways,
            )
            for record in records:
                output.add(record, direction)
    output.finish()
    if options.json:
        print(json.dumps([asdict(record) for record in output.records], indent=2))
    else:
        _show(output.records, screen)


def _render(asked: argparse.ArgumentParser, folder: Path, screen: Screen) -> None:
    from tilewright.bench.gpu.output import render
    from tilewright.bench.gpu.records import read

    files = sorted(folder.glob("*.jsonl"))
    if not files:
        asked.error(f"--render {folder}: it has no *.jsonl")
    records = read(files)
    render(records, folder)
    _show(records, screen)


def _show(records: Sequence[Any], screen: Screen) -> None:
    from tilewright.bench.gpu import report

    cells = report.cells(records)
    for direction in dict.fromkeys(cell.direction for cell in cells):
        rows = report.table([cell for cell in cells if cell.direction == direction])
        screen.table(f"TFLOP/s, {direction}", report.HEADER, rows)
        if bound := report.table_deterministic([c for c in cells if c.direction == direction]):
            title = f"TFLOP/s of tilewright, {direction}, bound to equal bits"
            screen.table(title, report.HEADER_DETERMINISTIC, bound)
    screen.lines([*report.summary(records), *report.refusals(records)])


def cpu_facts(command: str) -> dict[str, Any]:
    from tilewright.machine import describe

    machine = describe()
    return {
        "command": command,
        "date": date.today().isoformat(),
        "processor": f"{machine.cpu}, {machine.cores} cores, {machine.instruction_set}",
        "threads": machine.threads,
        "system": machine.system,
        "python": machine.python,
        "torch": machine.packages["torch"],
        "tilewright": machine.packages["tilewright"],
    }


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _words(text))
