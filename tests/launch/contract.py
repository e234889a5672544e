"""What the kernels' contracts have in common: what they can read, and how lengths are passed."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.masks import Mask
from tilewright.problem import Scoring

PROCESSORS = 132
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
SCALARS = ("scale", "softcap", "left", "right", "used", "ctas")


def check_rows(spec: Any, given: dict[str, Any], names: tuple[str, ...]) -> None:
    """What goes through TMA, or 16 bytes a lane."""
    rank, dtype = 3 if spec.packed else 4, getattr(torch, spec.dtype)
    for name in names:
        x = given[name]
        assert x.dtype == dtype and x.ndim == rank and 0 not in x.shape, name
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not x.is_neg(), name
        assert all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]), (name, x.shape, x.stride())


def check_lengths(spec: Any, given: dict[str, Any], sides: str) -> None:
    lengths = [given[f"{name}_{side}"] for name in ("cu_seqlens", "seqused") for side in sides]
    if spec.packed:
        assert all(x.dtype == torch.int32 and x.stride() == (1,) for x in lengths)
    else:
        assert not any(x is not None for x in lengths) and given["used"] == 0


def check_counter(given: dict[str, Any]) -> None:
    assert given["counter"].dtype == torch.int32 and given["counter"].tolist() == [0, 0]
    assert given["ctas"] == PROCESSORS


def check_scalars(given: dict[str, Any]) -> None:
    assert type(given["scale"]) is float and type(given["softcap"]) is float
    assert given["scale"] > 0 and given["softcap"] >= 0
    assert 0 <= given["left"] <= 1 << 30 and 0 <= given["right"] <= 1 << 30


def rule_of(spec: Any, given: dict[str, Any]) -> Scoring:
    mask = Mask(
        given["left"] if spec.bounded_left else None,
        given["right"] if spec.bounded_right else None,
    )
    return Scoring(mask, given["scale"], given["softcap"] if spec.has_softcap else None)


def spans(given: dict[str, Any], side: str) -> list[tuple[int, int]]:
    """The first row of each packed sequence and the one past its last."""
    starts = given[f"cu_seqlens_{side}"].tolist()
    bit = {"q": 1, "k": 2}[side]
    if not given["used"] & bit:
        return list(zip(starts, starts[1:], strict=False))
    used = given[f"seqused_{side}"].tolist()
    return [(start, start + length) for start, length in zip(starts, used, strict=False)]
