"""A results file gives the page and the pictures, and they say what it holds."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tilewright.bench import command, power
from tilewright.bench.gpu import output, report, run
from tilewright.bench.gpu.cases import cases, flops, name
from tilewright.bench.gpu.contenders import CONTENDERS
from tilewright.bench.gpu.records import Record, read
from tilewright.bench.timing import Plan
from tilewright.cli import app

MACHINE = {"command": "tilewright bench", "gpu": "Imaginary GPU 9000", "torch": "1.0"}
SPEEDS = {"tilewright": 600.0, "cudnn": 500.0, "fa2": 300.0, "flex": 400.0, "fa4": 550.0}
DASH = "-"


def invented() -> list[Record]:
    """Speeds that rise with the length; flash-attn-4 refuses windows."""
    records = [
        Record("host", "forward", "tilewright", ms=0.0123, backend="fa3"),
        Record("host", "forward", "sdpa", ms=0.0156),
        Record("ceilings", "forward", "cublas", ms=1.6, tflops=680.0),
        Record("ceilings", "forward", "copy", ms=0.5, tflops=4.3),
    ]
    for case in cases():
        rise = case.seqlen_q / (case.seqlen_q + 600)
        base = Record(name(case), "forward", "cublas", case.to_dict(), ms=1.6, tflops=690.0)
        records.append(base)
        for contender, top in SPEEDS.items():
            record = replace(base, contender=contender, mhz=1755.0, watts=690.0, ms_min=0.1)
            ms = flops(case) / (top * rise) / 1e9
            if contender == "fa4" and case.group == "window":
                record = replace(record, ms=None, tflops=None, why_none="no windows here")
            else:
                record = replace(record, ms=ms, tflops=top * rise)
            records.append(record)
    return [replace(record, machine=MACHINE) for record in records]


def test_records_survive_their_file(tmp_path: Path) -> None:
    records = invented()
    made = output.Output(tmp_path, MACHINE)
    for record in records:
        made.add(record, "forward")
    folder = tmp_path / "imaginary-gpu-9000"
    found = read([folder / "forward.jsonl"])
    assert [r.to_json() for r in found] == [r.to_json() for r in records]
    fields = {"case", "contender", "direction", "ms", "ms_min", "tflops", "mhz", "watts", "machine"}
    for line in (folder / "forward.jsonl").read_text().splitlines():
        assert fields <= json.loads(line).keys()


def test_a_second_run_replaces_the_file_of_its_pass_only(tmp_path: Path) -> None:
    for direction in ("forward", "backward", "forward"):
        made = output.Output(tmp_path, MACHINE)
        made.add(Record("case", direction, "fa2"), direction)
    folder = tmp_path / "imaginary-gpu-9000"
    assert [len(read([path])) for path in sorted(folder.glob("*.jsonl"))] == [1, 1]


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    def begun(case: str) -> Record:
        return Record(case, "backward", "tilewright", tflops=1.0, machine=MACHINE)

    made = output.Output(tmp_path, MACHINE)
    assert made.resume("backward") == set()
    whole = [begun("whole"), replace(begun("whole"), contender="cublas")]
    for record in [*whole, replace(whole[1], name="ceilings"), begun("cut")]:
        made.add(record, "backward")
    made = output.Output(tmp_path, MACHINE)
    assert made.resume("backward") == {"whole"}
    made.add(replace(begun("cut"), tflops=2.0), "backward")
    assert made.records == read([tmp_path / "imaginary-gpu-9000" / "backward.jsonl"])
    speeds = {cell.name: cell.tflops("tilewright") for cell in report.cells(made.records)}
    assert speeds == {"whole": 1.0, "cut": 2.0}


def test_nothing_is_written_without_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = output.Output(None, MACHINE)
    made.add(invented()[0], "forward")
    made.finish()
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_to_the_best_peer_and_to_cublas() -> None:
    rows = {row[0]: row for row in report.table(report.cells(invented()))}
    rise = 8192 / (8192 + 600)
    row = rows["grid d128 full 8k"]
    speeds = [f"{SPEEDS[contender] * rise:.0f}" for contender in CONTENDERS]
    assert row == ("grid d128 full 8k", *speeds, f"{600 / 550:.2f}", f"{600 * rise / 690:.2f}")
    row = rows["window 64:8 d64 w1024 8k"]
    assert row[-3] == DASH and row[-2] == f"{600 / 500:.2f}"
    assert all(len(row) == len(report.HEADER) for row in rows.values())


def test_deterministic_speed_is_told_as_a_share_of_the_usual() -> None:
    records = [
        Record("a", "backward", "tilewright", tflops=400.0, machine=MACHINE),
        Record("a", "backward", "deterministic", tflops=300.0, machine=MACHINE),
        Record("b", "backward", "tilewright", tflops=400.0, machine=MACHINE),
        Record("b", "backward", "deterministic", why_none="too slow", machine=MACHINE),
        Record("c", "backward", "tilewright", tflops=400.0, machine=MACHINE),
        Record("c", "backward", "fa4", tflops=200.0, machine=MACHINE),
    ]
    rows = report.table_deterministic(report.cells(records))
    assert rows == [("a", "400", "300", "0.75"), ("b", "400", DASH, DASH)]
    page = report.markdown(records)
    assert "| a | 400 | 300 | 0.75 |" in page
    assert "backward, deterministic to as it comes: 0.75 to 0.75, median 0.75" in page
    assert "backward, to the best peer: 2.00 to 2.00, median 2.00" in page
    assert "tilewright, deterministic: too slow (b backward)" in page


def test_a_case_without_ours_or_without_peers_has_no_ratio() -> None:
    only = [
        Record("a", "forward", "fa4", tflops=5.0),
        Record("b", "forward", "tilewright", tflops=1.0),
    ]
    for row in report.table(report.cells(only)):
        assert row[-2:] == (DASH, DASH)


def test_the_page_names_refusals_host_time_and_ceilings() -> None:
    page = report.markdown(invented(), ["forward-speed.png"])
    assert "flash-attn-4: no windows here (window 64:8 d64 w1024 4k forward" in page
    assert "host time of an eager call: tilewright 12.3 us, sdpa 15.6 us" in page
    assert "copy: 4.3 to 4.3 TB/s" in page and "cuBLAS: 680 to 690 TFLOP/s" in page
    assert "1755 MHz, 690 W" in page and "tilewright's path: fa3" in page
    assert "![forward speed](forward-speed.png)" in page


def test_the_page_names_the_command_of_each_run() -> None:
    first, *others = invented()
    other = replace(first, machine=MACHINE | {"command": "tilewright bench --pass backward"})
    page = report.markdown([first, *others, other])
    for line in ("- command: tilewright bench\n", "- command: tilewright bench --pass backward\n"):
        assert page.count(line) == 1
    assert page.count("- torch: 1.0\n") == 1


def test_render_draws_the_pictures_of_each_pass(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "gpu"
    folder.mkdir()
    lines = [record.to_json() for record in invented()]
    lines += [replace(record, direction="backward").to_json() for record in invented()[40:90]]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(app, ["bench", "--render", str(folder)])
    assert result.exit_code == 0, result.output
    assert "grid d256 causal 16k" in result.output
    pictures = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert set(pictures) == {
        f"{direction}-{kind}.png"
        for direction in ("forward", "backward")
        for kind in ("speed", "ratio")
    }
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    page = (folder / "README.md").read_text()
    assert all(f"({picture})" in page for picture in pictures)


def test_the_plain_screen_needs_no_terminal_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(invented()[10].to_json() + "\n")
    command.main(["--render", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("TFLOP/s, forward")
    assert lines[2].split()[:2] == ["problem", "tilewright"]


def test_the_command_runs_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device: the options reach the cases, the passes and the files."""

    def fake(chosen: Any, direction: str, on_case: Any, watch: Any, plan: Plan, ways: Any) -> Any:
        assert (watch, plan.seconds) == ("watch", 0.5)
        assert "tilewright" in ways and "flex" not in ways
        for case in chosen:
            on_case(name(case))
            yield Record(name(case), direction, "tilewright", ms=1.0, tflops=2.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(power, "sampler", lambda device: nullcontext("watch"))
    monkeypatch.setattr(output, "facts", lambda command: MACHINE | {"command": command})
    monkeypatch.setattr(run, "run", fake)
    arguments = ["--pass", "both", "--dim", "128", "--mask", "full", "--seqlen", "512,8192"]
    command.main(
        [
            *arguments,
            "--cases",
            "grid",
            "--seconds",
            "0.5",
            "--without",
            "flex",
            "--out",
            str(tmp_path),
        ]
    )
    folder = tmp_path / "imaginary-gpu-9000"
    for direction in ("forward", "backward"):
        found = read([folder / f"{direction}.jsonl"])
        assert [r.name for r in found] == ["grid d128 full 512", "grid d128 full 8k"]
        assert {r.direction for r in found} == {direction}
        assert found[0].machine["command"].startswith("python -m tilewright.bench --pass both")
    assert "## Backward" in (folder / "README.md").read_text()
    cublas = Record("grid d128 full 512", "forward", "cublas", machine=MACHINE)
    with (folder / "forward.jsonl").open("a") as file:
        file.write(cublas.to_json() + "\n")
    again = ["--cases", "grid", "--seconds", "0.5", "--without", "flex", "--out", str(tmp_path)]
    command.main([*arguments[2:], *again, "--resume"])
    names = [r.name for r in read([folder / "forward.jsonl"])]
    assert names == ["grid d128 full 512", "grid d128 full 8k"] * 2  # its cuBLAS, then the rest


@pytest.mark.parametrize("arguments", [["--render", "nowhere"], ["--pass", "sideways"]])
def test_what_cannot_be_done_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        command.main(arguments)
    assert refusal.value.code == 2
