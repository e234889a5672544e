"""FA-3's forward on Hopper: launch, shared memory, roles.

    schedule  1 warp        counter in memory -> tiles of work
    load      1 warp        tiles -> Q, K, V in shared memory, by TMA
    compute   2-3 x 4 warps S = Q K^T | softmax | O += P V | O, LSE to memory

Or no roles, where the spec is not `specialised`: unspecialised.py.
Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out like q with Dv, lse (B, Hq, Sq);
packed: q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), lse (Hq, Tq).
Cannot: pages, splits over the keys. Source: FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tilewright.kernels.blocks.ring import Ring
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.compute import compute
from tilewright.kernels.sm90.fa3.load import load
from tilewright.kernels.sm90.fa3.operands import (
    TILE_WORDS,
    Channels,
    Lengths,
    Operands,
    Shared,
    TmaOperand,
)
from tilewright.kernels.sm90.fa3.schedule import row_blocks, schedule
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.kernels.sm90.fa3.unspecialised import load_and_compute

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


class Forward:
    """The forward of one spec. Instances are traced, not called."""

    def __init__(self, spec: ForwardSpec):
        if reason := spec.why_illegal():
            raise ValueError(f"spec is {spec}; {reason}")
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        tile_counter: cute.Tensor,
        scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        used: Int32,
        ctas: Int32,
        stream: Any,
    ):
        spec = self.spec
        packed = spec.packed
        rows_first, dim_first = ((0, 2, 1), (2, 0, 1)) if packed else ((1, 3, 2, 0), (3, 1, 2, 0))
        mQ, mK, mV, mO = (permuted(x, rows_first) for x in (q, k, v, out))  # (rows, d, h[, b])
        mLSE = lse if packed else permuted(lse, (2, 1, 0))
        mLSE = permuted(lse, (1, 0)) if packed else mLSE  # (q, h[, b])
        loads = load_operands(spec, (mQ, mK, permuted(v, dim_first)))  # V (d, kv, h[, b])
        store_O = None
        if const_expr(spec.stores_by_tma):
            s2g = cpasync.CopyBulkTensorTileS2GOp()
            store_O = tma_operand(s2g, mO, smem_layouts(spec)[3], smem_tiles(spec)[3])
        lengths = None
        if const_expr(packed):
            lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, used)
            batch = cute.size(cu_seqlens_q) - 1
        else:
            batch = cute.size(mQ, mode=[3])
        op = Operands(
            *loads,
            mQ=mQ,
            mK=mK,
            mV=mV,
            out=store_O,
            mO=mO,
            mLSE=mLSE,
            mSink=sink,
            mCounter=tile_counter,
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
        self.kernel(op).launch(
            grid=(spec.cluster * clusters(spec, op, ctas), 1, 1),
            block=(spec.threads, 1, 1),
            cluster=(spec.cluster, 1, 1) if spec.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, op: Operands):
        spec = self.spec
        dtype = DTYPES[spec.dtype]
        layouts = smem_layouts(spec)
        smem = cutlass.utils.SmemAllocator()
        ch = Channels(
            tile=ring(smem, spec.tiles_ahead, spec.cluster),
            q=ring(smem, 1),
            k=ring(smem, spec.k_stages, spec.cluster),
            v=ring(smem, spec.v_stages, spec.cluster),
            tail=ring(smem, 1),
        )
        sTile = smem.allocate_tensor(Int32, cute.make_layout((TILE_WORDS, spec.tiles_ahead)), 16)
        sQ, sK, sV = (tensor(smem, dtype, layout) for layout in layouts[:3])
        sO = tensor(smem, dtype, layouts[3]) if spec.stores_by_tma else None
        sm = Shared(sQ, sK, sV, sO, sTile)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        consumers = 4 * spec.warpgroups  # warps
        if thread == 0:
            ch.tile.initialise(producers=1, consumers=consumers + spec.specialised)
            for loaded in (ch.q, ch.k, ch.v):
                loaded.initialise(producers=1, consumers=consumers)
            ch.tail.initialise(producers=1, consumers=1)
        cute.arch.mbarrier_init_fence()
        meet(spec.cluster)
        mmas = (
            matmul.make_mma(dtype, spec.tile_kv, matmul.K_MAJOR, spec.q_in_registers),
            matmul.make_mma(dtype, spec.head_dim_v, matmul.MN_MAJOR, True),
        )
        if const_expr(not spec.specialised):
            load_and_compute(spec, op, sm, ch, mmas)
        else:
            few, many = spec.registers
            if warp < 4:
                cute.arch.setmaxregister_decrease(few)
                if warp == 0:
                    load(spec, op, sm, ch)
                if warp == 1 and rank_in(spec.cluster) == 0:
                    schedule(spec, op, sm, ch)
            else:
                cute.arch.setmaxregister_increase(many)
                compute(spec, op, sm, ch, mmas)
        if const_expr(spec.cluster > 1):
            meet(spec.cluster)  # no CTA leaves while another may still arrive at its barriers


def meet(cluster: int) -> None:
    """A barrier of all threads that see each other's shared memory."""
    if cluster > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def rank_in(cluster: int) -> Any:
    """This CTA's, uniform in a warp."""
    if cluster == 1:
        return Int32(0)
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def smem_layouts(spec: ForwardSpec) -> tuple[Any, ...]:
    """Of Q, K, V and O."""
    dtype = DTYPES[spec.dtype]
    return (
        matmul.rows_layout(dtype, spec.head_dim, spec.warpgroups),
        matmul.keys_layout(dtype, spec.tile_kv, spec.head_dim, spec.k_stages),
        matmul.values_layout(dtype, spec.tile_kv, spec.head_dim_v, spec.v_stages),
        matmul.rows_layout(dtype, spec.head_dim_v, spec.warpgroups),
    )


def smem_tiles(spec: ForwardSpec) -> tuple[tuple[int, int], ...]:
    """What one copy moves, in the same order."""
    rows = matmul.ROWS
    dim, dim_v, keys = spec.head_dim, spec.head_dim_v, spec.tile_kv
    return (rows, dim), (keys, dim), (dim_v, keys), (rows, dim_v)


def permuted(x: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(modes)))


def clusters(spec: ForwardSpec, op: Operands, ctas: Int32) -> Int32:
    """How many are launched: no more than there are tiles for."""
    blocks = row_blocks(spec, op.seqlen_q)
    tiles = blocks + op.batch + 1 if spec.packed else blocks * op.batch
    return cutlass.max(cutlass.min(ctas // spec.cluster, tiles * op.heads_q), 1)


def load_operands(spec: ForwardSpec, tensors: tuple[cute.Tensor, ...]) -> list[TmaOperand]:
    """Of Q, K and V. A cluster's CTAs each load a part of K and V into all of them."""
    one, several = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
    return [
        tma_operand(several() if ctas > 1 else one(), x, layout, tile, ctas)
        for x, layout, tile, ctas in zip(
            tensors,
            smem_layouts(spec)[:3],
            smem_tiles(spec)[:3],
            (1, spec.cluster, spec.cluster),
            strict=True,
        )
    ]


def tma_operand(
    op: Any, x: cute.Tensor, layout: Any, tile: tuple[int, int], ctas: int = 1
) -> TmaOperand:
    one = cute.slice_(layout, (None, None, 0))
    return TmaOperand(*cpasync.make_tiled_tma_atom(op, x, one, tile, num_multicast=ctas))


def ring(smem: Any, stages: int, ctas: int = 1) -> Ring:
    return Ring(smem.allocate_array(cutlass.Int64, 2 * stages), stages, ctas)


def tensor(smem: Any, dtype: Any, layout: Any) -> cute.Tensor:
    return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)


def fake_operands(spec: ForwardSpec) -> tuple[Any, ...]:
    """What to trace `Forward.__call__` with: shapes and strides known when it runs."""
    dtype = DTYPES[spec.dtype]
    rows = {name: cute.sym_int32() for name in ("b", "q", "k", "hq", "hk")}
    dims = {name: cute.sym_int32(divisibility=8) for name in ("d", "dv")}

    def tensor_of(names: str, element: Any = dtype) -> Any:
        shape = [(rows | dims)[name] for name in names.split()]
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]] + [1]
        return cute.runtime.make_fake_tensor(element, shape, strides, assumed_align=16)

    def compact(names: str, element: Any) -> Any:
        shape = [rows[name] for name in names.split()]
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            element, shape, stride_order=order, assumed_align=4
        )

    batch = "" if spec.packed else "b "
    tensors = [tensor_of(batch + names) for names in ("q hq d", "k hk d", "k hk dv", "q hq dv")]
    lse = compact("hq q" if spec.packed else "b hq q", Float32)
    rows["b1"] = cute.sym_int32()
    lengths = [compact(n, Int32) if spec.packed else None for n in ("b1", "b1", "b", "b")]
    lengths[2:] = [
        cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int32(),)) if spec.packed else None
        for _ in range(2)
    ]
    counter = cute.runtime.make_fake_compact_tensor(Int32, (2,), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = (Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(1))
    return (*tensors, lse, compact("hq", Float32), *lengths, counter, *scalars, stream)
