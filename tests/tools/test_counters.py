"""What the table of counters divides by, and which kernels it asks the profiler for."""

from __future__ import annotations

import re

import counters
import pytest
import torch

from tilewright.kernels import catalog
from tilewright.reference.forward import visible


@pytest.mark.parametrize("direction, multiplies", [("forward", (1, 1)), ("backward", (3, 2))])
def test_operations_are_those_of_the_pairs_that_are_seen(
    direction: str, multiplies: tuple[int, int]
) -> None:
    """S, dK and dQ have q's head dim; O, or dP and dV, have v's."""
    seqlen = 2048
    for launch in counters.launches(direction, seqlen):
        mask = counters.MASKS[launch.mask]
        pairs = int(visible(mask, seqlen, seqlen, torch.device("cpu")).sum())
        dims = sum(n * dim for n, dim in zip(multiplies, launch.dims, strict=True))
        heads = counters.HIDDEN // launch.dims[0] * counters.TOKENS // seqlen
        assert launch.flop == 2 * dims * pairs * heads


def test_every_pair_of_head_dims_that_the_forward_has_tiles_for_is_launched() -> None:
    kernels = catalog.kernels("sm_90a")
    forward = {
        (x.spec.head_dim, x.spec.head_dim_v) for x in kernels if x.family == catalog.FA3_FORWARD
    }
    assert set(counters.DIMS) == forward


def test_the_profiler_sees_one_kernel_of_a_pass() -> None:
    kernels = catalog.kernels("sm_90a")
    seen = {
        direction: {x.family for x in kernels if re.search(pattern, str(x))}
        for direction, pattern in counters.KERNELS.items()
    }
    assert seen == {"forward": {catalog.FA3_FORWARD}, "backward": {catalog.FA3_BACKWARD}}
