"""Runs the probes on a real GPU and keeps what it computed.

    python -m tests.emulator.hardware build FOLDER          # where the DSL is; needs no GPU
    python -m tests.emulator.hardware run FOLDER FILE.npz   # where the GPU is; needs no DSL

`build` compiles each probe of sm_80 and sm_90a for sm_90a, the GPU at hand, and writes it as a
library beside its inputs. `run` needs PyTorch and apache-tvm-ffi, and libcute_dsl_runtime.so on
LD_LIBRARY_PATH. `probes/h200.npz` was made so; `test_hardware.py` holds the emulator to its bits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ARCH = "sm_90a"
INDEX = "index.json"


def build(folder: Path) -> None:
    from tests.emulator import dsl
    from tests.emulator.cases import CASES

    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for number, case in enumerate(c for c in CASES if {"sm_80", ARCH} & set(c.archs)):
        dsl.use_arch(ARCH)
        function, traced = case.build()
        _, object_path = dsl.compile_for(ARCH, function, *traced)
        library = folder / f"{number}.so"
        subprocess.run(["gcc", "-shared", "-o", library, object_path, *_runtime()], check=True)
        shutil.rmtree(object_path.parent)
        tensors = case.tensors()
        dtypes = [str(x.dtype) for x in tensors]
        np.savez(folder / f"{number}.npz", *[_bytes(x) for x in tensors])
        is_transposed = [x.ndim > 1 and not x.flags.c_contiguous for x in tensors]
        entry = {"name": case.name, "dtypes": dtypes, "transposed": is_transposed}
        index.append(entry | {"outputs": case.outputs})
        print(case.name, flush=True)
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def run(folder: Path, file: Path) -> None:
    import torch
    import tvm_ffi

    results: dict[str, Any] = {"machine": np.array(_machine())}
    for number, case in enumerate(json.loads((folder / INDEX).read_text(encoding="utf-8"))):
        stored = np.load(folder / f"{number}.npz")
        tensors = [
            _on_gpu(stored[key], dtype, is_transposed)
            for key, dtype, is_transposed in zip(
                stored.files, case["dtypes"], case["transposed"], strict=True
            )
        ]
        tvm_ffi.load_module(str(folder / f"{number}.so")).entry(*tensors)
        torch.cuda.synchronize()
        for output, tensor in enumerate(tensors[-case["outputs"] :]):
            results[f"{case['name']}, output {output}"] = _bytes_of_torch(tensor)
        print(case["name"], flush=True)
    np.savez_compressed(file, **results)


def _runtime() -> list[str]:
    """What the library is linked with; the GPU machine finds the same files by name."""
    import cutlass
    import tvm_ffi

    dsl = next(Path(cutlass.__file__).parents[2].glob("cu13/lib/libcute_dsl_runtime.so"))
    ffi = Path(tvm_ffi.__file__).parent / "lib"
    return [str(dsl), f"-L{ffi}", "-ltvm_ffi"]


def _bytes(x: np.ndarray) -> np.ndarray:
    """The elements' bits in storage order as (..., bytes), of dtypes that npz does not know."""
    stored = x if x.flags.c_contiguous else x.T
    return np.ascontiguousarray(stored)[..., None].view(np.uint8)


def _on_gpu(stored: np.ndarray, dtype: str, is_transposed: bool) -> Any:
    import torch

    tensor = torch.from_numpy(stored).cuda().view(getattr(torch, dtype))[..., 0]
    return tensor.T if is_transposed else tensor


def _bytes_of_torch(tensor: Any) -> np.ndarray:
    import torch

    return tensor.contiguous()[..., None].view(torch.uint8).cpu().numpy()


def _machine() -> str:
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return f"{torch.cuda.get_device_name()}, driver {driver.stdout.split()[0]}"


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    {"build": build, "run": run}[verb](*map(Path, paths))
