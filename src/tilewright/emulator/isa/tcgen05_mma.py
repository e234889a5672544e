"""Matrix products of sm_100a, by one CTA or a pair (PTX ISA 9.7.16.10.9, 9.7.16.4, 9.7.16.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.emulator.cta import CTA
from tilewright.emulator.errors import Unsupported, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.operands import SIZES, Tile, read_tile, to_float32
from tilewright.emulator.isa.tcgen05 import tensor_memory
from tilewright.emulator.isa.tma import issues
from tilewright.emulator.layouts import tcgen05_descriptor
from tilewright.emulator.parse import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Vector,
)
from tilewright.emulator.registers import Lanes
from tilewright.emulator.tensor_memory import Rectangle

_TYPES = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}
# Sparsity and saturation (0-3), negation (13, 14), reserved (6, 23, 29) and maximum shift (30-31).
_UNKNOWN_BITS = 0xF | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30


@dataclass(frozen=True)
class Shape:
    """The instruction descriptor: M x N of all CTAs together, element types, majorness, signs."""

    m: int
    n: int
    a_type: str
    b_type: str
    a_mn_major: bool
    b_mn_major: bool
    sign: int

    @property
    def k(self) -> int:
        return 32 // SIZES[self.a_type]


def decode_shape(bits: int, kind: str, ctas: int) -> Shape:
    """9.7.16.4.2, table of the instruction descriptor; unknown fields raise."""
    types = _TYPES[kind]
    a, b, d = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
    if bits & _UNKNOWN_BITS or a not in types or b not in types or d != 1:
        raise Unsupported(
            f"instruction descriptor {bits:#x} of kind::{kind}: types {a}, {b}, accumulator {d}"
        )
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    if m not in ((64, 128) if ctas == 1 else (128, 256)) or not 8 <= n <= 256:
        raise Unsupported(f"instruction descriptor {bits:#x}: M {m}, N {n} with {ctas} CTAs")
    negative = (bits >> 13 & 1) ^ (bits >> 14 & 1)
    return Shape(
        m, n, types[a], types[b], bool(bits >> 15 & 1), bool(bits >> 16 & 1), -1 if negative else 1
    )


@instruction(
    "tcgen05.mma<.cta_group::1|.cta_group::2><.kind::f16|.kind::tf32|.kind::f8f6f4>"
    "{.collector::a::discard|.collector::a::lastuse|.collector::a::fill|.collector::a::use}",
    effects=True,
)
def mma(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.10.9.1 tcgen05.mma: D = A B + D, D in tensor memory, A there or in shared memory."""
    tensor_memory(lanes)
    product = _Product(ins, lanes)

    def effect() -> None:
        for warp, values in issues(lanes, *product.sources):
            product.issue(warp, values)

    return effect


class _Product:
    """A bound tcgen05.mma."""

    def __init__(self, ins: Instruction, lanes: Lanes):
        self.place, self.cta = lanes.place, lanes.cta
        self.kind = next(p for p in ins.parts if p.startswith("kind::")).removeprefix("kind::")
        self.ctas = 2 if "cta_group::2" in ins.parts else 1
        d, a, b, shape, *rest = ins.operands
        d = expect(d, Address)
        self.a_in_tensor_memory = isinstance(a, Address)
        self.a_offset = a.offset if isinstance(a, Address) else 0
        a_source = (
            lanes.read(a.base, np.uint32) if isinstance(a, Address) else lanes.read(a, np.uint64)
        )
        disabled: tuple[Operand, ...] = ()
        if isinstance(rest[0], Vector):
            disabled, rest = rest[0].items, rest[1:]
        enable, *extra = rest
        if extra:
            raise Unsupported(f"{ins.opcode} with scale-input-d")
        self.d_offset = d.offset
        self.sources = [
            lanes.read(d.base, np.uint32),
            a_source,
            lanes.read(b, np.uint64),
            lanes.read(shape, np.uint32),
            self._enable(lanes, enable),
            *(lanes.read(x, np.uint32) for x in disabled),
        ]

    @staticmethod
    def _enable(lanes: Lanes, operand: Any) -> np.ndarray:
        if isinstance(operand, (Register, Immediate)):
            return lanes.read(operand, np.bool_)
        expect(operand, Not)
        raise Unsupported("tcgen05.mma with a negated enable-input-d", lanes.place)

    def issue(self, warp: int, values: tuple[int, ...]) -> None:
        d, a, b, bits, enable, *disabled = values
        if any(disabled):
            raise Unsupported(f"tcgen05.mma with disabled output lanes {disabled}")
        shape = decode_shape(bits, self.kind, self.ctas)
        machine = self.cta.machine
        agent: Any = machine.races.pipe_issue(self.cta, warp) if machine.races else None

        def run() -> None:
            self._run(shape, d + self.d_offset, a + self.a_offset, b, bool(enable), agent)

        machine.queue.submit(("tcgen05", id(self.cta)), run, self.place)
        self.cta.count(
            warp,
            f"MMA m{shape.m}n{shape.n}k{shape.k} {shape.a_type} FLOP",
            2 * shape.m * shape.n * shape.k,
        )
        rows = shape.n + (0 if self.a_in_tensor_memory else shape.m)
        self.cta.count(warp, "shared bytes read by MMA", 32 * rows)

    def _members(self) -> list[CTA]:
        """The CTAs that take part, even rank first."""
        if self.ctas == 1:
            return [self.cta]
        first = self.cta.rank & ~1
        return self.cta.cluster.ctas[first : first + 2]

    def _run(self, shape: Shape, d: int, a: int, b: int, accumulate: bool, agent: Any) -> None:
        members = self._members()
        b_rows, b_matrix = shape.n // self.ctas, tcgen05_descriptor(b)
        right = np.concatenate(
            [
                self._read(
                    cta, Tile(b_matrix, b_rows, shape.k, shape.b_type, shape.b_mn_major), agent
                )
                for cta in members
            ]
        )
        for cta in members:
            rows = shape.m // self.ctas
            if self.a_in_tensor_memory:
                left = self._from_tensor_memory(cta, a, rows, shape, agent)
            else:
                a_matrix = tcgen05_descriptor(a)
                tile = Tile(a_matrix, rows, shape.k, shape.a_type, shape.a_mn_major)
                left = self._read(cta, tile, agent)
            self._accumulate(cta, d, shape.sign * (left @ right.T), accumulate, agent)

    def _read(self, cta: CTA, tile: Tile, agent: Any) -> np.ndarray:
        machine, races, size = cta.machine, cta.machine.races, SIZES[tile.type]
        watch = (
            (lambda at: races.units_access(agent, at, size, False, self.place)) if races else None
        )
        return read_tile(cta.cluster.shared, tile, cta.rank, machine.options.initialised, watch)

    def _from_tensor_memory(
        self, cta: CTA, a: int, rows: int, shape: Shape, agent: Any
    ) -> np.ndarray:
        """A [rows, k]: 32 bytes of each lane, 8 cells."""
        if rows != 128:
            raise Unsupported(f"tcgen05.mma with {rows} rows of A a CTA in tensor memory")
        memory, column = cta.tensor_memory, a & 0xFFFF
        assert memory
        r = Rectangle(a >> 16, rows, column, 8)
        memory.check(r)
        if cta.machine.options.initialised:
            memory.need_written(r)
        if cta.machine.races:
            cta.machine.races.tensor_access(cta, agent, r, False, self.place)
        cells = np.ascontiguousarray(memory.cells[:, column : column + 8])
        return to_float32(cells.view(f"u{SIZES[shape.a_type]}"), shape.a_type)

    def _accumulate(
        self, cta: CTA, d: int, product: np.ndarray, accumulate: bool, agent: Any
    ) -> None:
        """Adds [rows, N] to D. 9.7.16.10.5, data-path layouts D (128 rows), B and F (64 rows)."""
        memory, column = cta.tensor_memory, d & 0xFFFF
        assert memory
        rows, columns = product.shape
        if rows == 64 and self.ctas == 2:
            # Lanes 0-63 hold the lower half of the columns, lanes 64-127 the upper.
            columns //= 2
            product = np.concatenate([product[:, :columns], product[:, columns:]])
            lanes = np.arange(128)
        elif rows == 64:
            lanes = np.arange(64) % 16 + 32 * (np.arange(64) // 16)
        else:
            lanes = np.arange(128)
        r = Rectangle(d >> 16, int(lanes[-1]) + 1, column, columns)
        memory.check(r)
        window: Any = slice(None) if len(lanes) == 128 else lanes
        cells = memory.cells.view(np.float32)[:, column : column + columns]
        if cta.machine.races:
            cta.machine.races.tensor_access(cta, agent, r, True, self.place)
        if accumulate:
            if cta.machine.options.initialised:
                memory.need_written(r._replace(height=1))
            product = product + cells[window]
        cells[window] = product
        memory.written[window, column : column + columns] = True
