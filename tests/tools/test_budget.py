"""Each budget fails a tree that is just over it, and passes one that just keeps it."""

from __future__ import annotations

from pathlib import Path

import budget
import pytest

DOCSTRING = '"""A module."""\n'


class Tree:
    """A small repository below `root`."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.capsys = capsys

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def allow(self, **entry: str | int) -> None:
        lines = ["[[exception]]", *(f"{key} = {value!r}" for key, value in entry.items())]
        self.write("tools/budget.toml", "\n".join(lines))

    def offences(self) -> list[str]:
        """The lines that the tool prints but for its last, squeezed; the exit code must agree."""
        code = budget.main(["--root", str(self.root)])
        *lines, summary = self.capsys.readouterr().out.splitlines()
        assert code == (1 if lines else 0)
        assert summary.startswith("budget: ")
        return [" ".join(line.split()) for line in lines]


@pytest.fixture
def tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tree:
    return Tree(tmp_path, capsys)


def module(lines: int) -> str:
    return DOCSTRING + "".join(f"x{i} = {i}\n" for i in range(lines - 1))


def function(lines: int, name: str = "f") -> str:
    return f"def {name}() -> None:\n" + "".join(f"    x{i} = {i}\n" for i in range(lines - 1))


def with_parameters(count: int) -> str:
    return f"def f({', '.join(f'a{i}: int' for i in range(count))}) -> None: ...\n"


def nested(depth: int) -> str:
    loops = "".join(f"{'    ' * (i + 1)}for i{i} in ():\n" for i in range(depth))
    return f"def f() -> None:\n{loops}{'    ' * (depth + 1)}pass\n"


def test_an_empty_tree_keeps_every_budget(tree: Tree):
    assert tree.offences() == []


@pytest.mark.parametrize("root", ["src", "tools", "tests"])
def test_file(tree: Tree, root: str):
    tree.write(f"{root}/kept.py", module(400))
    assert tree.offences() == []
    tree.write(f"{root}/over.py", module(401).replace("x", "y"))
    assert f"file {root}/over.py:1 401, the limit is 400" in tree.offences()


@pytest.mark.parametrize("root", ["src", "tools", "tests"])
def test_function(tree: Tree, root: str):
    tree.write(f"{root}/m.py", DOCSTRING + function(60))
    assert tree.offences() == []
    tree.write(f"{root}/m.py", DOCSTRING + function(61))
    assert tree.offences() == [f"function {root}/m.py:2 f 61, the limit is 60"]


def test_a_function_inside_another_counts_for_both(tree: Tree):
    inner = "".join(f"    {line}\n" for line in function(61, "inner").splitlines())
    tree.write("src/m.py", DOCSTRING + f"def outer() -> None:\n{inner}")
    assert tree.offences() == [
        "function src/m.py:2 outer 62, the limit is 60",
        "function src/m.py:3 outer.inner 61, the limit is 60",
    ]


def test_over_the_hard_limit_is_said(tree: Tree):
    tree.write("src/m.py", DOCSTRING + function(101))
    assert tree.offences() == [
        "function src/m.py:2 f 101, the limit is 60, and the hard limit is 100"
    ]


def test_arguments(tree: Tree):
    tree.write("src/m.py", DOCSTRING + with_parameters(6))
    assert tree.offences() == []
    tree.write("src/m.py", DOCSTRING + with_parameters(7))
    assert tree.offences() == ["arguments src/m.py:2 f 7, the limit is 6"]


def test_every_sort_of_parameter_counts_but_self(tree: Tree):
    parameters = "self, a: int, /, b: int, *c: int, d: int, e: int, **f: int"
    tree.write("src/m.py", f"{DOCSTRING}class C:\n    def f({parameters}) -> None: ...\n")
    assert tree.offences() == []
    parameters = parameters.replace("self, ", "")
    tree.write(
        "src/m.py",
        f"{DOCSTRING}class C:\n    @staticmethod\n    def f(z: int, {parameters}) -> None: ...\n",
    )
    assert tree.offences() == ["arguments src/m.py:4 C.f 7, the limit is 6"]


def test_nesting(tree: Tree):
    tree.write("src/m.py", DOCSTRING + nested(3))
    assert tree.offences() == []
    tree.write("src/m.py", DOCSTRING + nested(4))
    assert tree.offences() == ["nesting src/m.py:2 f 4, the limit is 3, and the hard limit is 3"]


def test_elif_is_no_deeper_than_if(tree: Tree):
    branches = "".join(f"    elif a == {i}:\n        pass\n" for i in range(1, 6))
    head = "def f(a: int) -> None:\n    if a == 0:\n        pass\n"
    tree.write("src/m.py", DOCSTRING + head + branches)
    assert tree.offences() == []


def test_repeated_runs(tree: Tree):
    run = "".join(f"run{i} = {i}\n" for i in range(8))
    tree.write("src/a.py", DOCSTRING + run)
    tree.write("src/b.py", DOCSTRING + "# Comments and blanks do not hide a run.\n\n" + run)
    tree.write("tests/c.py", DOCSTRING + run)
    assert tree.offences() == [
        "repeated src/a.py:2 run of 8 or more as at src/b.py:4",
        "repeated src/b.py:4 run of 8 or more as at src/a.py:2",
    ]
    # 16 repeated lines of 534 are 2.996 %, of 533 they are 3.002 %.
    tree.write("src/long1.py", module(260))
    tree.write("src/long2.py", module(260).replace("x", "y"))
    assert tree.offences() == []
    tree.write("src/long2.py", module(259).replace("x", "y"))
    assert len(tree.offences()) == 2


def test_equal_lines_in_a_row_and_runs_of_seven_are_no_repetition(tree: Tree):
    tree.write("src/a.py", DOCSTRING + "x = 0\n" * 12)
    run = "".join(f"run{i} = {i}\n" for i in range(7))
    tree.write("src/b.py", DOCSTRING + run)
    tree.write("src/c.py", DOCSTRING + run)
    assert tree.offences() == []


@pytest.mark.parametrize("root", ["src", "tools", "tests"])
def test_module_docstring(tree: Tree, root: str):
    tree.write(f"{root}/m.py", "")
    assert tree.offences() == [f"docstring {root}/m.py:1 no module docstring"]


def test_annotated_parameters(tree: Tree):
    kept = "".join(f"def f{i}(a: int) -> None: ...\n" for i in range(19))
    tree.write("src/m.py", DOCSTRING + kept + "def g(a): ...\n")
    assert tree.offences() == []
    tree.write("src/m.py", DOCSTRING + kept + "def g(a, b): ...\n")
    assert tree.offences() == [
        "annotated src/m.py:21 g a has no annotation",
        "annotated src/m.py:21 g b has no annotation",
    ]


def test_tests_are_free_of_the_other_budgets(tree: Tree):
    signature = f"def f({', '.join('abcdefghi')}):\n"
    body = nested(4).split("\n", 1)[1]
    tree.write("tests/test_m.py", DOCSTRING + signature + body)
    assert tree.offences() == []


EXCEPTION = {"path": "src/m.py", "function": "f", "kind": "arguments", "value": 7, "reason": "api"}


def test_an_exception_raises_its_limit(tree: Tree):
    tree.write("src/m.py", DOCSTRING + with_parameters(7))
    tree.allow(**EXCEPTION)
    assert tree.offences() == []


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        (9, "arguments src/m.py:2 f 9, its exception is 8, and the hard limit is 8"),
        (7, "arguments src/m.py:2 f lower its exception from 8 to 7"),
        (6, "arguments src/m.py:2 f exception of 8 is no longer needed: 6"),
    ],
)
def test_an_exception_may_only_shrink(tree: Tree, size: int, complaint: str):
    tree.write("src/m.py", DOCSTRING + with_parameters(size))
    tree.allow(**{**EXCEPTION, "value": 8})
    assert tree.offences() == [complaint]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"reason": " "}, "arguments src/m.py f exception: no reason"),
        ({"kind": "width"}, "width src/m.py f exception: kind 'width', want one of"),
        ({"kind": "file"}, "file src/m.py f exception: kind 'file' takes no function"),
        ({"function": ""}, "arguments src/m.py exception: kind 'arguments' needs a function"),
        ({"until": "never"}, "arguments src/m.py f exception: unknown key until"),
        ({"function": "gone"}, "arguments src/m.py gone exception for what does not exist"),
    ],
)
def test_a_badly_written_exception_fails(tree: Tree, change: dict[str, str], complaint: str):
    tree.write("src/m.py", DOCSTRING + with_parameters(7))
    tree.allow(**{**EXCEPTION, **change})
    assert any(line.startswith(complaint) for line in tree.offences())


def test_the_same_exception_twice_fails(tree: Tree):
    tree.write("src/m.py", DOCSTRING + with_parameters(7))
    tree.allow(**EXCEPTION)
    once = (tree.root / "tools/budget.toml").read_text()
    tree.write("tools/budget.toml", f"{once}\n{once}")
    assert tree.offences() == ["exception tools/budget.toml lists the same thing twice"]
