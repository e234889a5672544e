"""Every synchronisation of the probes and of two peer kernels is deleted in turn; this is noticed.

A deletion that nothing notices stands in a table here with the reason why the synchronisation is
redundant: the opcode's start and which of its executed occurrences.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the probes are CuTe DSL programs")

import numpy as np

from tests.emulator import dsl
from tests.emulator.cases import CASES, Case
from tests.emulator.mutate import mutants
from tilewright.emulator import Emulator, Options, Result

Redundant = dict[str, dict[str, tuple[int, ...]]]  # reason -> opcode -> its occurrences

_ALONE = "a cluster of one CTA, whose bar.sync orders the same"
_CP: Redundant = {
    "fence.proxy.async follows, which covers the mbarrier's init too": {"fence.": (1,)},
    "the cluster barrier that follows holds for the warps of a CTA too": {"bar.": (1,)},
}
PROBES: dict[str, Redundant] = {  # by a pattern of the case's name
    "mma.sync Float16 k stmatrix": {
        "each warp overwrites only the rows of A that it alone has read": {"bar.": (2,)}
    },
    "ring": {
        "only threads of the CTA use the mbarriers; bar.sync orders their init": {"fence.": (1,)}
    },
    "cluster exchange": {
        "the arrival is an acknowledgement; the data is counted in bytes": {
            "mbarrier.try_wait": (2,)
        },
        "guards the exit against a peer's late access; here all have landed before": {
            "barrier.": (6,)
        },
    },
    "tcgen05 1 CTA*": {_ALONE: {"barrier.": (2,)}},
    "tcgen05.cp * 1 CTA": _CP | {_ALONE: {"barrier.": (2,)}},
    "tcgen05.cp * 2 CTA": _CP,
}

_FRESH = "waits for a stage that was never used: a fresh barrier passes"
_TAIL = "lets the producer outlive the consumers, who signal a CTA of their own"
_ONCE = "frees memory that a kernel of one tile a CTA does not use again"
PEERS: dict[str, tuple[float, Redundant]] = {  # share that is caught at least, and the rest
    "sm_90a": (
        0.85,
        {
            _FRESH: {"mbarrier.try_wait": (1, 2)},
            _TAIL: {"mbarrier.try_wait": (6, 7)},
            _ONCE: {"mbarrier.arrive": (9,)},  # Q
            "takes turns between warpgroups for speed": {"bar.": (3,)},
            "each warpgroup overwrites only the rows of Q that it alone reads": {"bar.": (5,)},
            "the fence of the product issued before covers these registers": {"wgmma.fence": (3,)},
        },
    ),
    "sm_100a": (
        0.8,
        {
            "no thread uses the barrier: P, O and the row statistics signal in one direction": {
                "mbarrier.init": (17, 18, 21, 22, 23, 24)
            },
            # K and V, Q twice, V; row statistics; both halves of O in shared memory
            _FRESH: {"mbarrier.try_wait": (3, 4, 5, 6, 27, 36, 38)},
            _TAIL: {"mbarrier.try_wait": (34, 39)},  # row statistics, O in shared memory
            # Q; both halves of O in tensor memory; the first half of O in shared memory, whose
            # store is waited for together with the second
            _ONCE: {
                "tcgen05.commit": (8,),
                "mbarrier.arrive": (1, 25, 28),
                "cp.async.bulk.commit_group": (1,),
                "cp.async.bulk.wait_group": (1,),
            },
            "arrivals of one tensor-core pipe come in order, a later one is waited for": {
                "mbarrier.try_wait": (9, 10, 12)
            },
            "announces a load of Q that does not follow": {"mbarrier.arrive": (9,)},
        },
    ),
}


def _keys(redundant: Redundant) -> set[tuple[str, int]]:
    found = [(o, n) for table in redundant.values() for o, ns in table.items() for n in ns]
    assert len(found) == len(set(found)), "a deletion has one reason"
    return set(found)


def _survivors(emulator: Emulator, run: Callable[[], tuple[Result, bool]]) -> tuple[set[Any], int]:
    found = list(mutants(emulator, run))
    survivors = {(m.opcode, m.ordinal) for m in found if m.caught_by is None}
    print(f"caught {len(found) - len(survivors)} of {len(found)}")
    return survivors, len(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
    known = next((table for name, table in PROBES.items() if fnmatch(case.name, name)), {})
    assert survivors == _keys(known)


@pytest.mark.parametrize("arch", PEERS)
def test_deletions_in_a_peer_are_noticed(arch: str) -> None:
    pytest.importorskip("flash_attn.cute", reason="the peer, flash-attn-4, is not installed")
    import torch

    from tests.emulator import peers

    torch.manual_seed(0)
    tensors = [torch.randn(1, 512, 1, 128, dtype=torch.bfloat16) for _ in range(3)]
    with peers.flash_attention(arch, Options()) as peer:
        right, _ = peer.forward(*tensors, causal=True)
    ((emulator, values),) = peer.calls
    out = values[3]
    wanted = out.clone()
    assert torch.equal(wanted, right)

    def run() -> tuple[Result, bool]:
        out.fill_(torch.nan)
        return emulator(*values), torch.equal(out, wanted)

    survivors, total = _survivors(emulator, run)
    share, redundant = PEERS[arch]
    assert survivors == _keys(redundant)
    assert 1 - len(survivors) / total >= share
