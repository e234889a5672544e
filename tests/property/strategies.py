"""What hypothesis draws: sizes, options, and views of memory."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.problems import Batch, random_batch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

bounds = st.one_of(st.none(), st.just(-1), st.integers(0, 40))


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of the public functions, any of which may be left out."""
    optional = {
        "causal": st.booleans(),
        "window": st.one_of(st.none(), st.tuples(bounds, bounds)),
        "scale": st.one_of(st.none(), st.sampled_from([0.0, -0.5, 1.0]), st.floats(-2.0, 2.0)),
        "softcap": st.one_of(st.none(), st.floats(0.1, 50.0)),
    }
    return draw(st.fixed_dictionaries({}, optional=optional))


@st.composite
def batches(
    draw: st.DrawFn, equal: bool = False, equal_rows: bool = False, longest: int = 80
) -> Batch:
    """Sequences of random rows; all of one shape if `equal`, with as many queries if `equal_rows`.

    Mostly short, sometimes beyond a tile's edge.
    """
    count = draw(st.integers(1, 4))
    length = st.one_of(st.integers(0, 6), st.integers(0, longest))
    pairs = draw(st.lists(st.tuples(length, length), min_size=count, max_size=count))
    if equal:
        pairs = pairs[:1] * count
    elif equal_rows:
        pairs = [(pairs[0][0], keys) for _, keys in pairs]
    heads_k, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)]))
    dims = draw(st.tuples(st.integers(1, 24), st.integers(1, 24)))
    return random_batch(
        pairs,
        (heads_k * group, heads_k),
        draw(st.sampled_from([dims, (dims[0], dims[0]), (64, 64)])),
        draw(st.sampled_from(DTYPES)),
        with_sink=draw(st.booleans()),
        with_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def views(draw: st.DrawFn, values: Tensor) -> Tensor:
    """The same values in other memory: permuted, padded with NaN, strided, off by an element."""
    order = draw(st.permutations(range(values.ndim)))
    pads = [draw(st.integers(0, 2)) for _ in order]
    steps = [draw(st.integers(1, 2)) for _ in order]
    shape = [
        (values.shape[d] + pad) * step for d, pad, step in zip(order, pads, steps, strict=True)
    ]
    offset = draw(st.integers(0, 1))
    memory = values.new_full((offset + torch.Size(shape).numel(),), torch.nan)
    view = memory[offset:].view(shape)
    for position, d in enumerate(order):
        pad, step = pads[position], steps[position]
        view = view.narrow(position, pad * step, values.shape[d] * step)
        view = view[(slice(None),) * position + (slice(None, None, step),)]
    view = view.permute([order.index(d) for d in range(values.ndim)])
    return view.copy_(values)
