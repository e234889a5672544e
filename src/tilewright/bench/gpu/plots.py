"""The records of a GPU as pictures: speed over length, and the ratio to the best peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.bench.gpu.cases import DIMS, SEQLENS, length
from tilewright.bench.gpu.contenders import CONTENDERS, OURS
from tilewright.bench.gpu.records import CUBLAS, Record
from tilewright.bench.gpu.report import TITLES, Cell, cells

COLORS = {
    OURS: "#d1495b",
    "cudnn": "#2e6f40",
    "fa2": "#8d99ae",
    "flex": "#b08900",
    "fa4": "#30638e",
}
INK, FAINT = "#222222", "#999999"
MASKS = ("full", "causal")
SCALE, SLOW, FAST = "RdBu", 0.7, 1.3  # of ratios: red is slower than the best peer, blue faster


def draw(records: Sequence[Record], folder: Path) -> list[str]:
    """Write the PNGs that the records give rise to, and return their names. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    names = []
    every = cells(records)
    for direction in dict.fromkeys(cell.direction for cell in every):
        grid = {
            cell.name: cell
            for cell in every
            if cell.direction == direction and cell.name.startswith("grid")
        }
        for kind, draw_one in (("speed", _speed), ("ratio", _ratio)):
            name = f"{direction}-{kind}.png"
            if draw_one([c for c in every if c.direction == direction], grid, folder / name):
                names.append(name)
    return names


def _speed(every: Sequence[Cell], grid: dict[str, Cell], path: Path) -> bool:
    """A panel a head dim and mask; a line a contender, named where it ends."""
    import matplotlib.pyplot as plt

    if not grid:
        return False
    figure, axes = plt.subplots(
        len(MASKS), len(DIMS), figsize=(13, 8), sharex=True, sharey=True, layout="constrained"
    )
    top = 1.08 * max(r.tflops or 0.0 for cell in grid.values() for r in cell.records.values())
    for row, mask in enumerate(MASKS):
        for column, dim in enumerate(DIMS):
            panel = {s: grid.get(f"grid d{dim} {mask} {length(s)}") for s in SEQLENS}
            _panel(axes[row][column], {s: cell for s, cell in panel.items() if cell}, top)
            axes[row][column].set_title(f"head dim {dim}, {mask}", loc="left", fontsize=11)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length, 16k tokens in all")
    for line in axes:
        line[0].set_ylabel("TFLOP/s")
    direction = every[0].direction
    gpu = next(iter(every[0].records.values())).machine.get("gpu", "")
    figure.suptitle(f"Attention {direction}, bfloat16, {gpu}", x=0.01, ha="left", fontsize=14)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _panel(axis: Any, panel: dict[int, Cell], top: float) -> None:
    _style(axis)
    axis.set_ylim(0, top)
    positions = {s: SEQLENS.index(s) for s in panel}
    ceiling = [(positions[s], x) for s, cell in panel.items() if (x := cell.tflops(CUBLAS))]
    if ceiling:
        axis.plot(*zip(*ceiling, strict=True), color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axis.annotate("cuBLAS", ceiling[0], (0, 4), textcoords="offset points", color=FAINT, size=9)
    ends = {}
    for name in CONTENDERS:
        points = [(positions[s], x) for s, cell in panel.items() if (x := cell.tflops(name))]
        if not points:
            continue
        is_ours = name == OURS
        axis.plot(
            *zip(*points, strict=True),
            color=COLORS[name],
            linewidth=2.6 if is_ours else 1.4,
            marker="o",
            markersize=5 if is_ours else 3,
            zorder=3 if is_ours else 2,
        )
        ends[name] = points[-1]
    _label_ends(axis, ends, gap=0.05 * top)


def _label_ends(axis: Any, ends: dict[str, tuple[int, float]], gap: float) -> None:
    """Each line's name to its right, `gap` apart where lines end closer together."""
    placed: list[float] = []
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        at = max([y, *(lower + gap for lower in placed[-1:])])
        placed.append(at)
        weight = "bold" if name == OURS else "normal"
        axis.text(
            x + 0.15, at, TITLES[name], color=COLORS[name], va="center", size=9, weight=weight
        )


def _style(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_xticks(range(len(SEQLENS)), [length(s) for s in SEQLENS])
    axis.set_xlim(-0.2, len(SEQLENS) + 0.35)
    axis.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axis.tick_params(length=0, colors=INK)


def _ratio(every: Sequence[Cell], grid: dict[str, Cell], path: Path) -> bool:
    """The grid as a heat-map of the ratio to the best peer; the other cases as bars below."""
    import matplotlib.pyplot as plt

    others = [c for c in every if c.name not in grid and c.ratio(c.best_peer)]
    height = 3.4 + 0.34 * len(others)
    figure, (top, below) = plt.subplots(
        2,
        1,
        figsize=(9, height),
        height_ratios=(3.0, max(0.34 * len(others), 0.1)),
        layout="constrained",
    )
    _heat(top, grid)
    _bars(below, others)
    direction = every[0].direction
    title = f"tilewright's speed, {direction}, as a multiple of the fastest peer's"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _heat(axis: Any, grid: dict[str, Cell]) -> None:
    rows = [f"d{dim} {mask}" for dim in DIMS for mask in MASKS]
    found = [[grid.get(f"grid {row} {length(s)}") for s in SEQLENS] for row in rows]
    ratios = [[cell.ratio(cell.best_peer) if cell else None for cell in line] for line in found]
    values = [[float("nan") if ratio is None else ratio for ratio in line] for line in ratios]
    axis.imshow(values, cmap=SCALE, vmin=SLOW, vmax=FAST, aspect="auto")
    axis.set_xlabel("sequence length, 16k tokens in all")
    for y, line in enumerate(ratios):
        for x, ratio in enumerate(line):
            is_dark = ratio is not None and not 0.84 < ratio < 1.16
            text = "-" if ratio is None else f"{ratio:.2f}"
            axis.text(x, y, text, ha="center", va="center", color="white" if is_dark else INK)
    axis.set_xticks(range(len(SEQLENS)), [length(s) for s in SEQLENS])
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _bars(axis: Any, others: Sequence[Cell]) -> None:
    if not others:
        axis.set_axis_off()
        return
    from matplotlib import colormaps

    ratios = [cell.ratio(cell.best_peer) or 0.0 for cell in others]
    colors = [colormaps[SCALE]((ratio - SLOW) / (FAST - SLOW)) for ratio in ratios]
    widths = [ratio - 1 for ratio in ratios]
    axis.barh(range(len(others)), widths, left=1, color=colors, edgecolor=FAINT, height=0.65)
    for y, ratio in enumerate(ratios):
        text, side = (f" {ratio:.2f}", "left") if ratio >= 1 else (f"{ratio:.2f} ", "right")
        axis.text(ratio, y, text, va="center", ha=side, color=INK, size=9)
    axis.axvline(1.0, color=INK, linewidth=1)
    reach = 1.25 * max(0.1, *(abs(width) for width in widths))
    axis.set_xlim(1 - reach, 1 + reach)
    axis.set_yticks(range(len(others)), [cell.name for cell in others], size=9)
    axis.set_xticks([])
    axis.invert_yaxis()
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
