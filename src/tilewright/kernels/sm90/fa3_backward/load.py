"""The producer: tiles of K and V, and for each the Q and dO that see it, by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tilewright.kernels.sm90.fa3.kernel import rank_in
from tilewright.kernels.sm90.fa3.load import rows_of, views, zero_rows
from tilewright.kernels.sm90.fa3.operands import TmaOperand
from tilewright.kernels.sm90.fa3_backward.operands import (
    Channels,
    Operands,
    Role,
    Shared,
    Sweep,
    Tile,
)
from tilewright.kernels.sm90.fa3_backward.spec import padded_start

# A tile of at most so many steps lets the next be taken as it begins; another, as its last loads
# are issued: the later it is taken, the better are tiles of unequal length spread.
SHORT = 8


@cute.jit
def load(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """gmem K, V, Q, dO, LSE, delta -> smem. One warp."""
    role = Role(spec, op, sm, ch)
    tiles, loaded, steps, tails = Int32(0), Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        sweep = Sweep.of(spec, op, tile)
        is_short = sweep.steps <= SHORT
        if is_short:
            ch.tile.release(tiles)
        if sweep.count > 0:
            tails = load_tile(role, tile, sweep, loaded, steps, tails)
            loaded += 1
            steps += sweep.steps
        if not is_short:
            ch.tile.release(tiles)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


@cute.jit
def load_tile(
    role: Constexpr, tile: Tile, sweep: Sweep, n: Int32, first: Int32, tails: Int32
) -> Int32:
    """K and V of tile number `n`, and the queries of its steps, from number `first` on."""
    spec, op, sm, ch = role.spec, role.op, role.sm, role.ch
    head, block = sweep.first()
    for step in cutlass.range(first, first + sweep.steps, unroll=1):
        if step == first:
            tails = load_keys(role, tile, n, True, tails)
        q, do = query_views(role, tile, head)
        rows = tile.seqlen_q - block * spec.tile_q
        lse, delta = (
            (statistics(role, op.mLSE, tile, head), sm.sLSE),
            (statistics(role, op.mDelta, tile, head), sm.sDelta),
        )
        tails = load_block(role, (op.q, ch.q, q, sm.sQ, lse), step, block, rows, tails)
        tails = load_block(role, (op.dout, ch.do, do, sm.sdO, delta), step, block, rows, tails)
        # Last what room comes last for, since all that is behind it waits too.
        if step == first:
            tails = load_keys(role, tile, n, False, tails)
        head, block = sweep.after(spec, head, block)
    return tails


@cute.jit
def load_keys(role: Constexpr, tile: Tile, n: Int32, is_early: Constexpr, tails: Int32) -> Int32:
    """Those of V and K of tile number `n` that have room before the tile before ends, or the rest.

    With the keys in registers, the room of V is free as soon as they are there.
    """
    spec, op, sm, ch = role.spec, role.op, role.sm, role.ch
    if const_expr(spec.keys_in_registers == is_early):
        v = key_view(spec, op.v, sm.sV, tile, spec.head_dim_v)
        # Rows past the end make dP of keys that are hidden, so V needs no zeros.
        none_past = Int32(spec.tile_kv)
        tails = load_block(role, (op.v, ch.v, v, sm.sV, None), n, tile.kv_block, none_past, tails)
    if const_expr((spec.k_stages > 1) == is_early):
        k = key_view(spec, op.k, sm.sK, tile, spec.head_dim)
        keys = tile.seqlen_k - tile.kv_block * spec.tile_kv
        tails = load_block(role, (op.k, ch.k, k, sm.sK, None), n, tile.kv_block, keys, tails)
        if const_expr(spec.cluster > 1):
            rank = rank_in(spec.cluster)
            peer, first = tile.kv_block + 1 - 2 * rank, spec.first_peer_column(rank)
            k = key_view(spec, op.peer_k, sm.sPeerK, tile, spec.peer_columns, first)
            keys = tile.seqlen_k - peer * spec.tile_kv
            tails = load_block(
                role, (op.peer_k, ch.peer_k, k, sm.sPeerK, None), n, peer, keys, tails
            )
    return tails


def key_view(
    spec: Any, operand: TmaOperand, sX: cute.Tensor, tile: Tile, dim: int, column: Any = 0
) -> Any:
    mX = rows_of(spec, operand.tensor, tile.head, tile.batch, tile.k_start, 0)
    mX = cute.domain_offset((0, column), mX)
    return views(operand, cute.local_tile(mX, (spec.tile_kv, dim), (None, 0)), sX)


def query_views(role: Role, tile: Tile, head: Int32) -> tuple[Any, Any]:
    spec, op, sm = role.spec, role.op, role.sm
    mQ, mdO = (rows_of(spec, x.tensor, head, tile.batch, tile.q_start, 0) for x in (op.q, op.dout))
    gQ = cute.local_tile(mQ, (spec.tile_q, spec.head_dim), (None, 0))  # (q, d, block)
    gdO = cute.local_tile(mdO, (spec.tile_q, spec.head_dim_v), (None, 0))  # (q, d, block)
    ctas = role.ch.q.ctas
    return views(op.q, gQ, sm.sQ, ctas), views(op.dout, gdO, sm.sdO, ctas)


def statistics(role: Role, mX: cute.Tensor, tile: Tile, head: Int32) -> cute.Tensor:
    """One sequence's part of a head's numbers, one a query, cut into blocks: (q, block)."""
    if role.spec.packed:
        mX = cute.domain_offset((padded_start(tile.q_start, tile.batch),), mX[None, head])
        mX = cute.make_tensor(mX.iterator.align(16), mX.layout)
    else:
        mX = mX[None, head, tile.batch]
    return cute.local_tile(mX, (role.spec.tile_q,), (None,))


@cute.jit
def load_block(
    role: Constexpr, what: Any, n: Int32, block: Int32, rows: Int32, tails: Int32
) -> Int32:
    """A tile into slot `n` of its ring, with its queries' numbers if there are some.

    `what` is (operand, ring, views, smem, (gmem, smem) of the numbers). `rows` are left of the
    sequence. Past a packed sequence's end lie rows of others, and 0 times a NaN of theirs would be
    NaN. The engine cannot clip there, so such a tile is waited for, and the rows are zeroed.
    """
    spec = role.spec
    operand, ring, (tXsX, tXgX), sX, numbers = what
    num_bytes = cute.size_in_bytes(tXsX.element_type, tXsX[None, 0].layout)
    to_all = {"mcast_mask": Int16((1 << ring.ctas) - 1)} if ring.ctas > 1 else {}
    if const_expr(numbers is not None):
        num_bytes += 4 * spec.tile_q
    slot = ring.index(n)
    ring.wait_empty(n)
    if const_expr(not spec.packed):
        barrier = ring.expect(n, num_bytes)
        cute.copy(operand.copy, tXgX[None, block], tXsX[None, slot], tma_bar_ptr=barrier, **to_all)
        copy_numbers(numbers, block, slot, barrier)
    else:
        if rows >= cute.size(sX, mode=[0]):
            barrier = ring.expect(n, num_bytes)
            cute.copy(operand.copy, tXgX[None, block], tXsX[None, slot], tma_bar_ptr=barrier)
            copy_numbers(numbers, block, slot, barrier)
        else:
            barrier = role.ch.tail.expect(tails, num_bytes)
            cute.copy(operand.copy, tXgX[None, block], tXsX[None, slot], tma_bar_ptr=barrier)
            copy_numbers(numbers, block, slot, barrier)
            role.ch.tail.wait_full(tails)
            zero_rows(transposed(sX)[None, None, slot], cutlass.max(rows, 0))
            # Orders the zeros before the multiplies that read them.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.full(n))
            tails += 1
    return tails


def copy_numbers(numbers: Any, block: Int32, slot: Int32, barrier: cute.Pointer) -> None:
    if numbers is not None:
        gX, sX = numbers
        copy = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * cute.size(sX, mode=[0])
        )
        with cute.arch.elect_one():
            cute.copy(copy, gX[None, block], sX[None, slot], mbar_ptr=barrier)


def transposed(sX: cute.Tensor) -> cute.Tensor:
    """(row, col, stage) as (col, row, stage)."""
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))
