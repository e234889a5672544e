"""Runs an exported kernel from its files alone: arguments are made from the signature it states.

An exported host function that is called wrongly answers with its signature. Parameters whose names
the emulator knows (those of attention forward kernels) get tensors of the shape asked for; the
others must be given or must be allowed to be None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tilewright.emulator.emulate import Emulator, Progress, Result
from tilewright.emulator.machine import Options

_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a host function: `kind` is tensor, number, none or tuple."""

    name: str
    kind: str
    dtype: str = ""
    rank: int = 0
    length: int = 0


@dataclass(frozen=True)
class Problem:
    """One attention forward: q (B, S, H, D), k and v (B, S_k, H, D)."""

    batch: int
    length: int
    heads: int
    dim: int
    key_length: int
    is_causal: bool = False
    seed: int = 0


@dataclass
class Emulated:
    """What `emulate` found. `errors`: largest difference from float64 of each known output."""

    result: Result
    tensors: dict[str, np.ndarray]
    errors: dict[str, float] = field(default_factory=dict)


def emulate(
    object_path: str | Path,
    arch: str,
    problem: Problem,
    *,
    given: Mapping[str, Any] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Emulated:
    """Run one exported kernel on `problem` and compare its outputs with float64.

    The PTX of the kernel KERNEL.o is expected beside it, as KERNEL.ptx; raises FileNotFoundError
    if either is missing.
    `given` holds values of parameters by name (numpy arrays, numbers). Raises ValueError if a
    parameter has no value: its name, its type and what is known are in the message.
    """
    text = Path(object_path).with_suffix(".ptx")
    for file in (Path(object_path), text):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is no file: wanted KERNEL.o and KERNEL.ptx beside it")
    emulator = Emulator(text.read_text(), object_path, arch, options, progress)
    known = {**_attention_values(problem), **(given or {})}
    tensors: dict[str, np.ndarray] = {}
    arguments = []
    for parameter in parameters(_signature(emulator)):
        value = _value(parameter, known)
        if isinstance(value, np.ndarray):
            tensors[parameter.name] = value
        arguments.append(value)
    result = emulator(*arguments)
    return Emulated(result, tensors, _errors(problem, tensors))


def _signature(emulator: Emulator) -> str:
    """The text between the parentheses of the signature that a call without arguments provokes."""
    try:
        emulator.host.call()
    except ValueError as error:
        match = re.search(r"`\w+\((.*)\)`", str(error), re.S)
        if match:
            return match[1]
        raise
    return ""


def parameters(signature: str) -> list[Parameter]:
    """Parse `name: Tensor([n0, n1], float32), scale: float32, mask: None, ...`."""
    found = []
    for item in re.split(r",\s*(?=\w+\s*:)", signature):
        name, _, kind = (part.strip() for part in item.partition(":"))
        if not name:
            continue
        if tensor := re.match(r"Tensor\(\[(.*?)\],\s*(\w+)", kind, re.S):
            rank = len([d for d in tensor[1].split(",") if d.strip()])
            found.append(Parameter(name, "tensor", tensor[2], rank))
        elif kind.startswith("Tuple"):
            found.append(Parameter(name, "tuple", length=kind.count("None")))
        elif kind.startswith("None"):
            found.append(Parameter(name, "none"))
        else:
            found.append(Parameter(name, "number", kind))
    return found


def _value(parameter: Parameter, known: Mapping[str, Any]) -> Any:
    if parameter.kind == "none":
        return None
    if parameter.kind == "tuple":
        return (None,) * parameter.length
    if parameter.name not in known:
        raise ValueError(
            f"parameter {parameter.name} ({parameter.kind} {parameter.dtype}) has no value; "
            f"known are {', '.join(known)}"
        )
    value = known[parameter.name]
    if parameter.kind == "number":
        return value
    if parameter.rank != value.ndim:
        raise ValueError(f"{parameter.name}: rank {value.ndim}, the kernel wants {parameter.rank}")
    return value.astype(_DTYPES.get(parameter.dtype, parameter.dtype))


def _attention_values(p: Problem) -> dict[str, Any]:
    """Values by the names that attention kernels give their parameters; outputs start as NaN."""
    random = np.random.default_rng(p.seed)
    queries, keys = (p.batch, p.length, p.heads, p.dim), (p.batch, p.key_length, p.heads, p.dim)
    return {
        "mQ": random.standard_normal(queries),
        "mK": random.standard_normal(keys),
        "mV": random.standard_normal(keys),
        "mO": np.full(queries, np.nan),
        "mLSE": np.full((p.batch, p.heads, p.length), np.nan),
        "softmax_scale": p.dim**-0.5,
        "max_seqlen_q": p.length,
    }


def _errors(p: Problem, tensors: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest absolute difference from float64 of mO and mLSE, where the kernel has them."""
    if not {"mQ", "mK", "mV"} <= set(tensors):
        return {}
    # (batch, head, sequence, dim)
    q, k, v = (tensors[n].astype(np.float64).swapaxes(1, 2) for n in ("mQ", "mK", "mV"))
    s = q @ k.swapaxes(2, 3) * p.dim**-0.5
    if p.is_causal:
        row, column = np.arange(p.length)[:, None], np.arange(p.key_length)
        s = np.where(column <= row + p.key_length - p.length, s, -np.inf)
    highest = s.max(-1, keepdims=True)
    lse = np.log(np.exp(s - highest).sum(-1, keepdims=True)) + highest
    exact = {"mO": (np.exp(s - lse) @ v).swapaxes(1, 2), "mLSE": lse[..., 0]}
    return {
        name: float(np.abs(tensors[name].astype(np.float64) - wanted).max())
        for name, wanted in exact.items()
        if name in tensors
    }
