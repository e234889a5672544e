"""Hold the source tree to its size budgets; exit 1 and list the offenders if it is over.

Sizes of one thing (an exception in tools/budget.toml may raise a limit, with a reason):

    file       lines of a file                                        400, at most  600
    function   lines of a function, signature and docstring included   60, at most  100
    arguments  parameters of a function, self and cls aside             6, at most    8
    nesting    control-flow blocks inside each other                    3

Shares of the whole (no exceptions):

    repeated   code lines inside a run of 8 that stands elsewhere too   under  3 %
    docstring  files with a module docstring                              100 %
    annotated  parameters with an annotation                         at least 95 %

src/, tools/ and examples/ are held to all of them, tests/ to file, function and docstring. An
exception states the size as it is: a larger size has grown, and a smaller one asks for a lower
exception, so that exceptions only shrink.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXCEPTIONS = Path("tools/budget.toml")
CODE_ROOTS = ("src", "tools", "examples")
TEST_ROOTS = ("tests",)
TEST_KINDS = ("file", "function")
RUN_LENGTH = 8
MAX_REPEATED = 0.03
MIN_ANNOTATED = 0.95


@dataclass(frozen=True)
class Limit:
    """`soft` holds for everything; over `hard`, an exception is counted apart."""

    soft: int
    hard: int


LIMITS = {
    "file": Limit(400, 600),
    "function": Limit(60, 100),
    "arguments": Limit(6, 8),
    "nesting": Limit(3, 3),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# ast.TryStar exists from Python 3.11 on.
BLOCKS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Match, ast.Try),
    *([ast.TryStar] if sys.version_info >= (3, 11) else []),
)


@dataclass(frozen=True)
class Subject:
    """What a limit holds for: a whole file (`function` is empty) or one function of it."""

    kind: str
    path: str
    function: str = ""


@dataclass(frozen=True)
class Size:
    subject: Subject
    line: int
    value: int


@dataclass(frozen=True)
class Allowance:
    """One exception of budget.toml."""

    subject: Subject
    value: int
    reason: str


@dataclass(frozen=True)
class Offence:
    where: str
    kind: str
    what: str


@dataclass
class Source:
    """One parsed file; `path` is relative to the root and has forward slashes."""

    path: str
    text: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, self.path)

    @property
    def is_test(self) -> bool:
        return self.path.split("/")[0] in TEST_ROOTS


def read_sources(root: Path) -> list[Source]:
    files = (path for top in (*CODE_ROOTS, *TEST_ROOTS) for path in (root / top).rglob("*.py"))
    return [
        Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(files)
    ]


@dataclass(frozen=True)
class FunctionSite:
    name: str
    node: Function
    is_method: bool

    def parameters(self) -> list[ast.arg]:
        """All parameters but a method's self or cls."""
        args = self.node.args
        positional = [*args.posonlyargs, *args.args]
        decorators = {d.id for d in self.node.decorator_list if isinstance(d, ast.Name)}
        if self.is_method and "staticmethod" not in decorators:
            positional = positional[1:]
        variadic = [arg for arg in (args.vararg, args.kwarg) if arg]
        return [*positional, *args.kwonlyargs, *variadic]

    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1


def functions(node: ast.AST, outer: str = "", is_method: bool = False) -> Iterator[FunctionSite]:
    """Every function below `node`, nested ones too, each after the one around it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield from functions(child, outer, is_method)
            continue
        name = f"{outer}.{child.name}" if outer else child.name
        if isinstance(child, Function):
            yield FunctionSite(name, child, is_method)
        yield from functions(child, name, isinstance(child, ast.ClassDef))


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Depth of the deepest block below `node`; functions and classes inside count on their own."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            continue
        # An elif is an If that is alone in its parent's orelse, and is no deeper than the if.
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        is_deeper = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, nesting(child, depth + is_deeper))
    return deepest


def sizes(source: Source) -> Iterator[Size]:
    """Every size that a limit of `source` holds for."""
    found = [Size(Subject("file", source.path), 1, len(source.text.splitlines()))]
    for site in functions(source.tree):
        for kind, value in (
            ("function", site.lines()),
            ("arguments", len(site.parameters())),
            ("nesting", nesting(site.node)),
        ):
            found.append(Size(Subject(kind, source.path, site.name), site.node.lineno, value))
    return (size for size in found if not source.is_test or size.subject.kind in TEST_KINDS)


def read_allowances(path: Path) -> tuple[list[Allowance], list[Offence]]:
    """The exceptions, and what is wrong with the way they are written."""
    if not path.exists():
        return [], []
    allowances, offences = [], []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("exception", []):
        kind, function = entry.get("kind", ""), entry.get("function", "")
        subject = Subject(kind, entry.get("path", ""), function)
        value, reason = entry.get("value", 0), entry.get("reason", "").strip()
        problem = None
        if unknown := entry.keys() - {"kind", "path", "function", "value", "reason"}:
            problem = f"unknown key {', '.join(sorted(unknown))}"
        elif kind not in LIMITS:
            problem = f"kind {kind!r}, want one of {', '.join(LIMITS)}"
        elif (kind == "file") == bool(function):
            problem = f"kind {kind!r} {'takes no' if function else 'needs a'} function"
        elif not reason:
            problem = "no reason"
        if problem:
            offences.append(Offence(location(subject), kind, f"exception: {problem}"))
        allowances.append(Allowance(subject, value, reason))
    return allowances, offences


def location(subject: Subject, line: int | None = None) -> str:
    where = subject.path if line is None else f"{subject.path}:{line}"
    return f"{where} {subject.function}".rstrip()


def check_sizes(found: Sequence[Size], allowances: Sequence[Allowance]) -> Iterator[Offence]:
    # Overloads and property setters share a name: the largest of them counts.
    largest: dict[Subject, Size] = {}
    for size in sorted(found, key=lambda size: size.value):
        largest[size.subject] = size
    allowed = {allowance.subject: allowance.value for allowance in allowances}
    if len(allowed) < len(allowances):
        yield Offence(EXCEPTIONS.as_posix(), "exception", "lists the same thing twice")

    for subject, size in largest.items():
        limit = LIMITS[subject.kind]
        most = allowed.get(subject, limit.soft)
        if size.value > most:
            basis = "its exception" if subject in allowed else "the limit"
            over_hard = f", and the hard limit is {limit.hard}" if size.value > limit.hard else ""
            what = f"{size.value}, {basis} is {most}{over_hard}"
            yield Offence(location(subject, size.line), subject.kind, what)

    for subject, value in allowed.items():
        size = largest.get(subject)
        if size is None:
            yield Offence(location(subject), subject.kind, "exception for what does not exist")
        elif size.value <= LIMITS[subject.kind].soft:
            what = f"exception of {value} is no longer needed: {size.value}"
            yield Offence(location(subject, size.line), subject.kind, what)
        elif size.value < value:
            what = f"lower its exception from {value} to {size.value}"
            yield Offence(location(subject, size.line), subject.kind, what)


def code_lines(source: Source) -> list[tuple[int, str]]:
    """Line numbers and stripped text of all lines but blanks, comments and docstrings."""
    prose: set[int] = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                prose.update(range(first, last + 1))
    return [
        (number, text)
        for number, line in enumerate(source.text.splitlines(), start=1)
        if number not in prose and (text := line.strip()) and not text.startswith("#")
    ]


@dataclass(frozen=True)
class Repetition:
    share: float
    runs: list[Offence]


def repetition(sources: Sequence[Source]) -> Repetition:
    """How much of the code stands in a run of RUN_LENGTH lines that occurs elsewhere too."""
    code = [code_lines(source) for source in sources]
    windows: defaultdict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for file, lines in enumerate(code):
        for start in range(len(lines) - RUN_LENGTH + 1):
            window = tuple(text for _, text in lines[start : start + RUN_LENGTH])
            windows[window].append((file, start))

    repeated: set[tuple[int, int]] = set()
    twins: dict[tuple[int, int], tuple[int, int]] = {}
    for sites in windows.values():
        first, last = sites[0], sites[-1]
        # Windows that overlap are one run of equal lines, not two places.
        if first[0] == last[0] and last[1] - first[1] < RUN_LENGTH:
            continue
        for file, start in sites:
            repeated.update((file, start + offset) for offset in range(RUN_LENGTH))
            twins[file, start] = last if (file, start) == first else first

    runs = []
    for (file, start), (other, other_start) in sorted(twins.items()):
        if (file, start - 1) in twins:
            continue
        where = f"{sources[file].path}:{code[file][start][0]}"
        twin = f"{sources[other].path}:{code[other][other_start][0]}"
        runs.append(Offence(where, "repeated", f"run of {RUN_LENGTH} or more as at {twin}"))
    total = sum(len(lines) for lines in code)
    return Repetition(len(repeated) / total if total else 0.0, runs)


@dataclass(frozen=True)
class Annotations:
    share: float
    missing: list[Offence]


def annotated(sources: Sequence[Source]) -> Annotations:
    parameters = [
        (f"{source.path}:{arg.lineno} {site.name}", arg)
        for source in sources
        for site in functions(source.tree)
        for arg in site.parameters()
    ]
    missing = [
        Offence(where, "annotated", f"{arg.arg} has no annotation")
        for where, arg in parameters
        if arg.annotation is None
    ]
    return Annotations(1 - len(missing) / max(1, len(parameters)), missing)


def check(root: Path) -> tuple[list[Offence], str]:
    """All offences below `root`, and one line that sums up the tree."""
    sources = read_sources(root)
    code = [source for source in sources if not source.is_test]
    allowances, offences = read_allowances(root / EXCEPTIONS)
    offences += check_sizes([size for source in sources for size in sizes(source)], allowances)
    for source in sources:
        if not ast.get_docstring(source.tree):
            offences.append(Offence(f"{source.path}:1", "docstring", "no module docstring"))

    repeats, typed = repetition(code), annotated(code)
    if repeats.share >= MAX_REPEATED:
        offences += repeats.runs
    if typed.share < MIN_ANNOTATED:
        offences += typed.missing
    over_hard = sum(
        entry.value > LIMITS[entry.subject.kind].hard
        for entry in allowances
        if entry.subject.kind in LIMITS
    )
    summary = (
        f"{len(sources)} files, {repeats.share:.1%} repeated, {typed.share:.1%} annotated, "
        f"{len(allowances)} exceptions of which {over_hard} over a hard limit"
    )
    return offences, summary


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_root = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=default_root, help="the repository")
    offences, summary = check(parser.parse_args(argv).root)
    width = max((len(offence.where) for offence in offences), default=0)
    for offence in sorted(offences, key=lambda offence: (offence.kind, offence.where)):
        print(f"{offence.kind:<9}  {offence.where:<{width}}  {offence.what}")
    print(f"budget: {f'{len(offences)} over' if offences else 'kept'}; {summary}")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
