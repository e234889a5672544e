"""Runs the probes on a Hopper GPU and records their outputs as reference data.

    python -m tests.emulator.h200 export FOLDER        where the DSL is; no GPU
    python -m tests.emulator.h200 run FOLDER OUT.npz   where the GPU is; no DSL, PyTorch for memory

The outputs become tests/emulator/h200.npz, which test_probes.py compares.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  so that numpy knows the names of its types
import numpy as np

from tilewright.emulator.host import Packer, call_packed, device_tensor, entry_name

LIBRARIES = ("libcute_dsl_runtime.so", "libtvm_ffi.so")


def export(folder: Path) -> None:
    """Objects, inputs and libraries of every probe that Hopper can run, compiled for sm_90a."""
    import nvidia_cutlass_dsl
    import tvm_ffi

    from tests.emulator import dsl
    from tests.emulator.cases import CASES

    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for case in CASES:
        if not {"sm_80", "sm_90a"} & set(case.archs):
            continue
        dsl.use_arch("sm_90a")
        function, traced = case.build()
        _, exported = dsl.compile_for("sm_90a", function, *traced)
        shutil.copy(exported, folder / f"{len(index)}.o")
        tensors = case.tensors()
        described = []
        for number, tensor in enumerate(tensors):
            name = f"{len(index)}.{number}.bin"
            row_major = tensor if tensor.flags.c_contiguous else tensor.T
            (folder / name).write_bytes(row_major.tobytes())
            described.append([name, str(tensor.dtype), row_major.shape, row_major is not tensor])
        index.append({"name": case.name, "tensors": described, "outputs": case.outputs})
    (folder / "index.json").write_text(json.dumps(index))
    roots = [Path(next(iter(m.__path__))) for m in (nvidia_cutlass_dsl, tvm_ffi)]
    for library in LIBRARIES:
        found = [p for root in roots for p in root.rglob(library) if "stubs" not in p.parts]
        shutil.copy(next(p for p in found if "cu12" not in p.parts), folder / library)


def run(folder: Path, out: Path) -> None:
    """Every probe once; the outputs by name of the probe and number of the tensor."""
    import torch

    results: dict[str, np.ndarray] = {"machine": np.array(torch.cuda.get_device_name())}
    for number, entry in enumerate(json.loads((folder / "index.json").read_text())):
        library = folder / f"{number}.so"
        needed = [str(folder / name) for name in LIBRARIES]
        command = ["gcc", "-shared", "-o", str(library), str(folder / f"{number}.o"), *needed]
        subprocess.run([*command, f"-Wl,-rpath,{folder.resolve()}"], check=True)
        function = ctypes.CDLL(str(library.resolve()))[entry_name(folder / f"{number}.o")]
        packer, values, buffers = Packer(), [], []
        for name, dtype, shape, is_transposed in entry["tensors"]:
            host = np.fromfile(folder / name, np.dtype(dtype)).reshape(shape)
            buffer = torch.from_numpy(host.reshape(-1).view(np.uint8).copy()).cuda()
            view = host.T if is_transposed else host
            values.append(packer.add(device_tensor(view, name, buffer.data_ptr())))
            buffers.append((buffer, host))
        if call_packed(function, values):
            raise RuntimeError(f"{entry['name']}: the host function failed")
        torch.cuda.synchronize()
        for i, (buffer, host) in list(enumerate(buffers))[-entry["outputs"] :]:
            raw = buffer.cpu().numpy()
            results[f"{entry['name']}.{i}"] = raw.view(f"u{host.itemsize}").reshape(host.shape)
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]))
