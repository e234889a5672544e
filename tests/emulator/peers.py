"""flash-attn-4 with its kernels on the emulator: its own Python code, tensors in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.emulator import dsl
from tilewright.emulator import Emulator, Options, Result


class HostTensor(torch.Tensor):
    """A CPU tensor that says it is on the GPU, which flash-attn asks before a launch."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@dataclass
class Peer:
    """flash_attn.cute.interface for one architecture, and what its kernels did."""

    interface: Any
    emulators: list[Emulator] = field(default_factory=list)
    files: list[tuple[str, Path]] = field(default_factory=list)  # PTX text, exported object
    calls: list[tuple[Emulator, tuple[Any, ...]]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def reports(self) -> list[str]:
        return [report for result in self.results for report in result.reports]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        bounds: torch.Tensor | None = None,
    ) -> Any:
        """(out, lse); q (B, Sq, H, D), k and v (B, Sk, H, D), or packed with int32 `bounds`."""
        q, k, v = (t.as_subclass(HostTensor) for t in (q, k, v))
        packed: dict[str, Any] = {}
        if bounds is not None:
            longest = int(bounds.diff().max())
            packed = {"max_seqlen_q": longest, "max_seqlen_k": longest}
            packed["cu_seqlens_q"] = packed["cu_seqlens_k"] = bounds.as_subclass(HostTensor)
        return self.interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **packed)[:2]

    def backward(self, *tensors: torch.Tensor, causal: bool) -> Any:
        """(dq, dk, dv) from q, k, v, out, dout, lse."""
        tensors = tuple(t.as_subclass(HostTensor) for t in tensors)
        return self.interface._flash_attn_bwd(*tensors, causal=causal)[:3]


class _Hardware:
    """HardwareInfo without a GPU."""

    def __init__(self, *_: Any) -> None: ...

    def get_max_active_clusters(self, *_: Any, **__: Any) -> int:
        return 4

    def get_device_multiprocessor_count(self) -> int:
        return 132


@contextmanager
def flash_attention(
    arch: str, options: Options | None = None, steals_work: bool = False
) -> Iterator[Peer]:
    """flash-attn-4 compiled for `arch`, run on the emulator.

    `steals_work`: its sm_100a forward takes further tiles by clusterlaunchcontrol.
    """
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = "132"
    dsl.use_arch(arch)
    import cutlass
    import flash_attn.cute.cute_dsl_utils as utils
    import flash_attn.cute.interface as interface
    import flash_attn.cute.utils as switches

    for cached in (interface._get_device_arch,):
        cached.cache_clear()
    for function in (
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        interface._bwd_preprocess,
        interface._bwd_postprocess_convert,
    ):
        function.compile_cache.cache.clear()
    peer = Peer(interface)
    real_compile, real_from_dlpack = interface.cute.compile, utils.from_dlpack
    with (
        mock.patch.object(interface.cute, "compile", _compiler(peer, arch, options, real_compile)),
        mock.patch.object(utils, "from_dlpack", _as_device(real_from_dlpack)),
        mock.patch.object(cutlass.utils, "HardwareInfo", _Hardware),
        mock.patch.object(switches, "_fa_clc_enabled", steals_work),
    ):
        yield peer


def _compiler(peer: Peer, arch: str, options: Options | None, real: Any) -> Callable[..., Any]:
    def compile_(function: Any, *arguments: Any, **keywords: Any) -> Callable[..., None]:
        ptx, path = dsl.compile_for(arch, function, *arguments, compiler=real, **keywords)
        emulator = Emulator(ptx, path, arch, options)
        peer.emulators.append(emulator)
        peer.files.append((ptx, path))

        def call(*values: Any) -> None:
            peer.calls.append((emulator, values))
            peer.results.append(emulator(*values))

        return call

    return compile_


def _as_device(real: Any) -> Callable[..., Any]:
    """from_dlpack that sees a GPU tensor of the same shape: only its metadata is used."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def convert(tensor: torch.Tensor, **keywords: Any) -> Any:
        with FakeTensorMode():
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="cuda"
            )
        return real(fake, **keywords)

    return convert
