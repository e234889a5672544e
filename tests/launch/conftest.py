"""The FA-3 backend on the CPU, with stand-ins for its kernels and for the GPU; poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.contract import PROCESSORS
from tests.launch.standin import StandIn, poison, poisoned_empty
from tilewright import jit, lane
from tilewright.launch import device, fa3, fa3_backward
from tilewright.torch_ops import ops


def forget() -> None:
    """All that was decided for a machine."""
    launches = fa3._launch, fa3_backward._launches
    for cache in (*launches, ops._plan, ops.plan_backward, device.capability):
        cache.cache_clear()
    for kept in (lane._prepared, device._counters, device._no_sinks):
        kept.clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The CPU passes for a GPU that FA-3 runs on, and memory is NaN before it is written."""
    standin = StandIn()
    nothing = SimpleNamespace(synchronize=lambda: None)
    with monkeypatch.context() as patch:
        forget()
        patch.setattr(jit, "load", standin.load)
        patch.setattr(jit, "why_unavailable", lambda kernel: None)
        patch.setattr(fa3, "_why_not_there", lambda problem: None)
        patch.setattr(device, "processors", lambda where: PROCESSORS)
        patch.setattr(device, "stream", lambda where: 0)
        patch.setattr(device, "is_capturing", lambda: False)
        patch.setattr(device, "current", lambda: None)
        patch.setattr(torch.cuda, "current_stream", lambda where: nothing)
        patch.setattr(torch, "empty", poisoned_empty)
        allocator = device.allocator
        patch_allocators(patch, lambda *what: lambda: poison(allocator(*what)()))
        yield standin
    forget()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Memory is NaN, or -1, before it is written; lists how many times some was asked for."""
    asked = []

    def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def asking(*args: Any, **kwargs: Any) -> Tensor:
            asked.append(1)
            return poison(empty(*args, **kwargs))

        return asking

    allocator = device.allocator
    forget()  # what was prepared allocates as it did then
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch_allocators(patch, lambda *what: poisoned(allocator(*what)))
        yield asked
    forget()


def patch_allocators(patch: pytest.MonkeyPatch, allocator: Callable[..., Any]) -> None:
    for module in (fa3, fa3_backward):
        patch.setattr(module, "allocator", allocator)
