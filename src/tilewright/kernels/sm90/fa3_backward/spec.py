"""What a backward kernel of FA-3 is compiled for, and the workspace that its three kernels share.

prepare writes, for each query row, the log-sum-exp and D = rowsum(dO * O) - dLSE, and zeroes the
sums of dQ; the main kernel adds to those; finish scales them and writes dQ.

Rows of the workspace are padded: those of a sequence begin at a multiple of ROWS_MULTIPLE, so that
no tile of queries holds rows of two. See `padded_start`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.kernels.sm90.fa3.spec import (
    DTYPES,
    HEAD_DIMS,
    MMA_ROWS,
    SMEM_BYTES,
)

# What a step of the main kernel does, by names that `step.py` explains, as suits most head dims.
ORDER = ("lse", "S", "add", "dK", "P", "dP", "dV", "delta", "dS", "write", "dQ")
ROWS_MULTIPLE = 128
BARRIER_BYTES = 384  # mbarriers and the tile ring; the numbers of queries follow
TILE_ALIGNMENT = 1024


@dataclass(frozen=True)
class BackwardSpec:
    """One compiled main kernel. The first group says what it can compute, the second how.

    The first group is that of `ForwardSpec`.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    bounded_left: bool = False
    bounded_right: bool = False
    has_softcap: bool = False
    packed: bool = False
    deterministic: bool = False  # each sum of dQ is added to in a fixed order

    tile_q: int = 64
    tile_kv: int = 128
    q_stages: int = 3
    do_stages: int = 2
    shares_loads: bool = False  # each CTA of a cluster loads half of Q and dO for both
    # Over head dim 128, where the warpgroups that have dV and dK add to dQ: some of `places`, each
    # as often as it has equal parts.
    adds_beside_dV: tuple[str, ...] = ()
    adds_beside_dK: tuple[str, ...] = ()
    keys_in_registers: bool = False  # K and V are multiplied from there
    keeps_thread: bool = False  # its index, in a register: to read it takes long in a full queue
    order: tuple[str, ...] = ORDER  # of a step; over head dim 128 that of `wide.py`
    tiles_ahead: int = 1

    @property
    def features(self) -> BackwardSpec:
        """What it can compute, however it does."""
        return BackwardSpec(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.bounded_left,
            self.bounded_right,
            self.has_softcap,
            self.packed,
            self.deterministic,
        )

    @property
    def is_wide(self) -> bool:
        """Whether dK and dV of 64 keys are too many registers for one warpgroup."""
        return max(self.head_dim, self.head_dim_v) > 128

    @property
    def cluster(self) -> int:
        """CTAs that exchange dS, with neighbouring tiles of keys: see `wide.py`."""
        return 2 if self.is_wide else 1

    @property
    def cluster_keys(self) -> int:
        return self.tile_kv * self.cluster

    @property
    def peer_columns(self) -> int:
        """Of the other CTA's K that one of a cluster has in shared memory.

        Half of 192 are 96, but shared memory swizzles 64 together.
        """
        return 128 if self.is_wide else 0

    def first_peer_column(self, rank: Any) -> Any:
        """Of those: the CTA of rank 0 makes the first columns of dQ, the other the last."""
        return (self.head_dim - self.peer_columns) * rank

    @property
    def warpgroups(self) -> int:
        """That compute; one more loads."""
        return 2 if self.is_wide else self.tile_kv // MMA_ROWS

    @property
    def dq_columns(self) -> int:
        """Of the part of dQ that a warpgroup makes, which has 64 rows; not of a wide kernel."""
        return self.head_dim * self.tile_q // (MMA_ROWS * self.warpgroups)

    @property
    def k_stages(self) -> int:
        """Of a narrow kernel two: K comes before the last dQ of the tile before is made."""
        return 1 if self.is_wide else 2

    @property
    def ds_slots(self) -> int:
        """Of a narrow kernel four, where they fit, so that none is waited for: who writes dS of a
        step n has seen that all wrote that of step n - 2, so they are done with step n - 3, which
        read that of n - 4. Of a wide one, which has so little room, one and the other CTA's."""
        more, few = (2, 1) if self.is_wide else (4, 2)
        return more if self._smem_bytes(more) <= SMEM_BYTES else few

    @property
    def has_room(self) -> bool:
        """Whether P of a step may be written before dQ of the one before it is made."""
        return self.ds_slots > 1

    @property
    def hands_back_ds(self) -> bool:
        """Whether a slot of dS is written again only when all say that they have read it."""
        return self.ds_slots < 4

    @property
    def adds_late(self) -> bool:
        """Whether a block's dQ is added in the step after the one that makes it."""
        return self.order.index("add") < self.order.index("dQ")

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of the loading warpgroup and of the computing ones."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.warpgroups]

    @property
    def smem_bytes(self) -> int:
        return self._smem_bytes(self.ds_slots)

    def _smem_bytes(self, ds_slots: int) -> int:
        kv = self.tile_kv * (self.k_stages * self.head_dim + self.head_dim_v + self.peer_columns)
        q = self.tile_q * (self.q_stages * self.head_dim + self.do_stages * self.head_dim_v)
        ds = self.cluster * ds_slots * self.tile_q * self.tile_kv
        first = BARRIER_BYTES + 4 * self.tile_q * (self.q_stages + self.do_stages)
        return 2 * (kv + q + ds) + -(-first // TILE_ALIGNMENT) * TILE_ALIGNMENT

    def why_illegal(self) -> str | None:
        """What the chip cannot give this spec; None if it is legal."""
        if self.dtype not in DTYPES:
            return f"dtype={self.dtype}: want one of {', '.join(DTYPES)}"
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS:
                return f"{name}={dim}: tiles have one of {HEAD_DIMS}"
        if self.tile_q % MMA_ROWS or ROWS_MULTIPLE % self.tile_q:
            return f"tile_q={self.tile_q}: want 64 or 128, which the workspace is padded to"
        if self.tile_kv % MMA_ROWS or not 1 <= self.warpgroups <= 3:
            return f"tile_kv={self.tile_kv}: one to three warpgroups own {MMA_ROWS} keys each"
        if self.is_wide and (self.tile_q, self.tile_kv) != (MMA_ROWS, MMA_ROWS):
            return f"tile {self.tile_q}x{self.tile_kv}: head dims over 128 take 64x64"
        if self.is_wide and self.head_dim <= 128:
            return f"head_dim={self.head_dim}: where head_dim_v is over 128, want 192 or 256"
        if self.shares_loads and (self.packed or not self.is_wide):
            return "shares_loads=True: two CTAs must load the same rows, and have none to zero"
        if self.is_wide and self.keys_in_registers:
            return "keys_in_registers: head dims over 128 leave no registers for keys"
        if not self.is_wide and self.q_stages < 3:
            return f"q_stages={self.q_stages}: a step holds three, those of the steps beside it too"
        if reason := self._why_no_order():
            return f"order={' '.join(self.order)}: {reason}"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} B of shared memory, {SMEM_BYTES} B exist"
        return self._why_no_additions()

    @property
    def additions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of warpgroups 0 and 1 of a wide kernel."""
        return self.adds_beside_dV, self.adds_beside_dK

    @property
    def places(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """By which a dQ comes, from its making on, named for what has just been done."""
        of_dV = ("S", "P", "write", "dV") if self.has_room else ("write", "S", "P")
        return of_dV, ("dQ", "dS", "dK", "send")

    def _why_no_additions(self) -> str | None:
        for what, places, wanted in zip(("dV", "dK"), self.places, self.additions, strict=True):
            found = f"adds_beside_{what}={' '.join(wanted)}: "
            if not self.is_wide and wanted:
                return f"{found}up to head dim 128 the order says where"
            if self.is_wide and not (wanted and set(wanted) <= set(places)):
                return f"{found}want some of {' '.join(places)}"
            if sorted(wanted, key=places.index) != list(wanted):
                return f"{found}a dQ comes by them as {' '.join(places)}"
        return None

    def _why_no_order(self) -> str | None:
        """What a step of this order would use before it is made, or overwrite while it is used."""
        if sorted(self.order) != sorted(ORDER):
            return f"want each of {' '.join(ORDER)} once"
        uses = [("S", "P"), ("P", "dS"), ("dP", "dS"), ("dS", "write"), ("dK", "write")]
        uses += [("delta", "dS"), ("S", "dP"), ("S", "delta")]
        # With a softcap, P is made together with dS.
        uses += [("dS", "dV")] if self.has_softcap else [("P", "dV"), ("lse", "P")]
        if not self.adds_late:
            uses += [("dQ", "add")]
        for first, then in uses:
            if self.order.index(first) > self.order.index(then):
                return f"want {first} before {then}"
        return None

    def __str__(self) -> str:
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        mask = {
            (False, False): "full",
            (False, True): "right",
            (True, False): "left",
            (True, True): "window",
        }[self.bounded_left, self.bounded_right]
        parts = [{"float16": "f16", "bfloat16": "bf16"}[self.dtype], dims, mask]
        parts += ["varlen"] if self.packed else []
        parts += ["softcap"] if self.has_softcap else []
        parts += ["deterministic"] if self.deterministic else []
        return "_".join([*parts, f"{self.tile_q}x{self.tile_kv}"])


@dataclass(frozen=True)
class RowsSpec:
    """One compiled prepare or finish. `head_dim` is a tile's: of dO the one, of dQ the other."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    packed: bool = False

    def why_illegal(self) -> str | None:
        """As of `BackwardSpec`."""
        if self.dtype not in DTYPES:
            return f"dtype={self.dtype}: want one of {', '.join(DTYPES)}"
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim={self.head_dim}: tiles have one of {HEAD_DIMS}"
        return None

    def __str__(self) -> str:
        parts = [{"float16": "f16", "bfloat16": "bf16"}[self.dtype], f"d{self.head_dim}"]
        return "_".join(parts + (["varlen"] if self.packed else []))


def padded_start(start: Any, sequence: Any) -> Any:
    """Where a packed sequence's rows begin in the workspace; `start` is its entry of cu_seqlens_q.

    The rows past the last sequence count as one more. Of each there is room for the length rounded
    up, since start grows by it and the sequence by one.
    """
    return (start + sequence * ROWS_MULTIPLE) // ROWS_MULTIPLE * ROWS_MULTIPLE


def padded_rows(rows: int, sequences: int) -> int:
    """Rows of the workspace: of one dense sequence (`sequences` 0), or of all packed ones."""
    if sequences == 0:
        return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    return padded_start(rows, sequences + 1)
