"""Every kernel there is to compile: a family's name, its spec, and what to trace it with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any

from tilewright.kernels.sm90.fa3.spec import DTYPES, ForwardSpec
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec, RowsSpec

FA3_FORWARD = "fa3_forward"
FA3_PREPARE = "fa3_backward_prepare"
FA3_BACKWARD = "fa3_backward"
FA3_FINISH = "fa3_backward_finish"

# The module of each family's kernel, and its class there.
_SOURCES = {
    FA3_FORWARD: ("fa3.kernel", "Forward"),
    FA3_PREPARE: ("fa3_backward.prepare", "Prepare"),
    FA3_BACKWARD: ("fa3_backward.kernel", "Backward"),
    FA3_FINISH: ("fa3_backward.finish", "Finish"),
}

# How each pair of head dims is tiled. Measured on an H200 for 64, 128 and 256: docs/fa3.md.
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_q": 192, "k_stages": 4, "v_stages": 4, "ping_pong": True},
    (96, 96): {"k_stages": 3, "v_stages": 3, "q_in_registers": True, "stores_by_tma": True},
    (128, 128): {"k_stages": 3, "q_in_registers": True, "stores_by_tma": True},
    (192, 128): {},
    (192, 192): {"tile_kv": 64, "k_stages": 4, "v_stages": 3},
    # Few exponentials to a multiply: the maxima do not show, and going ahead costs causal calls
    # 2 %.
    (256, 256): {"tile_kv": 64, "k_stages": 3, "goes_ahead": False},
}
_COMMON = {"tile_q": 128, "tile_kv": 128, "ping_pong": False, "goes_ahead": True}
# Three warpgroups at head dim 64 win by their number where sequences are long, and lose where they
# are short by the rows of a tile of 192 that a mask hides or that are past the end.
_SHORT = {"k_stages": 4, "v_stages": 4, "q_in_registers": True, "stores_by_tma": True}
_SHORT_CAUSAL = _SHORT | {"tile_kv": 64, "skips_hidden": True}
# Where a right bound alone cuts the last blocks, the upper warpgroup may leave out what it hides.
_CAUSAL: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"ping_pong": False, "skips_hidden": True},
    (192, 128): {"skips_hidden": True},
    (256, 256): {"skips_hidden": True},
}
SHORT, SHORT_FULL = 1536, 768  # queries
# A row's maximum may lag by so much, in log2, that P stays inside its dtype with room to spare.
_THRESHOLD = {"float16": 14.0, "bfloat16": 24.0}
# As _TILES, of the backward's main kernel. Measured for all but 96. Additions to dQ are spread over
# a step: together they would hold up the queue that loads and stores of shared memory go through.
_WIDE = {"tile_kv": 64, "adds_beside_dV": ("write", "dV"), "adds_beside_dK": ("dQ", "dK")}
_BACKWARD_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {
        **{"keys_in_registers": True, "keeps_thread": True, "q_stages": 4, "do_stages": 4},
        "order": ("lse", "S", "delta", "dP", "P", "dK", "dS", "write", "dQ", "dV", "add"),
    },
    # Head dim 96 goes through these too. Two warpgroups would make 48 columns of dQ each there, and
    # shared memory swizzles 96 in groups of 32; tiles of 64 keys add to dQ twice as often.
    (128, 128): {"do_stages": 3},
    (192, 128): _WIDE | {"q_stages": 3, "do_stages": 3},
    (192, 192): _WIDE | {"q_stages": 2, "do_stages": 3},
    (256, 256): _WIDE | {"q_stages": 2, "do_stages": 2, "adds_beside_dV": ("S", "P")},
}
# With a softcap P comes with dS: see `scores.cap`. And it takes a register less, which a window
# over packed rows has not to spare at head dim 128.
_DS_BEFORE_DV = ("lse", "S", "add", "dK", "P", "dP", "delta", "dS", "dV", "write", "dQ")


@dataclass(frozen=True)
class Kernel:
    """One thing to compile."""

    family: str
    spec: Any  # the family's
    arch: str

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The function to compile and the fake operands to compile it with. Loads the DSL."""
        name, of_kernel = _SOURCES[self.family]
        module = import_module(f"tilewright.kernels.sm90.{name}")
        return getattr(module, of_kernel)(self.spec), module.fake_operands(self.spec)

    def __str__(self) -> str:
        return f"{self.family}_{self.spec}"


def tiled(spec: ForwardSpec, seqlen_q: int) -> ForwardSpec:
    """`spec` with the tiles and mechanisms that were measured to be the fastest for it."""
    dims = spec.head_dim, spec.head_dim_v
    is_causal = spec.bounded_right and not spec.bounded_left
    how: dict[str, Any] = _COMMON | _TILES[dims] | (_CAUSAL.get(dims, {}) if is_causal else {})
    if dims == (64, 64):
        is_short = seqlen_q <= (SHORT if is_causal else SHORT_FULL) or spec.bounded_left
        if is_short:
            how = _COMMON | (_SHORT_CAUSAL if is_causal else _SHORT)
    # Short packed sequences would wait for a ticket that is taken late.
    how["takes_late"] = spec.bounded_right and not spec.packed
    if spec.has_softcap:
        # The tanh is long and rare; nobody has measured that going ahead of it pays.
        how |= {"goes_ahead": False}
    how["rescale_threshold"] = _THRESHOLD[spec.dtype]
    how["stores_by_tma"] = how.get("stores_by_tma", False) and not spec.packed
    return replace(spec, **how)


def tiled_backward(spec: BackwardSpec) -> BackwardSpec:
    """The same for a main kernel of the backward."""
    how = dict(_BACKWARD_TILES[spec.head_dim, spec.head_dim_v])
    if spec.has_softcap or (spec.head_dim == 128 and spec.bounded_left and spec.packed):
        how["order"] = _DS_BEFORE_DV
    how["shares_loads"] = spec.is_wide and not spec.packed
    if spec.bounded_left:
        # A left bound takes the register that the thread's index would be kept in.
        how["keeps_thread"] = False
    return replace(spec, **how)


def kernels(arch: str) -> list[Kernel]:
    """Everything that the dispatcher may ask for on `arch`."""
    if arch != "sm_90a":
        return []
    specs = [(FA3_FORWARD, spec) for spec in _forwards()]
    specs += [(FA3_BACKWARD, spec) for spec in _backwards()]
    for packed, dtype in product((False, True), DTYPES):
        dims, dims_v = map(dict.fromkeys, zip(*_BACKWARD_TILES, strict=True))
        specs += [(FA3_PREPARE, RowsSpec(dtype, dim, packed)) for dim in dims_v]
        specs += [(FA3_FINISH, RowsSpec(dtype, dim, packed)) for dim in dims]
    return [Kernel(family, spec, arch) for family, spec in specs]


@lru_cache
def smallest(arch: str, family: str, wanted: Any) -> Any:
    """Of a family's kernels that do what the spec `wanted` does, the features of the one that does
    the least: it may have larger head dims, bounds that `wanted` has not, or an order of sums that
    it need not have. None if none does."""

    def extent(spec: Any) -> tuple[Any, ...]:
        dims_and_bounds = spec.head_dim, spec.head_dim_v, spec.bounded_left, spec.bounded_right
        return *dims_and_bounds, getattr(spec, "deterministic", False)

    def rest(spec: Any) -> Any:
        free = {"head_dim": 0, "head_dim_v": 0, "bounded_left": False, "bounded_right": False}
        if hasattr(spec, "deterministic"):
            free["deterministic"] = False
        return replace(spec.features, **free)

    able = (
        kernel.spec.features
        for kernel in kernels(arch)
        if kernel.family == family
        and all(a >= b for a, b in zip(extent(kernel.spec), extent(wanted), strict=True))
        and rest(kernel.spec) == rest(wanted)
    )
    return min(able, key=extent, default=None)


def _forwards() -> Iterable[ForwardSpec]:
    features = (
        ForwardSpec(dtype, *dims, *mask, has_softcap, packed)
        for dims, dtype, packed, (mask, has_softcap) in product(
            _TILES, DTYPES, (False, True), _SCORINGS
        )
    )
    specs = (tiled(spec, length) for spec in features for length in (SHORT_FULL, SHORT, SHORT + 1))
    return dict.fromkeys(specs)


def _backwards() -> Iterable[BackwardSpec]:
    return (
        tiled_backward(BackwardSpec(dtype, *dims, *mask, has_softcap, packed, deterministic))
        for dims, dtype, packed, (mask, has_softcap), deterministic in product(
            _BACKWARD_TILES, DTYPES, (False, True), _SCORINGS, (False, True)
        )
        # A softcap is rare: its kernel always sums in order.
        if deterministic or not has_softcap
    )


# Masks by their bounded sides. A softcap is rare: its kernel takes both bounds, whatever they are.
_SCORINGS = [
    ((False, False), False),
    ((False, True), False),
    ((True, True), False),
    ((True, True), True),
]
