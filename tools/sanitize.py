"""Call each compiled kernel on small shapes: what NVIDIA's compute-sanitizer is to look at.

    compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python tools/sanitize.py --select "dense d64"

Tools are memcheck, racecheck, synccheck and initcheck. Each kernel gets two calls: tiles that are
full, and tiles whose last row, key and head dim are cut. Needs a GPU that FA-3 runs on, and wants
TILEWRIGHT_BUNDLE: what a bundle has not is compiled first, under the sanitizer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewright
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.launch import fa3

HEADS = (4, 2)  # of q, and of k and v
BATCH = 2  # of dense calls
SPARE = 3  # rows of packed operands that belong to no sequence
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """`lengths` are (rows, keys) of each packed sequence, or of all of a dense batch."""

    kernel: Kernel
    name: str
    dims: tuple[int, int]  # of q and k, and of v
    lengths: tuple[tuple[int, int], ...]
    has_sink: bool

    def inputs(self, device: str) -> Inputs:
        """Random q, k and v."""
        spec = self.kernel.spec
        rows, keys = (sum(side) for side in zip(*self.lengths, strict=True))
        q_shape, k_shape = ((n + SPARE,) if spec.packed else (BATCH, n) for n in (rows, keys))

        def normal(shape: tuple[int, ...], heads: int, dim: int) -> Tensor:
            return torch.randn(*shape, heads, dim, device=device, dtype=getattr(torch, spec.dtype))

        q, k = normal(q_shape, HEADS[0], self.dims[0]), normal(k_shape, HEADS[1], self.dims[0])
        return q, k, normal(k_shape, HEADS[1], self.dims[1])

    def arguments(self, device: str) -> dict[str, Any]:
        """What the public function takes besides q, k and v."""
        spec = self.kernel.spec
        said: dict[str, Any] = {"causal": spec.bounded_right}
        if spec.bounded_left:
            said["window"] = (spec.tile_kv // 2, None)
        if spec.has_softcap:
            said["softcap"] = 20.0
        if self.has_sink:
            said["sink"] = torch.randn(HEADS[0], device=device)
        if spec.packed:
            for side, lengths in zip("qk", zip(*self.lengths, strict=True), strict=True):
                bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
                said |= {f"cu_seqlens_{side}": bounds, f"max_seqlen_{side}": max(lengths)}
        return said

    @property
    def function(self) -> Callable[..., Any]:
        is_packed = self.kernel.spec.packed
        return tilewright.attention_varlen if is_packed else tilewright.attention


def calls(kernel: Kernel) -> Iterator[Call]:
    spec = kernel.spec
    # A kernel for long sequences is asked for by their length alone.
    is_short = catalog.tiled(spec.features, 1) == spec
    tiles = 1 if is_short else catalog.SHORT // spec.tile_q + 1
    rows, keys = tiles * spec.tile_q, 2 * spec.tile_kv
    dims = spec.head_dim, spec.head_dim_v
    cut = dims[0] - fa3.MULTIPLE, dims[1] - fa3.MULTIPLE
    mask = ("full", "causal", "window")[spec.bounded_left + spec.bounded_right]
    words = ["varlen" if spec.packed else "dense", spec.dtype, f"d{dims[0]}"]
    words += [f"v{dims[1]}"] * (dims[0] != dims[1]) + [mask]
    words += ["softcap"] * spec.has_softcap + ["long"] * (not is_short)
    empty = ((0, 3), (5, 0), (1, 1)) if spec.packed else ()
    name = " ".join(words)
    yield Call(kernel, f"{name} whole", dims, ((rows, keys), *empty), has_sink=False)
    yield Call(kernel, f"{name} cut", cut, ((rows + 1, keys - 1), *empty), has_sink=True)


def selected(words: Sequence[str]) -> list[Call]:
    """The calls whose names have all of the words."""
    kernels = [k for k in catalog.kernels(fa3.ARCH) if k.family == catalog.FA3_FORWARD]
    every = (call for kernel in kernels for call in calls(kernel))
    return [call for call in every if set(words) <= set(call.name.split())]


def run(call: Call, device: str, backward: bool) -> None:
    """The forward; with `backward` also the gradients, as they come and deterministic."""
    inputs = call.inputs(device)
    attend = partial(call.function, **call.arguments(device), backend="fa3")
    if not backward:
        attend(*inputs)
        return
    leaves = [x.requires_grad_() for x in inputs]
    for deterministic in (False, True):
        out = attend(*leaves, deterministic=deterministic)
        torch.autograd.grad(out, leaves, torch.randn_like(out))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--select", default="", help='words of names, as "varlen bfloat16 d128 causal"')
    add("--backward", action="store_true", help="gradients too, by whatever follows the forward")
    add("--list", action="store_true", help="show the names, and call nothing")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parser()
    options = asked.parse_args(arguments)
    chosen = selected(options.select.split())
    if not chosen:
        asked.error(f"--select {options.select!r} leaves nothing; --list shows the names")
    if options.list:
        print("\n".join(call.name for call in chosen))
        return
    if not torch.cuda.is_available():
        asked.error("PyTorch sees no CUDA device")
    # Before the first allocation: else tensors are cut from large blocks, and what is read or
    # written past the end of one lies in another.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for number, call in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {call.name}", flush=True)
        run(call, "cuda", options.backward)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
