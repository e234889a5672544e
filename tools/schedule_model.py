"""How long the multiprocessors of a GPU wait for the last of a causal call's tiles.

    python tools/schedule_model.py

models the schedule of `kernels/sm90/fa3/schedule.py` with tiles whose blocks take their time at the
tensor cores' floor, and prints the part of the time that the multiprocessors are busy. The table in
docs/fa3.md is its output: a model, not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

TOKENS = 16384
CTAS = 132  # an H200's multiprocessors
FLOPS = 4096  # of one of them in a cycle, in half precision
TURNOVER = 2500  # cycles from a tile's last block to the next one's first, as a guess
L2_BYTES, LARGEST_SECTION = 24 << 20, 64


@dataclass(frozen=True)
class Call:
    """Causal self-attention of 16k tokens."""

    dims: tuple[int, int]
    heads: int
    tile: tuple[int, int]  # queries, keys
    seqlen: int

    @property
    def block_cycles(self) -> float:
        return 2 * self.tile[0] * self.tile[1] * sum(self.dims) / FLOPS

    def tiles(self, tiles_per_cta: int) -> list[float]:
        """Cycles of each, in the order in which they are handed out."""
        rows = -(-self.seqlen // self.tile[0])
        heads = self.heads * (TOKENS // self.seqlen)
        section = self._section(rows, tiles_per_cta)
        widths = (min(section, heads - begin) for begin in range(0, heads, section))
        return [cycles for width in widths for cycles in self._longest_first(rows, width)]

    def _longest_first(self, rows: int, width: int) -> Iterator[float]:
        for row in reversed(range(rows)):
            keys = min((row + 1) * self.tile[0], self.seqlen)
            yield from [-(-keys // self.tile[1]) * self.block_cycles + TURNOVER] * width

    def _section(self, rows: int, tiles_per_cta: int) -> int:
        head_bytes = 2 * self.seqlen * sum(self.dims)
        section, power = 1, 2
        while power <= LARGEST_SECTION:
            if head_bytes * power <= L2_BYTES or power // 2 * rows < tiles_per_cta * CTAS:
                section = power
            power *= 2
        return section


def busy(tiles: list[float], ahead: int, early: float = 0.0) -> float:
    """The part of the time that a CTA works, in the mean, until the last one is done.

    A CTA takes its tile number n + ahead when it begins number n; with `ahead` 0 number n + 1, so
    many cycles before the end of number n as `early` says.
    """
    events = [(0.0, 0, cta) for cta in range(CTAS)]  # when which CTA takes which of its tiles
    begins: list[list[float]] = [[] for _ in range(CTAS)]
    free = [0.0] * CTAS
    for cycles in tiles:
        now, n, cta = heappop(events)
        begins[cta].append(max(now, free[cta]))
        free[cta] = begins[cta][n] + cycles
        if ahead:
            following = begins[cta][n + 1 - ahead] if n + 1 >= ahead else 0.0
        else:
            following = max(begins[cta][n], free[cta] - early)
        heappush(events, (following, n + 1, cta))
    return sum(tiles) / (CTAS * max(free))


CALLS = [
    ((64, 64), 32, (192, 128), (4096, 16384), 5),
    ((128, 128), 16, (128, 128), (1024, 2048, 8192, 16384), 3),
    ((192, 128), 16, (128, 128), (8192,), 3),
    ((256, 256), 8, (128, 64), (2048, 4096, 8192, 16384), 3),
]


def main() -> None:
    print(
        "| causal, 16k tokens | 3 ahead | 2 ahead | and 3 tiles a CTA | 1 ahead | late | and L2 |"
    )
    for dims, heads, tile, lengths, blocks in CALLS:
        for seqlen in lengths:
            call = Call(dims, heads, tile, seqlen)
            few, many = call.tiles(0), call.tiles(3)
            early = blocks * call.block_cycles
            row = [busy(few, 3), busy(few, 2), busy(many, 2), busy(many, 1)]
            row += [busy(many, 0, early), busy(few, 0, early)]
            print(f"| d{dims[0]} {seqlen} | " + " | ".join(f"{x:.3f}" for x in row) + " |")


if __name__ == "__main__":
    main()
