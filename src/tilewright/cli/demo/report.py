"""The demo's outcome, for a reader or for a script."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.table import Table
from rich.text import Text as Line

from tilewright.cli import terminal
from tilewright.cli.demo import texts
from tilewright.cli.demo.run import LARGEST_DIFFERENCE, Outcome
from tilewright.cli.demo.texts import Text


def show(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        terminal.show_json(to_dict(outcome))
        return
    pairs = [_pairs(outcome)] if outcome.pairs else []
    terminal.show([_input(outcome), *pairs, _result(outcome)])


def to_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "model": outcome.model.name,
        "why_random": outcome.model.why_random,
        "stock": outcome.model.stock_name,
        "device": outcome.device,
        "dtype": outcome.explanation.problem.dtype,
        "texts": len(outcome.lengths),
        "tokens": sum(outcome.lengths),
        "padding": outcome.padding,
        "largest_difference": outcome.difference,
        "limit": LARGEST_DIFFERENCE,
        "agree": outcome.agree,
        "stock_seconds": outcome.stock_seconds,
        "tilewright_seconds": outcome.tilewright_seconds,
        "ratio": outcome.stock_median / outcome.tilewright_median,
        "pairs": [
            {"cosine": pair.cosine, "texts": [vars(pair.first), vars(pair.second)]}
            for pair in outcome.pairs
        ],
        "path": outcome.explanation.to_dict(),
    }


def _input(outcome: Outcome) -> Table:
    lengths = outcome.lengths
    facts = terminal.facts()
    facts.add_row("Model", f"{outcome.model.name}, float32 on {outcome.device}")
    if outcome.model.why_random:
        facts.add_row("", Line(f"random because {outcome.model.why_random}", style="yellow"))
    facts.add_row("Texts", f"{len(lengths)}, from {texts.SOURCE}")
    facts.add_row("Tokens", f"{sum(lengths):,}, from {min(lengths)} to {max(lengths)} a text")
    facts.add_row("Padding", f"{outcome.padding:.0%} of a batch padded to the longest text")
    return facts


def _pairs(outcome: Outcome) -> Table:
    table = Table(title="Most similar texts of different kinds", title_justify="left", box=None)
    table.add_column("Cosine", justify="right", no_wrap=True)
    table.add_column("Text")
    table.add_column("Text")
    for pair in outcome.pairs:
        table.add_row(f"{pair.cosine:.2f}", _excerpt(pair.first), _excerpt(pair.second))
    return table


def _excerpt(text: Text) -> Line:
    """Its label and what two lines hold; two such columns fit an 80-column terminal."""
    body = textwrap.fill(text.body, width=34, max_lines=2, placeholder=" ...")
    return Line.assemble((text.label, "cyan"), "\n", body)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _compare(stock: float, ours: float) -> str:
    if ours <= stock:
        return f"is {stock / ours:.2f} times as fast"
    return f"takes {ours / stock:.2f} times as long"


def _result(outcome: Outcome) -> Table:
    facts = terminal.facts()
    verdict = (
        Line(f"agree: largest difference {outcome.difference:.1e}", style="green")
        if outcome.agree
        else Line(f"DIFFER, by up to {outcome.difference:.1e}", style="bold red")
    )
    verdict.append(f" (limit {LARGEST_DIFFERENCE:.0e})", style="default")
    facts.add_row("Embeddings", verdict)
    stock, ours = outcome.stock_median, outcome.tilewright_median
    runs = len(outcome.stock_seconds)
    facts.add_row("Time", f"{_time(stock)} padded: {outcome.model.stock_name}")
    facts.add_row("", f"{_time(ours)} packed: tilewright.attention_varlen")
    facts.add_row("", f"packed {_compare(stock, ours)} (medians of {runs} alternating runs)")
    explanation = outcome.explanation
    facts.add_row("Path", f"{explanation.backend}: {explanation.summary}")
    for name, reason in explanation.rejected.items():
        facts.add_row("", f"not {name}: {reason}")
    return facts
