"""Warpgroup matrix products of sm_90a (PTX ISA 9.7.15)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from tilewright.emulator.asynchronous import Groups
from tilewright.emulator.errors import BarrierMisuse, Unsupported, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.operands import SIZES, Tile, halves_to_words, read_tile, to_float32
from tilewright.emulator.layouts import wgmma_descriptor
from tilewright.emulator.parse import Immediate, Instruction, Vector
from tilewright.emulator.registers import Lanes

_WARPGROUP = 128
_NAN_PAIR = 0x7E007E00  # two fp16 NaNs


def accumulator_to_registers(matrix: np.ndarray) -> np.ndarray:
    """[64, N] to [register, thread]: 9.7.15.5.1, figure of the D fragment.

    Register 4 j + 2 h + b of lane 4 g + q in warp w holds row 16 w + 8 h + g, column 8 j + 2 q + b.
    """
    tiles = matrix.reshape(4, 2, 8, -1, 4, 2)  # w h g j q b
    return tiles.transpose(3, 1, 5, 0, 2, 4).reshape(-1, _WARPGROUP)


def accumulator_to_pairs(matrix: np.ndarray) -> np.ndarray:
    """[64, N] to [register, thread, 2]: the same with .f16, b counts the halves of 2 j + h."""
    tiles = matrix.reshape(4, 2, 8, -1, 4, 2)  # w h g j q b
    return tiles.transpose(3, 1, 0, 2, 4, 5).reshape(-1, _WARPGROUP, 2)


def fragment_from_registers(words: np.ndarray, size: int) -> np.ndarray:
    """A operand [4, 128] of 32-bit registers to [64, 32 / size * ...] codes of `size` bytes.

    Register 2 kh + h holds row 16 w + 8 h + g and the 4 bytes at 16 kh + 4 q of the k slice.
    """
    tiles = words.reshape(2, 2, 4, 8, 4)  # kh h w g q
    rows = np.ascontiguousarray(tiles.transpose(2, 1, 3, 0, 4)).reshape(64, 8)
    return rows.view(f"u{size}")


@instruction("wgmma.fence.sync.aligned", together=128, starts=True)
def wgmma_fence(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.15.7.1 wgmma.fence: orders register accesses before the products that use them."""
    cta = lanes.cta

    def effect() -> None:
        for group in _warpgroups(lanes):
            cta.cluster.group(("wgmma", cta.rank, group)).fenced = True
            if cta.touched is not None:
                cta.touched[group] = False

    return effect


@instruction("wgmma.commit_group.sync.aligned", together=128, effects=True)
def wgmma_commit(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.15.7.2 wgmma.commit_group."""
    cta = lanes.cta

    def effect() -> None:
        for group in _warpgroups(lanes):
            cta.cluster.group(("wgmma", cta.rank, group)).commit()

    return effect


@instruction("wgmma.wait_group.sync.aligned", together=128, effects=True)
def wgmma_wait(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.15.7.3 wgmma.wait_group: all but the newest N groups are complete."""
    allowed, cta, races = ins.operands[0], lanes.cta, lanes.cta.machine.races
    allowed = expect(allowed, Immediate)

    def effect() -> None:
        for group in _warpgroups(lanes):
            groups = cta.cluster.group(("wgmma", cta.rank, group))
            groups.fenced = False
            finished = groups.wait(allowed.bits)
            if races:
                for agent, warp in product(finished, range(4 * group, 4 * group + 4)):
                    races.join(cta, warp, agent)

    return effect


def _warpgroups(lanes: Lanes) -> list[int]:
    if lanes.count % _WARPGROUP:
        raise BarrierMisuse("a wgmma instruction by an incomplete warpgroup")
    return [int(t) // _WARPGROUP for t in lanes.threads[::_WARPGROUP]]


_SHAPES = "<" + "|".join(f".m64n{n}k{k}" for k in (8, 16, 32) for n in range(256, 7, -8)) + ">"
_TYPES = "<.f16|.bf16|.tf32|.e4m3|.e5m2>"
_MMA = "wgmma.mma_async.sync.aligned" + _SHAPES


@instruction(_MMA + ".f32" + _TYPES + _TYPES, together=128, effects=True)
@instruction(_MMA + ".f16.f16.f16", together=128, effects=True)
@instruction(_MMA + ".f16<.e4m3|.e5m2><.e4m3|.e5m2>", together=128, effects=True)
def wgmma_mma(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.15.7.4 wgmma.mma_async: D = A B + D, A from shared memory or registers."""
    bound = _Product(ins, lanes)
    groups = [(i * _WARPGROUP, g) for i, g in enumerate(_warpgroups(lanes))]

    def effect() -> None:
        for lane, group in groups:
            bound.issue(lane, group)

    return effect


class _Product:
    """One bound wgmma.mma_async: the operands' views, and how to issue it for a warpgroup."""

    def __init__(self, ins: Instruction, lanes: Lanes):
        self.lanes, self.place = lanes, lanes.place
        self.a_type, self.b_type = ins.parts[-2], ins.parts[-1]
        shape = ins.parts[4]
        self.n, self.k = int(shape[4 : shape.index("k")]), int(shape[shape.index("k") + 1 :])
        if self.k * SIZES[self.a_type] != 32 or SIZES[self.a_type] != SIZES[self.b_type]:
            raise Unsupported(f"{ins.opcode}: k does not fit the element types")
        d, a, b, scale, *rest = ins.operands
        self.is_half = ins.parts[-3] == "f16"
        self.d, self.d_rows = lanes.rows(d, np.uint32 if self.is_half else np.float32)
        if len(self.d_rows) != self.n // (4 if self.is_half else 2):
            raise Unsupported(f"{ins.opcode} with {len(self.d_rows)} accumulators")
        self.all_rows = self.d_rows
        self.first_row = first = int(self.d_rows[0])
        if (np.diff(self.d_rows) == 1).all():
            self.d_rows = slice(first, first + len(self.d_rows))
        self.from_registers = isinstance(a, Vector)
        self.a: Any
        if isinstance(a, Vector):
            self.a = lanes.rows(a)
            self.all_rows = np.concatenate([self.all_rows, self.a[1]])
        else:
            self.a = lanes.read(a, np.uint64)
        self.b, self.accumulate = lanes.read(b, np.uint64), lanes.read(scale, np.bool_)
        flags = [f.bits for f in rest if isinstance(f, Immediate)]
        self.scale_a, self.scale_b = flags[0], flags[1]
        trans = flags[2:]
        if not self.from_registers:
            self.trans_a = bool(trans.pop(0)) if trans else False
        self.trans_b = bool(trans.pop(0)) if trans else False
        self.flops = 2 * 64 * self.n * self.k
        self.unit = f"MMA {shape} {self.a_type} FLOP"

    def issue(self, lane: int, group: int) -> None:
        cta = self.lanes.cta
        machine, groups = cta.machine, cta.cluster.group(("wgmma", cta.rank, group))
        if not groups.fenced:
            raise BarrierMisuse("wgmma.mma_async without a wgmma.fence since the last wait_group")
        window = slice(lane, lane + _WARPGROUP)
        if cta.touched is not None and cta.touched[group][self.all_rows].any():
            raise BarrierMisuse(
                "wgmma.mma_async on registers that were written since the last wgmma.fence"
            )
        accumulate = bool(self._at(self.accumulate, lane))
        b = int(self._at(self.b, lane))
        a = 0 if self.from_registers else int(self._at(self.a, lane))
        base = None
        if not machine.queue.eager:
            base = self._poison(window, accumulate, groups)
        races = machine.races
        warps = range(4 * group, 4 * group + 4)
        issued = races.issue_together(cta, warps, "wgmma") if races else None

        def run() -> None:
            self._run(window, a, b, accumulate, base, issued)
            if not machine.queue.eager:
                groups.accumulators[self.first_row, window.start] -= 1

        pipe = ("wgmma", id(cta), group)
        operation = machine.queue.submit(pipe, run, self.place)
        groups.open.append((operation, issued.whole if issued else None))
        cta.count(4 * group, self.unit, self.flops)
        operand_bytes = self.n * 32 + (0 if self.from_registers else 64 * 32)
        cta.count(4 * group, "shared bytes read by MMA", operand_bytes)

    def _poison(self, window: slice, accumulate: bool, groups: Groups) -> np.ndarray | None:
        """Until its wait, an accumulator holds NaN; returns what it held.

        None where products in flight already write it: the pipe keeps their order.
        """
        key = (self.first_row, window.start)
        in_flight = groups.accumulators.get(key, 0)
        groups.accumulators[key] = in_flight + 1
        values = self.d[self.d_rows, window].copy()
        self.d[self.d_rows, window] = _NAN_PAIR if self.is_half else np.nan
        return values if accumulate and not in_flight else None

    @staticmethod
    def _at(values: np.ndarray, lane: int) -> Any:
        return values[lane] if len(values) > 1 else values[0]

    def _watch(self, agents: list[Any]) -> Callable[[np.ndarray], None]:
        """Tells the race detector that each agent reads its part of a tile's rows."""
        races: Any = self.lanes.cta.machine.races

        def watch(addresses: np.ndarray) -> None:
            for agent, part in zip(agents, np.split(addresses, len(agents)), strict=True):
                races.units_access(agent, part, SIZES[self.b_type], False, self.place)

        return watch

    def _run(
        self, window: slice, a: int, b: int, accumulate: bool, base: np.ndarray | None, issued: Any
    ) -> None:
        cta = self.lanes.cta
        shared, check = cta.cluster.shared, cta.machine.options.initialised
        # A warp multiplies 16 rows of A with all of B.
        watch_a = self._watch(issued.shares) if issued else None
        watch_b = self._watch([issued.common]) if issued else None
        if self.from_registers:
            registers, rows = self.a
            left = to_float32(
                fragment_from_registers(registers[rows, window], SIZES[self.a_type]), self.a_type
            )
        else:
            tile = Tile(wgmma_descriptor(a), 64, self.k, self.a_type, self.trans_a)
            left = read_tile(shared, tile, cta.rank, check, watch_a)
        tile = Tile(wgmma_descriptor(b), self.n, self.k, self.b_type, self.trans_b)
        right = read_tile(shared, tile, cta.rank, check, watch_b)
        product = left @ right.T
        if self.scale_a * self.scale_b < 0:
            product = -product
        if base is None and accumulate:
            base = self.d[self.d_rows, window]
        self.d[self.d_rows, window] = self._sums(product, base)

    def _sums(self, product: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
        """[64, N] as registers [register, thread], plus what these held."""
        if self.is_half:
            return halves_to_words(accumulator_to_pairs(product), addend)
        result = accumulator_to_registers(product)
        return result if addend is None else result + addend
