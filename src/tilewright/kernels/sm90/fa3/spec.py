"""What a forward kernel of FA-3 is compiled for: the key of its compilation, and its budgets."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 232448  # that one CTA may have on sm_90
BARRIER_BYTES = 1024  # mbarriers, the tile ring, and the alignment of what follows
REGISTERS = 65536
MMA_ROWS = 64  # of one warpgroup's matrix multiply
HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class ForwardSpec:
    """One compiled kernel. The first group says what it can compute, the second how it does.

    `head_dim` and `head_dim_v` are those of the tiles; a smaller one is filled up with zeros.
    A bounded side of the mask takes its bound when the kernel is called: causal is a right bound
    of 0. `packed` is the varlen layout.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    bounded_left: bool = False
    bounded_right: bool = False
    has_softcap: bool = False
    packed: bool = False

    tile_q: int = 128
    tile_kv: int = 128
    k_stages: int = 2
    v_stages: int = 2
    specialised: bool = True  # warps of their own load and schedule; else a computing one does
    stores_by_tma: bool = False  # O leaves through shared memory of its own
    q_in_registers: bool = False
    ping_pong: bool = True  # warpgroups take turns at issuing matrix multiplies
    overlap: bool = True  # S of the next block is issued before this block's P V
    carries_over: bool = False  # the next tile's first S is issued with the last P V of this one
    starts_two: bool = False  # S of a tile's second block is issued with that of its first
    rescale_threshold: float = 0.0  # log2 of how far a row's maximum may lag; 0 rescales always
    goes_ahead: bool = False  # exp2 takes the maxima so far; a block that exceeds them is redone
    skips_hidden: bool = False  # a warpgroup leaves out the blocks of which its rows see nothing
    exp2_emulated: int = 0  # of each 16 elements of a row, those whose exp2 is a polynomial
    tiles_ahead: int = 1  # that a CTA takes before it needs them, and no idle one can
    takes_late: bool = False  # the last of them not as a tile begins, but as its loads are issued
    # Of a section, at the least, where tiles differ in length: the last section's longest tile must
    # not outlast the work that is left for the others.
    tiles_per_cta: int = 3
    longest_first: bool = True
    dynamic: bool = True  # tiles are handed out by a counter in memory
    cluster: int = 1  # CTAs that take neighbouring query blocks, and load keys for each other

    @property
    def features(self) -> ForwardSpec:
        """What it can compute, however it does."""
        return ForwardSpec(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.bounded_left,
            self.bounded_right,
            self.has_softcap,
            self.packed,
        )

    @property
    def warpgroups(self) -> int:
        """That compute; where warps are specialised, one more loads."""
        return self.tile_q // MMA_ROWS

    @property
    def takes_turns(self) -> bool:
        return self.ping_pong and self.warpgroups > 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + self.specialised)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of the loading warpgroup and of the computing ones, where there are both.

        Together they are at most what a launch allots, a multiple of 8 for each thread: a warpgroup
        that asks for more waits for ever.
        """
        return {1: (56, 256), 2: (24, 240), 3: (32, 160), 4: (24, 112)}[self.warpgroups]

    @property
    def smem_bytes(self) -> int:
        q = self.tile_q * self.head_dim
        kv = self.tile_kv * (self.k_stages * self.head_dim + self.v_stages * self.head_dim_v)
        out = self.tile_q * self.head_dim_v if self.stores_by_tma else 0
        return 2 * (q + kv + out) + BARRIER_BYTES

    def why_illegal(self) -> str | None:
        """What the chip cannot give this spec; None if it is legal."""
        if self.dtype not in DTYPES:
            return f"dtype={self.dtype}: want one of {', '.join(DTYPES)}"
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim not in HEAD_DIMS:
                return f"{name}={dim}: tiles have one of {HEAD_DIMS}"
        if self.tile_q % MMA_ROWS or not 1 <= self.warpgroups <= 4:
            return f"tile_q={self.tile_q}: one to four warpgroups multiply {MMA_ROWS} rows each"
        if self.tile_kv % 16 or not 16 <= self.tile_kv <= 256:
            return f"tile_kv={self.tile_kv}: P V takes a multiple of 16 keys, S at the most 256"
        if self.stores_by_tma and self.packed:
            return "stores_by_tma=True: a packed tile's rows may end where the next sequence begins"
        if self.carries_over and not (self.overlap and self.q_in_registers):
            return "carries_over=True: the next Q must have a place while this one is multiplied"
        if self.goes_ahead and not (self.overlap and self.rescale_threshold > 0):
            return "goes_ahead=True: maxima must be allowed to lag, under multiplies that overlap"
        if self.skips_hidden and (self.takes_turns or self.carries_over or not self.overlap):
            return (
                "skips_hidden=True: warpgroups that take turns must do the same blocks, and "
                "tiles must not be carried over or done in order"
            )
        if self.starts_two and (self.carries_over or not self.overlap):
            return "starts_two=True: S of two blocks is in flight, and O must not be yet"
        if self.cluster not in (1, 2):
            return f"cluster={self.cluster}: one CTA, or two that share keys"
        is_bounded = self.bounded_left or self.bounded_right
        if self.cluster > 1 and (is_bounded or self.packed):
            return "cluster=2: its CTAs must see the same keys"
        if self.tiles_ahead < 1:
            return f"tiles_ahead={self.tiles_ahead}: a tile at the least is handed over"
        if not self.specialised and (reason := self._why_specialised()):
            return f"specialised=False: {reason}"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} B of shared memory, {SMEM_BYTES} B exist"
        return None

    def _why_specialised(self) -> str | None:
        if self.packed or self.cluster > 1:
            return "a computing warp loads dense tiles, and for its own CTA"
        if self.takes_late or self.tiles_ahead > 1:
            return "one tile is taken ahead, as the loads of one begin"
        if self.carries_over or self.skips_hidden or self.starts_two or not self.overlap:
            return "all warps do all blocks, each one's S over P V of the one before"
        if min(self.k_stages, self.v_stages) < 2:
            return "a block is loaded while the one before is multiplied"
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
        return "_".join([*parts, f"{self.tile_q}x{self.tile_kv}"])
