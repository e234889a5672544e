"""FA-3's backward on Hopper, the main kernel: launch, shared memory, roles.

    schedule  1 warp        counter in memory -> tiles of keys
    load      1 warp        tiles -> K, V; Q, dO and their numbers in shared memory, by TMA
    turns     2 warps       when dQ may be added to, and that it was, of a deterministic call
    compute   1-3 x 4 warps S, dP | P, dS | dV += P^T dO, dK += dS^T Q | dQ = dS K, added to memory

Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout like q with Dv; dk, dv like k
and v. lse_log2 and delta (B, Hq, R) and dq_sum (B, Hq, R / 64, D / 8, 128, 4) are the workspace of
`spec`, turns (B, Hq, R / tile_q). Packed: q (Tq, Hq, D), k (Tk, Hk, D), and no B in the workspace.
Cannot: pages. Source: FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import (
    DTYPES,
    meet,
    permuted,
    rank_in,
    ring,
    tensor,
    tma_operand,
)
from tilewright.kernels.sm90.fa3.operands import TILE_WORDS, Lengths
from tilewright.kernels.sm90.fa3_backward.compute import compute
from tilewright.kernels.sm90.fa3_backward.load import load
from tilewright.kernels.sm90.fa3_backward.operands import Channels, Operands, Shared
from tilewright.kernels.sm90.fa3_backward.registers import make_mmas
from tilewright.kernels.sm90.fa3_backward.schedule import schedule
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.kernels.sm90.fa3_backward.turns import count_additions, take_turns
from tilewright.kernels.sm90.fa3_backward.wide import compute_wide


class Backward:
    """The main backward kernel of one spec. Instances are traced, not called."""

    def __init__(self, spec: BackwardSpec):
        if reason := spec.why_illegal():
            raise ValueError(f"spec is {spec}; {reason}")
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_sum: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        spoilt: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        tile_counter: cute.Tensor,
        turns: Any,
        scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        used: Int32,
        ctas: Int32,
        stream: Any,
    ):
        spec, packed = self.spec, self.spec.packed
        rows_first = (0, 2, 1) if packed else (1, 3, 2, 0)
        mQ, mK, mV, mdO, mdK, mdV = (permuted(x, rows_first) for x in (q, k, v, dout, dk, dv))
        last_first = (1, 0) if packed else (2, 1, 0)
        lengths, mTurns = None, None
        batch = cute.size(q, mode=[0])
        if const_expr(packed):
            lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, used)
            batch = cute.size(cu_seqlens_q) - 1
        if const_expr(spec.deterministic):
            mTurns = permuted(turns, last_first)
        op = Operands(
            *load_operands(spec, (mQ, mK, mV, mdO)),
            mLSE=permuted(lse_log2, last_first),
            mDelta=permuted(delta, last_first),
            mdQ=permuted(dq_sum, (4, 3, 2, 1, 0) if packed else (5, 4, 3, 2, 1, 0)),
            mdK=mdK,
            mdV=mdV,
            mSpoilt=spoilt,
            mCounter=tile_counter,
            mTurns=mTurns,
            lengths=lengths,
            scale=scale,
            softcap=softcap,
            window_left=window_left,
            window_right=window_right,
            batch=Int32(batch),
            heads_q=Int32(cute.size(mQ, mode=[2])),
            heads_k=Int32(cute.size(mK, mode=[2])),
            seqlen_q=Int32(cute.size(mQ, mode=[0])),
            seqlen_k=Int32(cute.size(mK, mode=[0])),
        )
        blocks = (op.seqlen_k + spec.cluster_keys - 1) // spec.cluster_keys
        tiles = (blocks + op.batch + 1 if packed else blocks * op.batch) * op.heads_k
        clusters = cutlass.max(cutlass.min(ctas // spec.cluster, tiles), 1)
        self.kernel(op).launch(
            grid=(spec.cluster * clusters, 1, 1),
            block=(spec.threads, 1, 1),
            cluster=(spec.cluster, 1, 1) if spec.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, op: Operands):
        spec = self.spec
        dtype = DTYPES[spec.dtype]
        smem = cutlass.utils.SmemAllocator()
        pair = spec.cluster > 1
        loaders = 1 + spec.shares_loads
        ch = Channels(
            tile=ring(smem, spec.tiles_ahead, spec.cluster),
            k=ring(smem, spec.k_stages),
            v=ring(smem, 1),
            q=ring(smem, spec.q_stages, loaders),
            do=ring(smem, spec.do_stages, loaders),
            turn=ring(smem, 2),
            added=ring(smem, 2),
            tail=ring(smem, 1),
            ds=ring(smem, spec.ds_slots, spec.cluster),
            p=ring(smem, spec.ds_slots) if pair else None,
            peer_k=ring(smem, 1) if pair else None,
        )
        sTile = smem.allocate_tensor(Int32, cute.make_layout((TILE_WORDS, spec.tiles_ahead)), 16)
        sLSE, sDelta = (
            smem.allocate_tensor(Float32, cute.make_layout((spec.tile_q, stages)), 128)
            for stages in (spec.q_stages, spec.do_stages)
        )
        sQ, sK, sV, sdO, sdS = (tensor(smem, dtype, layout) for layout in smem_layouts(spec))
        sPeerK, sPeerdS = None, None
        if const_expr(pair):
            sPeerK, sPeerdS = (tensor(smem, dtype, layout) for layout in peer_layouts(spec))
        sm = Shared(sQ, sdO, sK, sV, sdS, sLSE, sDelta, sTile, sPeerK, sPeerdS)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if thread == 0:
            initialise(spec, ch)
        cute.arch.mbarrier_init_fence()
        # All but this beginning comes after prepare; and finish may begin when CTAs leave room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        meet(spec.cluster)
        few, many = spec.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                load(spec, op, sm, ch)
            if warp == 1 and rank_in(spec.cluster) == 0:
                schedule(spec, op, sm, ch)
            if const_expr(spec.deterministic):
                if warp == 2:
                    take_turns(spec, op, sm, ch)
                if warp == 3:
                    count_additions(spec, op, sm, ch)
        else:
            cute.arch.setmaxregister_increase(many)
            run = compute_wide if spec.is_wide else compute
            run(spec, op, sm, ch, make_mmas(spec, dtype))
        if const_expr(pair):
            meet(spec.cluster)  # no CTA leaves while another may still write to it


def initialise(spec: BackwardSpec, ch: Channels) -> None:
    """The rings. By one thread."""
    consumers = 4 * spec.warpgroups  # warps
    ch.tile.initialise(producers=1, consumers=consumers + 1 + 2 * spec.deterministic)
    ch.turn.initialise(producers=1, consumers=consumers)
    ch.added.initialise(producers=consumers, consumers=1)
    for loaded in (ch.k, ch.v, ch.q, ch.do):
        loaded.initialise(producers=1, consumers=consumers)
    ch.tail.initialise(producers=1, consumers=1)
    ch.ds.initialise(4 if spec.is_wide else consumers, consumers)
    if spec.cluster > 1:
        # Who may write P is said by what makes dS over it: see `wide.py`.
        ch.p.initialise(producers=4, consumers=4)
        ch.peer_k.initialise(producers=1, consumers=consumers)


def load_operands(spec: BackwardSpec, tensors: tuple[cute.Tensor, ...]) -> list[Any]:
    """Of Q, K, V, dO and of the other CTA's K, if there is one."""
    one, both = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
    shared = spec.shares_loads, False, False, spec.shares_loads
    loads: list[Any] = [
        tma_operand(both() if of_two else one(), x, layout, tile, 1 + of_two)
        for x, layout, tile, of_two in zip(
            tensors, smem_layouts(spec)[:4], smem_tiles(spec), shared, strict=True
        )
    ]
    if spec.cluster == 1:
        return [*loads, None]
    tile = spec.tile_kv, spec.peer_columns
    return [*loads, tma_operand(one(), tensors[1], peer_layouts(spec)[0], tile)]


def smem_layouts(spec: BackwardSpec) -> tuple[Any, ...]:
    """Of Q, K, V, dO and dS."""
    dtype = DTYPES[spec.dtype]
    return tuple(
        matmul.keys_layout(dtype, rows, dim, stages)
        for rows, dim, stages in (
            (spec.tile_q, spec.head_dim, spec.q_stages),
            (spec.tile_kv, spec.head_dim, spec.k_stages),
            (spec.tile_kv, spec.head_dim_v, 1),
            (spec.tile_q, spec.head_dim_v, spec.do_stages),
            (spec.tile_kv, spec.tile_q, spec.ds_slots),
        )
    )


def peer_layouts(spec: BackwardSpec) -> tuple[Any, Any]:
    """Of the other CTA's K and dS."""
    dtype = DTYPES[spec.dtype]
    return (
        matmul.keys_layout(dtype, spec.tile_kv, spec.peer_columns, 1),
        matmul.keys_layout(dtype, spec.tile_kv, spec.tile_q, spec.ds_slots),
    )


def smem_tiles(spec: BackwardSpec) -> tuple[tuple[int, int], ...]:
    """What one copy moves: of Q, K, V and dO."""
    q, kv, dim, dim_v = spec.tile_q, spec.tile_kv, spec.head_dim, spec.head_dim_v
    return (q, dim), (kv, dim), (kv, dim_v), (q, dim_v)


def fake_operands(spec: BackwardSpec) -> tuple[Any, ...]:
    """What to trace `Backward.__call__` with: shapes and strides known when it runs."""
    dtype = DTYPES[spec.dtype]
    rows = {name: cute.sym_int32() for name in ("b", "q", "k", "hq", "hk", "units", "turns", "b1")}
    rows["r"] = cute.sym_int32(divisibility=128)
    rows |= {name: cute.sym_int32(divisibility=8) for name in ("d", "dv")}
    rows |= {"octets": spec.head_dim // 8, "threads": 128, "four": 4}

    def tensor_of(names: str) -> Any:
        shape = [rows[name] for name in names.split()]
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]] + [1]
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)

    def compact(names: str, element: Any, align: int) -> Any:
        shape = [rows[name] for name in names.split()]
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            element, shape, stride_order=order, assumed_align=align
        )

    batch = "" if spec.packed else "b "
    q, k, v, do = (tensor_of(batch + x) for x in ("q hq d", "k hk d", "k hk dv", "q hq dv"))
    numbers = [compact(batch + "hq r", Float32, 16) for _ in range(2)]
    dq_sum = compact(batch + "hq units octets threads four", Float32, 16)
    spoilt = cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    gradients = [tensor_of(batch + names) for names in ("k hk d", "k hk dv")]
    lengths: list[Any] = [None] * 4
    if spec.packed:
        lengths = [compact("b1", Int32, 4) for _ in range(2)]
        lengths += [
            cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int32(),)) for _ in range(2)
        ]
    counter = cute.runtime.make_fake_compact_tensor(Int32, (2,), assumed_align=4)
    turns = compact(batch + "hq turns", Int32, 4) if spec.deterministic else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = (Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(1))
    return (
        *(q, k, v, do, *numbers, dq_sum, *gradients, spoilt, *lengths),
        *(counter, turns, *scalars, stream),
    )
