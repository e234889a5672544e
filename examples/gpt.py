"""Train a small GPT twice, with tilewright's attention and with PyTorch's, and compare the losses.

    python examples/gpt.py --steps 300 --out DIR

Both start from the same weights and see the same batches, in turns: a step of one, the same step of
the other. The text is the standard library's source code, a token a byte. On a GPU the model has
10.7 million parameters and 1024 bytes of context under bfloat16 autocast; on a CPU it is smaller
and in float32. DIR gets losses.jsonl and, where there is matplotlib, losses.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewright

OURS, THEIRS = "tilewright", "sdpa"
VOCABULARY = 256
# On (batch, seqlen, heads, dim), causal.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    context: int
    batch: int
    head_dim: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SIZES = {"cuda": Size(6, 6, 1024, 32), "cpu": Size(3, 2, 256, 8)}


def ours(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return tilewright.attention(q, k, v, causal=True, backend=backend)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864), in float32; angles (seqlen, 1, dim / 2)."""
    a, b = x.to(angles.dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        width = size.width
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.size.heads, self.size.head_dim))
        q, k, v = qkv.unbind(dim=2)
        attended = self.attend(rotated(q, angles), rotated(k, angles), v)
        x = x + self.projection(attended.flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """(batch, seqlen) bytes to (batch, seqlen, 256) logits, whose weights are the embedding's."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size, attend) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        half = size.head_dim // 2
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(size.context)[:, None, None] * frequencies
        self.register_buffer("angles", angles, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "down.weight")):  # GPT-2's: each adds to x
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return F.linear(self.norm(x), self.embedding.weight)


def text() -> Tensor:
    """uint8: the standard library's sources but for its tests, one after the other, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    paths = sorted(path.as_posix() for path in found if others.isdisjoint(path.parts))
    if not paths:
        raise FileNotFoundError(f"no *.py in {root}, where this Python's library should be")
    joined = bytearray(b"".join((root / path).read_bytes() for path in paths))
    return torch.frombuffer(joined, dtype=torch.uint8)


def batches(data: Tensor, size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, (batch, context), from random places: the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - size.context, (size.batch, 1), generator=generator)
        rows = data[starts + torch.arange(size.context + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


class Trainer:
    """A model, its optimizer and one step of both."""

    def __init__(self, size: Size, attend: Attend, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = GPT(size, attend).to(device, dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
        )
        self.device = device

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> tuple[float, float]:
        """The loss before the step, in nats a byte, and the milliseconds that the step took."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self._wait()
        start = time.perf_counter()
        on_gpu = self.device == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._wait()
        return loss.item(), (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, then half a cosine down to a tenth of the peak."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Step:
    """What one step did with each attention: a line of losses.jsonl."""

    step: int
    loss: dict[str, float]  # nats a byte, before the step
    ms: dict[str, float]


def train(
    attentions: dict[str, Attend],
    steps: int,
    size: Size,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    peak: float = 1e-3,
) -> Iterator[Step]:
    """Each attention's model, step by step in turns; who goes first changes too."""
    trainers = {name: Trainer(size, attend, device, dtype) for name, attend in attentions.items()}
    for step, (inputs, targets) in zip(range(steps), batches(text(), size), strict=False):
        names = list(trainers) if step % 2 else list(reversed(trainers))
        found = {n: trainers[n].step(inputs, targets, rate(step, steps, peak)) for n in names}
        losses, ms = ({n: found[n][i] for n in trainers} for i in range(2))
        yield Step(step, losses, ms)


def facts(size: Size, device: str, backend: str | None) -> dict[str, Any]:
    """The first line of losses.jsonl."""
    with torch.device("meta"):
        parameters = sum(x.numel() for x in GPT(size, ours).parameters())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = size.batch, size.context, size.heads, size.head_dim
    q, k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(3))
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "backend": tilewright.explain(q, k, v, causal=True, backend=backend).backend,
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(size),
    }


def summary(told: dict[str, Any], steps: list[Step]) -> str:
    """Step times without each run's first steps, in which kernels are compiled and tuned."""
    last = steps[-max(1, len(steps) // 20) :]
    counted = steps[min(5, len(steps) // 2) :]
    lines = [
        f"{told['parameters'] / 1e6:.1f} M parameters, {told['batch']} x {told['context']} bytes a "
        f"step, {told['dtype']}, {told['machine']}; tilewright takes {told['backend']}"
    ]
    for name in steps[0].loss:
        ms = statistics.median(step.ms[name] for step in counted)
        loss = statistics.fmean(step.loss[name] for step in last)
        first = steps[0].loss[name]
        lines.append(f"{name:10}  {ms:8.2f} ms a step   loss {first:.4f} -> {loss:.4f}")
    apart = max((abs(step.loss[OURS] - step.loss[THEIRS]), step.step) for step in steps)
    lines.append(f"the losses of a step differ by {apart[0]:.2e} at the most, in step {apart[1]}")
    return "\n".join(lines)


def read(path: Path) -> tuple[dict[str, Any], list[Step]]:
    told, *lines = path.read_text(encoding="utf-8").splitlines()
    return json.loads(told), [Step(**json.loads(line)) for line in lines]


def plot(told: dict[str, Any], steps: list[Step], path: Path) -> None:
    """The two losses on each other, and below them their difference. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    red, blue, ink = "#d1495b", "#30638e", "#222222"
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    x = [step.step for step in steps]
    y = {name: [step.loss[name] for step in steps] for name in (OURS, THEIRS)}
    top.plot(x, y[THEIRS], color=blue, alpha=0.35, linewidth=5, label="PyTorch's SDPA")
    top.plot(x, y[OURS], color=red, linewidth=1.3, label="tilewright")
    top.legend(frameon=False, loc="upper right")
    top.set_ylabel("loss, nats a byte")
    differences = [a - b for a, b in zip(y[OURS], y[THEIRS], strict=True)]
    below.axhline(0, color="#bbbbbb", linewidth=0.8)
    below.plot(x, differences, color=ink, linewidth=0.9)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_ylabel("difference")
    below.set_xlabel("step")
    for axis in (top, below):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
        axis.tick_params(length=0, colors=ink)
        axis.margins(x=0.01)
    figure.suptitle(
        f"A GPT of {told['parameters'] / 1e6:.1f} M parameters, trained with two attentions",
        x=0.01, ha="left", fontsize=14,
    )  # fmt: skip
    top.set_title(
        f"{told['machine']}, {told['dtype']}, {told['layers']} layers, {told['heads']} heads of "
        f"{told['head_dim']}, {told['batch']} x {told['context']} bytes a step",
        loc="left", fontsize=10, color="#666666",
    )  # fmt: skip
    figure.savefig(path, dpi=140)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Train a small GPT with tilewright's attention and with PyTorch's."
    )
    add = made.add_argument
    add("--steps", type=int, default=300)
    add("--out", type=Path, default=Path("build/gpt"), help="for losses.jsonl and losses.png")
    add("--device", choices=tuple(SIZES), help="the GPU by default, if there is one")
    add("--backend", help="of tilewright's, as tilewright.explain lists them; the best by default")
    add("--batch", type=int, help="sequences a step")
    add("--rate", type=float, default=1e-3, help="the largest learning rate")
    add("--plot-only", action="store_true", help="draw losses.png from losses.jsonl")
    return made


def main(arguments: list[str] | None = None) -> None:
    asked = parser()
    options = asked.parse_args(arguments)
    results = options.out / "losses.jsonl"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if options.plot_only:
        if not results.exists():
            asked.error(f"--plot-only: there is no {results}; train first")
        if not has_matplotlib:
            asked.error("--plot-only: there is no matplotlib; pip install matplotlib")
    else:
        if options.steps < 1:
            asked.error(f"--steps is {options.steps}; want 1 or more")
        if options.batch is not None and options.batch < 1:
            asked.error(f"--batch is {options.batch}; want 1 or more")
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            asked.error("--device cuda: PyTorch sees no CUDA device")
        size = (
            SIZES[device] if options.batch is None else replace(SIZES[device], batch=options.batch)
        )
        run(size, device, options)
    told, steps = read(results)
    print(summary(told, steps))
    if not has_matplotlib:
        print(f"no matplotlib: elsewhere, --plot-only --out {options.out} draws losses.png later")
        return
    plot(told, steps, options.out / "losses.png")
    print(f"{options.out / 'losses.png'} shows both")


def run(size: Size, device: str, options: argparse.Namespace) -> None:
    """Each line at once, so that a run that is cut short keeps what it has."""
    attentions = {OURS: partial(ours, backend=options.backend), THEIRS: theirs}
    told = facts(size, device, options.backend)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "losses.jsonl").open("w", encoding="utf-8") as file:
        print(json.dumps(told), file=file, flush=True)
        for step in train(attentions, options.steps, size, device, peak=options.rate):
            print(json.dumps(asdict(step)), file=file, flush=True)
            if step.step % 20 == 0:
                losses = ", ".join(f"{name} {loss:.4f}" for name, loss in step.loss.items())
                print(f"step {step.step}: {losses}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
