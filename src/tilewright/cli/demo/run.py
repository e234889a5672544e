"""The demo's work: both paths on the same texts, compared and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import typer
from torch import Tensor

import tilewright
from tilewright.cli.demo import model as models
from tilewright.cli.demo import texts
from tilewright.cli.demo.encoder import Packed, Padded
from tilewright.cli.demo.model import Model
from tilewright.cli.demo.texts import Text
from tilewright.dispatch import Explanation

LARGEST_DIFFERENCE = 1e-5
PAIRS = 8


@dataclass(frozen=True)
class Pair:
    cosine: float
    first: Text
    second: Text


@dataclass(frozen=True)
class Outcome:
    model: Model
    device: str
    lengths: list[int]  # tokens of each text
    pairs: list[Pair]  # most similar first; none for a random model, whose similarity means nothing
    difference: float  # largest, of any component of any embedding
    stock_seconds: list[float]
    tilewright_seconds: list[float]
    explanation: Explanation

    @property
    def agree(self) -> bool:
        return self.difference < LARGEST_DIFFERENCE  # false for NaN

    @property
    def padding(self) -> float:
        """Share of a padded batch that is padding."""
        return 1 - sum(self.lengths) / (len(self.lengths) * max(self.lengths))

    @property
    def stock_median(self) -> float:
        return statistics.median(self.stock_seconds)

    @property
    def tilewright_median(self) -> float:
        return statistics.median(self.tilewright_seconds)


def choose_device(name: str | None) -> torch.device:
    """The named device, else a CUDA GPU, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # the device "meta" has no values
        return probe.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(f"{name!r} is no device here: {reason}") from None


def run(
    device: torch.device, repeats: int, is_random: bool, progress: Callable[[str], None]
) -> Outcome:
    progress("Loading the model")
    model = _load_model(device, is_random)
    bodies = texts.load()
    tokens = [model.tokenize(text.body) for text in bodies]
    padded, packed = Padded.of(tokens, device), Packed.of(tokens, device)

    def stock() -> Tensor:
        return padded.pool(model.stock(padded))

    def ours() -> Tensor:
        return packed.pool(packed.encode(model.encoder))

    with torch.inference_mode():
        progress("Warming up")
        expected, got = stock(), ours()
        seconds = ([], [])
        for repeat in range(repeats):
            progress(f"Timing, run {repeat + 1} of {repeats}")
            for path, times in zip((stock, ours), seconds, strict=True):
                times.append(_seconds(path, device))
    return Outcome(
        model=model,
        device=_describe(device),
        lengths=[len(text) for text in tokens],
        pairs=[] if model.why_random else most_similar(bodies, got),
        difference=(expected - got).abs().max().item(),
        stock_seconds=seconds[0],
        tilewright_seconds=seconds[1],
        explanation=_explain(packed, model),
    )


def most_similar(bodies: list[Text], embeddings: Tensor) -> list[Pair]:
    """The pairs of texts of different kinds with the highest cosine, each text at most once."""
    cosines = (embeddings @ embeddings.T).tolist()
    candidates = (
        (cosines[i][j], i, j)
        for i in range(len(bodies))
        for j in range(i + 1, len(bodies))
        if bodies[i].kind != bodies[j].kind
    )
    pairs, used = [], set()
    for cosine, i, j in sorted(candidates, reverse=True):
        if len(pairs) < PAIRS and not used & {i, j}:
            pairs.append(Pair(cosine, bodies[i], bodies[j]))
            used |= {i, j}
    return pairs


def _load_model(device: torch.device, is_random: bool) -> Model:
    if is_random:
        return models.load_random(device, "asked for with --random")
    if missing := models.missing():
        return models.load_random(device, f"not installed: {', '.join(missing)}")
    return models.load_real(device)


def _seconds(path: Callable[[], Tensor], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    path()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    )


def _explain(packed: Packed, model: Model) -> Explanation:
    """Why the calls of this run went where they did."""
    hidden = model.encoder.weights["embeddings.LayerNorm.weight"]
    heads = model.encoder.heads
    q = hidden.new_empty(len(packed.ids), heads, len(hidden) // heads)
    ends, longest = packed.cu_seqlens, packed.longest
    return tilewright.explain(q, q, q, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest)
