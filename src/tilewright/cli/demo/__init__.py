"""`tilewright demo`: real text through a real sentence encoder, with and without tilewright."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each path.")] = 5,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:0; by default a GPU if there is one.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random", help="Leave out the real model, take random weights.")
    ] = False,
) -> None:
    """Run a real sentence encoder on real text, with and without tilewright.

    A few dozen texts of very different lengths go through the model twice: padded to one length,
    through the model's own attention; and packed without padding, through
    tilewright.attention_varlen. Both must give the same embeddings: the exit code is 1 if they
    differ by 1e-5 or more.

    Nothing is downloaded. Without the packages of the extra "hf", random weights take the place of
    the real ones.
    """
    # PyTorch and the model's libraries take seconds to load, which --help need not wait for.
    from rich.console import Console

    from tilewright.cli.demo import report, run

    status = Console(stderr=True).status("Starting")
    with status:
        outcome = run.run(run.choose_device(device), repeats, random_weights, status.update)
    report.show(outcome, as_json)
    raise typer.Exit(0 if outcome.agree else 1)
