"""Real texts that ship with Python, from one line to several paragraphs.

Three kinds that speak about the same things in different words: the aphorisms of the Zen of Python,
docstrings of the standard library, and the language reference as `pydoc` carries it. Most similar
across kinds is then more than the same phrase twice.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import io
import pydoc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

SOURCE = "the Zen of Python, docstrings and the language reference, as Python ships them"

DOCSTRINGS = (
    "asyncio.gather",
    "asyncio.sleep",
    "bool",
    "collections.ChainMap",
    "contextlib.ExitStack",
    "contextlib.suppress",
    "difflib",
    "doctest",
    "eval",
    "slice",
    "struct",
    "types.SimpleNamespace",
    "unittest",
    "warnings.warn",
)

TOPICS = (
    "assert",
    "async",
    "atom-literals",
    "await",
    "context-managers",
    "debugger",
    "exceptions",
    "global",
    "naming",
    "slicings",
    "truth",
    "try",
    "typesmapping",
)


@dataclass(frozen=True)
class Text:
    kind: str
    label: str
    body: str


def load() -> list[Text]:
    """All texts, in a fixed order. The wording is that of the running Python."""
    return [*_zen(), *_docstrings(), *_reference()]


def _zen() -> Iterator[Text]:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself when it is first imported
        encoded = import_module("this").s
    title, *lines = filter(None, codecs.decode(encoded, "rot13").splitlines())
    for line in lines:
        yield Text("zen", title.partition(",")[0], line)


def _docstrings() -> Iterator[Text]:
    for name in DOCSTRINGS:
        docstring = inspect.getdoc(pydoc.locate(name))
        if docstring is None:  # under python -OO
            continue
        first, _, rest = docstring.partition("\n\n")
        is_signature = rest and first.startswith(name.rpartition(".")[2] + "(")
        yield Text("docstring", name, rest if is_signature else docstring)


def _reference() -> Iterator[Text]:
    topics = import_module("pydoc_data.topics").topics
    for name in TOPICS:
        # Titles, grammar and examples are no prose.
        prose = (p for p in topics[name].split("\n\n") if re.match(r'[A-Z*"][^*=]', p))
        paragraph = next((p for p in prose if len(p.split()) >= 8), None)
        if paragraph is not None:
            yield Text("reference", f"Reference: {name}", " ".join(paragraph.split()))
