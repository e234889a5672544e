"""Which tile of work is next, and where it lies. One warp works it out for the whole CTA.

Tiles are numbered so that those which run at one time share keys: heads are grouped into sections
whose keys and values fit in L2, or which have tiles enough for all CTAs, and inside a section the
query block is the slow index. Under a causal mask the last blocks see the most keys and come first,
so that the short ones fill the gaps at the end: longest processing time first.
Source: FlashAttention-4, arXiv 2603.05451, section 3.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.sm90.fa3.operands import TILE_WORDS, Channels, Operands, Shared, Tile

L2_BYTES = 24 << 20  # of keys and values that may be in use at a time; half of an H200's L2
LARGEST_SECTION = 64


def section_heads(spec: Any, op: Operands, seqlen_k: Int32, blocks: Int32) -> Int32:
    """Query heads of a section: a power of two of key heads, with all the heads that share them."""
    ctas, _, _ = cute.arch.grid_dim()
    group = op.heads_q // op.heads_k
    head_bytes = seqlen_k.to(cutlass.Int64) * (2 * (spec.head_dim + spec.head_dim_v))
    section = Int32(1)
    power = 2
    while power <= LARGEST_SECTION:
        is_larger = head_bytes * power <= L2_BYTES
        if spec.bounded_right:
            together = ctas // spec.cluster
            is_larger = is_larger | (power // 2 * group * blocks < spec.tiles_per_cta * together)
        section = Int32(cutlass.select_(is_larger, Int32(power), section))
        power *= 2
    return section * group


def row_blocks(spec: Any, rows: Int32) -> Int32:
    """Those of a sequence, each the work of a cluster."""
    together = spec.tile_q * spec.cluster
    return (rows + together - 1) // together


def place(
    spec: Any, index: Int32, heads: Int32, blocks: Int32, section: Int32
) -> tuple[Int32, Int32]:
    """(head, query block) of tile `index` among `heads * blocks`."""
    begin = index // (section * blocks) * section
    width = cutlass.min(section, heads - begin)
    rest = index - begin * blocks
    block = rest // width
    head = begin + rest - block * width
    back = blocks - 1 - block
    return head, Int32(cutlass.select_(Boolean(spec.longest_first), back, block))


def dense_tile(spec: Any, op: Operands, index: Int32, blocks: Int32, section: Int32) -> Tile:
    """Tile `index` where all sequences are of one length, of `blocks` blocks of queries."""
    zero, rows = Int32(0), op.seqlen_q
    head, q_block = place(spec, index, op.heads_q * op.batch, blocks, section)
    batch = head // op.heads_q
    return Tile(head - batch * op.heads_q, batch, q_block, zero, rows, rows, zero, op.seqlen_k)


@cute.jit
def schedule(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """counter in gmem -> tiles in smem, of all CTAs of a cluster. One warp of its first CTA."""
    ctas, _, _ = cute.arch.grid_dim()
    index, _, _ = cute.arch.block_idx()
    index = index // spec.cluster
    if const_expr(spec.packed):
        schedule_packed(spec, op, sm, ch, index)
    else:
        blocks = row_blocks(spec, op.seqlen_q)
        heads = op.heads_q * op.batch
        section = section_heads(spec, op, op.seqlen_k, blocks)
        n = Int32(0)
        is_left = index < heads * blocks
        while is_left:
            publish(spec, sm, ch, n, dense_tile(spec, op, index, blocks, section))
            n += 1
            index = next_tile(spec, op, ch, n, index)
            is_left = index < heads * blocks
        publish(spec, sm, ch, n, Tile.none())
    if const_expr(spec.dynamic):
        leave_counter_at_zero(op, ctas // spec.cluster)


@cute.jit
def schedule_packed(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, index: Int32):
    """The same for sequences of unequal lengths. A lane looks at one of 32 sequences in turn.

    The rows past the last sequence are one more, of which none is used: they are to be zeroed.
    """
    n = Int32(0)
    group = Int32(0)  # the first sequence that the lanes look at
    tiles_before = Int32(0)  # of the sequences before it
    length, tiles_here, through = sequence_tiles(spec, op, group)
    while group <= op.batch:
        total = cute.arch.shuffle_sync(through, 31)
        while index < tiles_before + total:
            # The lane of the first sequence whose last tile is at or past this one.
            is_past = cute.arch.vote_ballot_sync(index < tiles_before + through)
            owner = first_lane(is_past)
            batch = group + owner
            rows = cute.arch.shuffle_sync(length, owner)
            before = cute.arch.shuffle_sync(through - tiles_here, owner)
            q_start, seqlen_q, k_start, seqlen_k = sequence(op, batch)
            blocks = row_blocks(spec, rows)
            section = section_heads(spec, op, seqlen_k, blocks)
            inside = index - tiles_before - before
            head, q_block = place(spec, inside, op.heads_q, blocks, section)
            tile = Tile(head, batch, q_block, q_start, rows, seqlen_q, k_start, seqlen_k)
            publish(spec, sm, ch, n, tile)
            n += 1
            index = next_tile(spec, op, ch, n, index)
        tiles_before += total
        group += 32
        length, tiles_here, through = sequence_tiles(spec, op, group)
    publish(spec, sm, ch, n, Tile.none())


@cute.jit
def sequence_tiles(spec: Constexpr, op: Operands, group: Int32):
    """Rows and tiles of this lane's sequence, and the tiles of the group up to and with it."""
    lane = cute.arch.lane_idx()
    batch = group + lane
    rows = Int32(0)
    if batch <= op.batch:
        begin = op.lengths.cu_seqlens_q[batch]
        end = op.seqlen_q
        if batch < op.batch:
            end = op.lengths.cu_seqlens_q[batch + 1]
        rows = end - begin
    tiles = row_blocks(spec, rows) * op.heads_q
    through = tiles
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(through, 1 << step)
        if lane >= 1 << step:
            through += other
    return rows, tiles, through


@cute.jit
def sequence(op: Operands, batch: Int32):
    """(q_start, seqlen_q, k_start, seqlen_k) of a sequence."""
    q_start = op.lengths.cu_seqlens_q[batch]
    k_start = op.lengths.cu_seqlens_k[batch]
    seqlen_q = Int32(0)
    seqlen_k = Int32(0)
    if batch < op.batch:
        seqlen_q = op.lengths.cu_seqlens_q[batch + 1] - q_start
        seqlen_k = op.lengths.cu_seqlens_k[batch + 1] - k_start
        if op.lengths.used & 1 != 0:
            seqlen_q = op.lengths.seqused_q[batch]
        if op.lengths.used & 2 != 0:
            seqlen_k = op.lengths.seqused_k[batch]
    return q_start, seqlen_q, k_start, seqlen_k


@cute.jit
def next_tile(spec: Constexpr, op: Operands, ch: Channels, n: Int32, index: Int32) -> Int32:
    """The first tile of a cluster is its own number; the others follow in turn or as they come.

    Its tile number `n` is taken no sooner than there is a slot for it.
    """
    ctas, _, _ = cute.arch.grid_dim()
    clusters = ctas // spec.cluster
    following = index + clusters
    if const_expr(spec.dynamic):
        ch.tile.wait_empty(n)
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(
                op.mCounter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
        following = cute.arch.shuffle_sync(ticket, 0) + clusters
    return following


@cute.jit
def publish(spec: Constexpr, sm: Shared, ch: Channels, n: Int32, tile: Tile):
    """A tile into slot `n`, for the load warp and the warpgroups.

    Of a cluster, the CTA of rank r gets the r-th of its blocks. Where there are fewer, the rows of
    the last are past the end.
    """
    ch.tile.wait_empty(n)
    if cute.arch.lane_idx() == 0:
        slot, full = ch.tile.index(n), ch.tile.full(n)
        if const_expr(spec.cluster == 1):
            tile.write(sm.sTile, slot)
            cute.arch.mbarrier_arrive(full)
        else:
            first = tile.q_block * spec.cluster
            for rank in cutlass.range_constexpr(spec.cluster):
                cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * TILE_WORDS, rank)
                replace(tile, q_block=first + rank).send(sm.sTile, slot, full, rank)


@cute.jit
def leave_counter_at_zero(op: Operands, clusters: Int32):
    """The last cluster to take its last ticket does it, for the next launch."""
    if cute.arch.lane_idx() == 0:
        done = op.mCounter.iterator + 1
        if cute.arch.atomic_add(done, Int32(1), sem="acq_rel", scope="gpu") == clusters - 1:
            op.mCounter[0] = Int32(0)
            op.mCounter[1] = Int32(0)


@cute.jit
def first_lane(votes: Int32) -> Int32:
    """The lowest set bit's number."""
    return cute.arch.popc((votes & -votes) - 1)
