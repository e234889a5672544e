"""The producer: tiles of Q, K and V from memory to shared memory, by TMA.

`load` is a warp's whole work; `fill` and `refill` are parts of a computing warp's, which has no
other to load for it: unspecialised.py.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tilewright.kernels.sm90.fa3.operands import (
    Channels,
    Operands,
    Role,
    Shared,
    Tile,
    TmaOperand,
    key_blocks,
)
from tilewright.kernels.sm90.matmul import ROWS


def views(operand: TmaOperand, gX: cute.Tensor, sX: cute.Tensor, ctas: int = 1) -> tuple[Any, Any]:
    """Tiles in shared memory (tma, stage) and in memory (tma, block): the part that this CTA of
    `ctas` loads for all of them."""
    return cpasync.tma_partition(
        operand.copy,
        cute.arch.block_idx_in_cluster() if ctas > 1 else 0,
        cute.make_layout(ctas),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )


def rows_of(spec: Any, tensor: cute.Tensor, head: Int32, batch: Int32, start: Int32, mode: int):
    """One sequence's rows of one head; `mode` is that of the rows."""
    if spec.packed:
        offset = (start, 0) if mode == 0 else (0, start)
        return cute.domain_offset(offset, tensor[None, None, head])
    return tensor[None, None, head, batch]


def tile_views(spec: Any, op: Operands, sm: Shared, tile: Tile) -> tuple[Any, Any, Any]:
    """(smem, gmem) of Q, K and V, both cut into what one copy moves: (tma, slot), (tma, block)."""
    head_k = tile.head // (op.heads_q // op.heads_k)
    mQ = rows_of(spec, op.q.tensor, tile.head, tile.batch, tile.q_start, 0)
    mK = rows_of(spec, op.k.tensor, head_k, tile.batch, tile.k_start, 0)
    mV = rows_of(spec, op.v.tensor, head_k, tile.batch, tile.k_start, 1)
    gQ = cute.local_tile(mQ, (ROWS, spec.head_dim), (None, 0))  # (64, d, block)
    gK = cute.local_tile(mK, (spec.tile_kv, spec.head_dim), (None, 0))  # (kv, d, block)
    gV = cute.local_tile(mV, (spec.head_dim_v, spec.tile_kv), (0, None))  # (d, kv, block)
    k, v = (views(x, g, s, spec.cluster) for x, g, s in ((op.k, gK, sm.sK), (op.v, gV, sm.sV)))
    return views(op.q, gQ, sm.sQ), k, v


@cute.jit
def load(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """gmem Q, K, V -> smem. One warp."""
    role = Role(spec, op, sm, ch)
    tiles, blocks, tails = Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.q_block >= 0:
        if const_expr(not spec.takes_late):
            ch.tile.release(tiles)
        begin, end = key_blocks(spec, op, tile)
        tQ, (tKsK, tKgK), tV = tile_views(spec, op, sm, tile)
        # K first: its slot may be free while the last tile's Q is still being read.
        load_block(op.k, ch.k, tKgK, tKsK, blocks, end - 1)
        load_rows(role, tQ, tiles, tile.q_block)
        for back in cutlass.range(1, end - begin, unroll=1):
            load_block(op.k, ch.k, tKgK, tKsK, blocks + back, end - 1 - back)
            rows = tile.seqlen_k - (end - back) * spec.tile_kv
            tails = load_values(role, tV, blocks + back - 1, end - back, rows, tails)
        blocks += end - begin
        if const_expr(spec.takes_late):
            # All but one of the loads are issued: some blocks before this tile's end.
            ch.tile.release(tiles)
        rows = tile.seqlen_k - begin * spec.tile_kv
        tails = load_values(role, tV, blocks - 1, begin, rows, tails)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


def load_rows(role: Role, tQ: Any, tiles: Int32, q_block: Int32):
    """Q of tile number `tiles`."""
    spec, op, ch = role.spec, role.op, role.ch
    tQsQ, tQgQ = tQ
    ch.q.wait_empty(tiles)
    full = ch.q.expect(tiles, spec.tile_q * spec.head_dim * 2)
    for w in range(spec.warpgroups):
        block = q_block * spec.warpgroups + w
        cute.copy(op.q.copy, tQgQ[None, block], tQsQ[None, w], tma_bar_ptr=full)


def load_block(operand: TmaOperand, ring: Any, tXgX: Any, tXsX: Any, n: Int32, block: Int32):
    """One tile of keys or values into slot `n` of its ring."""
    ring.wait_empty(n)
    full = ring.expect(n, cute.size_in_bytes(tXsX.element_type, tXsX[None, 0].layout))
    to_all = {"mcast_mask": Int16((1 << ring.ctas) - 1)} if ring.ctas > 1 else {}
    cute.copy(
        operand.copy, tXgX[None, block], tXsX[None, ring.index(n)], tma_bar_ptr=full, **to_all
    )


@cute.jit
def fill(role: Constexpr, tile: Tile, tiles: Int32, n: Int32):
    """Q of tile number `tiles`, and of its K and V, from number `n` on, as much as slots are for.

    The last slot of V is left to `refill`, which fills those of V a block later than those of K.
    """
    spec, op, ch = role.spec, role.op, role.ch
    begin, end = key_blocks(spec, op, tile)
    tQ, (tKsK, tKgK), (tVsV, tVgV) = tile_views(spec, op, role.sm, tile)
    load_block(op.k, ch.k, tKgK, tKsK, n, end - 1)
    load_rows(role, tQ, tiles, tile.q_block)
    for back in cutlass.range(1, cutlass.min(spec.k_stages, end - begin), unroll=1):
        load_block(op.k, ch.k, tKgK, tKsK, n + back, end - 1 - back)
    for back in cutlass.range(cutlass.min(spec.v_stages - 1, end - begin), unroll=1):
        load_block(op.v, ch.v, tVgV, tVsV, n + back, end - 1 - back)


@cute.jit
def refill(wg: Constexpr, begin: Int32, n: Int32, block: Int32):
    """K and V of later blocks, while S of key block `block`, which is number `n`, is multiplied.

    Their slots were those of K of the block before and of V of the one before that: this warpgroup
    has done with them, and the others are about to. A tile's blocks end with `begin`.
    """
    spec, op, ch = wg.spec, wg.op, wg.ch
    _, (tKsK, tKgK), (tVsV, tVgV) = wg.views
    k_ahead, v_ahead = spec.k_stages - 1, spec.v_stages - 2
    if is_first_warp():
        if block - k_ahead >= begin:
            load_block(op.k, ch.k, tKgK, tKsK, n + k_ahead, block - k_ahead)
        if block - v_ahead >= begin:
            load_block(op.v, ch.v, tVgV, tVsV, n + v_ahead, block - v_ahead)


def is_first_warp() -> Boolean:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0


@cute.jit
def load_values(
    role: Constexpr, tV: Any, n: Int32, block: Int32, rows: Int32, tails: Int32
) -> Int32:
    """A tile of V into slot `n`. `rows` are left of the sequence from its first one on; `tails`
    counts the tiles that needed their last rows zeroed.

    Past a packed sequence's end lie rows of others, and 0 times a NaN of theirs would be NaN.
    The engine cannot clip there, so that block is waited for, and the rows are zeroed.
    """
    spec, op, ch = role.spec, role.op, role.ch
    tVsV, tVgV = tV
    if const_expr(not spec.packed):
        load_block(op.v, ch.v, tVgV, tVsV, n, block)
    else:
        if rows >= spec.tile_kv:
            load_block(op.v, ch.v, tVgV, tVsV, n, block)
        else:
            ch.v.wait_empty(n)
            arrived = ch.tail.expect(tails, spec.tile_kv * spec.head_dim_v * 2)
            slot = ch.v.index(n)
            cute.copy(op.v.copy, tVgV[None, block], tVsV[None, slot], tma_bar_ptr=arrived)
            ch.tail.wait_full(tails)
            zero_rows(role.sm.sV[None, None, slot], cutlass.max(rows, 0))
            # Orders the zeros before the multiplies that read them.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ch.v.full(n))
            tails += 1
    return tails


@cute.jit
def zero_rows(sV: cute.Tensor, first: Int32):
    """sV (d, kv) becomes 0 from row `first` on. One warp, 16 bytes a lane."""
    chunks = cute.size(sV, mode=[0]) // 8
    zeros = cute.make_rmem_tensor((8, 1), sV.element_type)
    zeros.fill(0.0)
    end = cute.size(sV, mode=[1]) * chunks
    for i in cutlass.range(first * chunks + cute.arch.lane_idx(), end, 32, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(sV, (8, 1), (i % chunks, i // chunks)))
