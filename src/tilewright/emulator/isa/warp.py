"""Instructions of a whole warp: shuffles, votes, election, matrix loads and stores."""

from __future__ import annotations

from functools import partial

import numpy as np

from tilewright.emulator.errors import BarrierMisuse, Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import shared_addresses
from tilewright.emulator.parse import Instruction, Operand
from tilewright.emulator.registers import Lanes


def need_members(lanes: Lanes, members: np.ndarray) -> None:
    """Raises unless every lane named by `members` is here: .sync waits for all of them."""
    here = np.zeros(lanes.cta.threads + 32, np.bool_)
    here[lanes.threads] = True
    for warp in lanes.warps:
        present = int(
            np.packbits(here[32 * warp : 32 * warp + 32], bitorder="little").view("<u4")[0]
        )
        live = lanes.cta.live >> (32 * warp) & 0xFFFFFFFF
        wanted = int(members[-1]) & live
        if wanted & ~present:
            raise BarrierMisuse(f"warp {warp}: .sync for lanes {wanted:#x}, here are {present:#x}")


def _full_warps(lanes: Lanes) -> bool:
    return lanes.count % 32 == 0 and bool((lanes.threads[::32] % 32 == 0).all())


@instruction("shfl.sync<.idx|.bfly|.up|.down>.b32", together=32, unit="alu")
def shfl(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.6 shfl.sync: d = a of another lane of the segment, or of this lane if out of range."""
    destination, flag = lanes.pair(ins.operands[0])
    a, b, c, members = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d, p = lanes.write(destination, np.uint32), lanes.write(flag, np.bool_)
    mode, lane = ins.parts[2], (lanes.threads % 32).astype(np.int64)
    full = _full_warps(lanes)
    position = np.full(lanes.cta.threads, -1)
    position[lanes.threads] = np.arange(lanes.count)

    def source_lanes() -> tuple[np.ndarray, np.ndarray]:
        segment, clamp = (c >> 8 & 31).astype(np.int64), (c & 31).astype(np.int64)
        low, offset = lane & segment, (b & 31).astype(np.int64)
        high = low | (clamp & ~segment)
        if mode == "up":
            source = lane - offset
            return source, source >= (low | clamp & ~segment)
        source = {"down": lane + offset, "bfly": lane ^ offset, "idx": low | (offset & ~segment)}[
            mode
        ]
        return source, source <= high

    constant = all(len(x) == 1 for x in (b, c))
    fixed = source_lanes() if constant else None

    def effect() -> None:
        if not full:
            need_members(lanes, members)
        source, inside = fixed or source_lanes()
        source = np.where(inside, source, lane)
        index = position[np.minimum(lanes.threads - lane + source, lanes.cta.threads - 1)]
        if not full and (index < 0).any():
            raise BarrierMisuse("shfl.sync reads a lane that does not take part")
        values = np.broadcast_to(a, lanes.count)
        d[:] = values[index]
        p[:] = inside

    return effect


@instruction("vote.sync<.all|.any|.uni>.pred", together=32, unit="alu")
def vote(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.5 vote.sync: a predicate over the warp."""
    return _vote(ins, lanes, lanes.write(ins.operands[0], np.bool_))


@instruction("vote.sync.ballot.b32", together=32, unit="alu")
def vote_ballot(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.5 vote.sync.ballot: the predicate of each lane as a bit."""
    return _vote(ins, lanes, lanes.write(ins.operands[0], np.uint32))


def _vote(ins: Instruction, lanes: Lanes, d: np.ndarray) -> Effect:
    p, negated = lanes.predicate(ins.operands[1])
    members, mode, full = lanes.read(ins.operands[2], np.uint32), ins.parts[2], _full_warps(lanes)
    warp = lanes.threads // 32
    bit = np.uint32(1) << (lanes.threads % 32).astype(np.uint32)

    def effect() -> None:
        if not full:
            need_members(lanes, members)
        values = np.broadcast_to(p != negated, lanes.count)
        ballots = np.zeros(lanes.cta.threads // 32 + 1, np.uint32)
        np.bitwise_or.at(ballots, warp, np.where(values, bit, np.uint32(0)))
        here = np.zeros_like(ballots)
        np.bitwise_or.at(here, warp, bit)
        result = {
            "ballot": ballots,
            "any": ballots != 0,
            "all": ballots == here,
            "uni": (ballots == 0) | (ballots == here),
        }[mode]
        d[:] = result[warp]

    return effect


@instruction("elect.sync", together=32, unit="alu")
def elect(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.9 elect.sync: the predicate holds in one lane of the members, here the lowest."""
    destination, flag = lanes.pair(ins.operands[0])
    members, full = lanes.read(ins.operands[1], np.uint32), _full_warps(lanes)
    d, p = lanes.write(destination, np.uint32), lanes.write(flag, np.bool_)
    warp = lanes.threads // 32
    first = np.concatenate([[True], warp[1:] != warp[:-1]])
    leader = (lanes.threads % 32)[np.flatnonzero(first)[np.cumsum(first) - 1]]

    def effect() -> None:
        if not full:
            need_members(lanes, members)
        d[:] = leader
        p[:] = first

    return effect


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux.sync<.add|.min|.max|.and|.or|.xor><.u32|.s32|.b32>", together=32, unit="alu")
def redux(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.8 redux.sync: a reduction over the lanes of the warp."""
    kind = np.dtype(np.int32 if ins.parts[-1] == "s32" else np.uint32)
    a, members = lanes.read(ins.operands[1], kind), lanes.read(ins.operands[2], np.uint32)
    d, operation = lanes.write(ins.operands[0], kind), _REDUCTIONS[ins.parts[2]]
    groups = np.array_split(
        np.arange(lanes.count), np.flatnonzero(np.diff(lanes.threads // 32)) + 1
    )

    def effect() -> None:
        need_members(lanes, members)
        values = np.broadcast_to(a, lanes.count)
        for group in groups:
            d[group] = operation.reduce(values[group])

    return effect


@instruction("activemask.b32", unit="alu")
def activemask(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.7 activemask: the lanes that are here."""
    d = lanes.write(ins.operands[0], np.uint32)
    masks = [lanes.mask >> (32 * (int(t) // 32)) & 0xFFFFFFFF for t in lanes.threads]
    return partial(np.copyto, d, np.array(masks, np.uint32))


@instruction("bar.warp.sync", together=32)
def bar_warp_sync(ins: Instruction, lanes: Lanes) -> Effect | None:
    """9.7.13.2 bar.warp.sync: the lanes wait for each other, and see each other's accesses."""
    members, full = lanes.read(ins.operands[0], np.uint32), _full_warps(lanes)
    return None if full else lambda: need_members(lanes, members)


def _matrix_shape(ins: Instruction) -> int:
    return next(int(p[1:]) for p in ins.parts if p in ("x1", "x2", "x4"))


def _matrix_bytes(ins: Instruction) -> int:
    return 4 * _matrix_shape(ins)


def _row_addresses(lanes: Lanes, operand: Operand, matrices: int) -> Effect:
    """The addresses of the 8 rows of each matrix, [warp, matrix * 8 + row]: lane i gives row i."""
    addresses = shared_addresses(lanes, operand)
    shared = lanes.cta.cluster.shared

    def rows() -> np.ndarray:
        at = addresses().reshape(-1, 32)[:, : 8 * matrices]
        shared.check(at, 16)
        return at

    return rows


@instruction(
    "ldmatrix.sync.aligned.m8n8<.x1|.x2|.x4>{.trans}<.shared|.shared::cta>.b16",
    together=32,
    unit="shared load",
    weight=_matrix_bytes,
)
def ldmatrix(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.14.5.15 ldmatrix: lane l gets row l / 4, columns 2 (l % 4) and + 1 of each matrix."""
    if not _full_warps(lanes):
        raise BarrierMisuse("ldmatrix by an incomplete warp")
    matrices, warps = _matrix_shape(ins), lanes.count // 32
    rows, shared = _row_addresses(lanes, ins.operands[1], matrices), lanes.cta.cluster.shared
    registers, numbers = lanes.rows(ins.operands[0])
    transposed, races, place = "trans" in ins.parts, lanes.cta.machine.races, lanes.place
    initialised = lanes.cta.machine.options.initialised

    def effect() -> None:
        at = rows()
        index = (at >> np.uint32(1))[:, :, None] + np.arange(8, dtype=np.uint32)
        if races:
            races.rows_access(lanes, at, 16, False, place)
        if initialised:
            shared.need_written(index, 2)
        tiles = shared.views[2][index].reshape(warps, matrices, 8, 8)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        words = np.ascontiguousarray(tiles).view(np.uint32).reshape(warps, matrices, 32)
        registers[numbers] = words.transpose(1, 0, 2).reshape(matrices, -1)

    return effect


@instruction(
    "stmatrix.sync.aligned.m8n8<.x1|.x2|.x4>{.trans}<.shared|.shared::cta>.b16",
    together=32,
    effects=True,
    unit="shared store",
    weight=_matrix_bytes,
)
def stmatrix(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.14.5.16 stmatrix: the inverse of ldmatrix."""
    if not _full_warps(lanes):
        raise BarrierMisuse("stmatrix by an incomplete warp")
    matrices, warps = _matrix_shape(ins), lanes.count // 32
    rows, shared = _row_addresses(lanes, ins.operands[0], matrices), lanes.cta.cluster.shared
    registers, numbers = lanes.rows(ins.operands[1])
    transposed, races, place = "trans" in ins.parts, lanes.cta.machine.races, lanes.place

    def effect() -> None:
        words = registers[numbers].reshape(matrices, warps, 32).transpose(1, 0, 2)
        tiles = np.ascontiguousarray(words).view(np.uint16).reshape(warps, matrices, 8, 8)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        at = rows()
        index = (at >> np.uint32(1))[:, :, None] + np.arange(8, dtype=np.uint32)
        shared.views[2][index] = tiles.reshape(warps, 8 * matrices, 8)
        shared.mark(index, 2)
        if races:
            races.rows_access(lanes, at, 16, True, place)

    return effect


@instruction("movmatrix.sync.aligned.m8n8.trans.b16", together=32)
def movmatrix(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.14.5.17 movmatrix: transpose an 8x8 matrix across the warp."""
    if not _full_warps(lanes):
        raise Unsupported("movmatrix by an incomplete warp")
    a, d = lanes.read(ins.operands[1], np.uint32), lanes.write(ins.operands[0], np.uint32)

    def effect() -> None:
        tiles = a.copy().view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        d[:] = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1)

    return effect
