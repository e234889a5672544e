"""What launches share: facts about a GPU, and the small tensors that every launch is passed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _empty_strided_cpu,  # pyright: ignore[reportAttributeAccessIssue]
    _empty_strided_cuda,  # pyright: ignore[reportAttributeAccessIssue]
)


@lru_cache
def capability(device: str) -> tuple[int, int] | None:
    """The compute capability of a device such as "cuda:1"; None where PyTorch has no GPU."""
    if not torch.cuda.is_available():  # a fake tensor may claim to be on one
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache
def processors(device: torch.device) -> int:
    """The streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def current() -> int:
    """The index of the current device."""
    return torch._C._cuda_getDevice()  # torch.cuda.current_device, which first sees to CUDA's start


def stream(device: torch.device) -> int:
    """The handle of PyTorch's current stream on `device`."""
    # torch.cuda.current_stream makes an object first and takes 20 times as long.
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing() -> bool:
    """Whether the current stream of the current device records a graph instead of running."""
    return torch._C._cuda_isCurrentStreamCapturing()


Allocate = Callable[[], Tensor]


def allocator(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Allocate:
    """Makes contiguous tensors on `where`, when it is the current device; nothing is written yet.

    As torch.empty, which takes twice as long, since it has its arguments to understand.
    """
    empty = _empty_strided_cuda if where.type == "cuda" else _empty_strided_cpu
    strides = torch.empty(*shape, device="meta").stride()
    return partial(empty, tuple(shape), strides, dtype)


_counters: dict[tuple[int | None, int], Tensor] = {}
_no_sinks: dict[tuple[torch.device, int], Tensor] = {}


def tile_counter(device: torch.device) -> Tensor:
    """(2,) int32 zeros for one launch on the current stream of `device`, the current device.

    The kernel counts in them and leaves zeros behind, so launches that follow one another may share
    them and launches that overlap may not. What is on one stream follows one another: each stream
    has its own. They are zeroed on that stream too, so that its launches come after.

    A graph may replay on any stream, beside others. While one is recorded each launch gets zeros of
    its own, out of the graph's memory, and the graph zeroes them whenever it is replayed.
    """
    key = device.index, stream(device)
    # The default stream, whose handle is 0, cannot be captured.
    if key[1] and is_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter


def no_sink(device: torch.device, heads: int) -> Tensor:
    """(heads,) float32 of -inf, which is what a call without a sink has for one."""
    key = device, heads
    sink = _no_sinks.get(key)
    if sink is None:
        sink = torch.full((heads,), -math.inf, dtype=torch.float32, device=device)
        if is_capturing():  # filled when the graph is replayed, so it is of no use elsewhere
            return sink
        # Any stream may read it from now on.
        torch.cuda.current_stream(device).synchronize()
        _no_sinks[key] = sink
    return sink
