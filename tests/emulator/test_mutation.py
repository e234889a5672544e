"""Every synchronisation of the probes and of a peer kernel is deleted in turn; something notices.

A deletion that nothing notices stands in a table here with the reason why the synchronisation is
redundant. Keys: the opcode's start and which of its executed occurrences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the probes are CuTe DSL programs")

import numpy as np

from tests.emulator import dsl
from tests.emulator.cases import CASES, Case
from tests.emulator.mutate import mutants
from tilewright.emulator import Emulator, Options, Result

Redundant = dict[tuple[str, int], str]

_EXIT = "guards the exit against a peer's late access; in this program all have landed before"
PROBES: dict[str, Redundant] = {
    "tma Float16 swizzle 128": {},
    "mma.sync Float16 k stmatrix": {
        ("bar.", 2): "each warp overwrites only the rows of A that it alone has read"
    },
    "wgmma SS BFloat16 BFloat16 (128, 128, 64) kn": {},
    "wgmma RS Float16 Float16 (64, 64, 64) kk": {},
    "ring": {
        ("fence.", 1): "only threads of the CTA use the mbarriers; bar.sync orders their init"
    },
    "cluster exchange": {
        ("mbarrier.try_wait", 2): "the arrival is an acknowledgement; the data is counted in bytes",
        ("barrier.", 6): _EXIT,
    },
    "tcgen05 2 CTA BFloat16 BFloat16 (256, 128, 64) kk ": {("barrier.", 4): _EXIT},
    "tcgen05 1 CTA Float16 Float16 (128, 64, 64) kk 16x64b 8 True": {
        ("barrier.", 2): "a cluster of one CTA: bar.sync follows",
        ("barrier.", 4): _EXIT,
    },
}

_FRESH = "waits for a stage that was never used: a fresh barrier passes"
_TAIL = "lets the producer outlive the consumers, who signal a CTA of their own"
PEER: Redundant = {
    ("mbarrier.try_wait", 1): _FRESH,
    ("mbarrier.try_wait", 2): _FRESH,
    ("mbarrier.try_wait", 6): _TAIL,
    ("mbarrier.try_wait", 7): _TAIL,
    ("mbarrier.arrive", 9): "frees Q, which a kernel of one tile a CTA does not load again",
    ("bar.", 3): "takes turns between warpgroups for speed",
    ("bar.", 5): "each warpgroup overwrites only the rows of Q that it alone reads",
    ("wgmma.fence", 3): "the fence of the product issued before covers these registers",
}
PEER_SHARE = 0.85


def _survivors(emulator: Emulator, run: Callable[[], tuple[Result, bool]]) -> tuple[set[Any], int]:
    found = list(mutants(emulator, run))
    return {(m.opcode, m.ordinal) for m in found if m.caught_by is None}, len(found)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in PROBES], ids=lambda case: case.name)
def test_every_deletion_in_a_probe_is_noticed(case: Case) -> None:
    dsl.use_arch(case.archs[0])
    function, traced = case.build()
    emulator = dsl.emulated(case.archs[0], function, *traced)

    def run() -> tuple[Result, bool]:
        tensors = case.tensors()
        result, split = emulator(*tensors), len(tensors) - case.outputs
        expected = case.expected(*tensors[:split])
        return result, all(map(np.array_equal, tensors[split:], expected))

    survivors, _ = _survivors(emulator, run)
    assert survivors == set(PROBES[case.name])


def test_deletions_in_a_peer_are_noticed() -> None:
    pytest.importorskip("flash_attn.cute", reason="the peer, flash-attn-4, is not installed")
    import torch

    from tests.emulator import peers

    torch.manual_seed(0)
    tensors = [torch.randn(1, 512, 1, 128, dtype=torch.bfloat16) for _ in range(3)]
    with peers.flash_attention("sm_90a", Options()) as peer:
        right, _ = peer.forward(*tensors, causal=True)
    ((emulator, values),) = peer.calls
    out = values[3]
    wanted = out.clone()
    assert torch.equal(wanted, right)

    def run() -> tuple[Result, bool]:
        out.fill_(torch.nan)
        return emulator(*values), torch.equal(out, wanted)

    survivors, total = _survivors(emulator, run)
    print(f"caught {total - len(survivors)} of {total}")
    assert survivors == set(PEER)
    assert 1 - len(survivors) / total >= PEER_SHARE
