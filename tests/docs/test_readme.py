"""README's code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="one block registers with transformers")
    blocks = code_blocks(ROOT / "README.md")
    assert len(blocks) == 2
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)
    assert "takes cpu_fused" in capsys.readouterr().out
    assert namespace["out"].shape == (2, 1, 32, 128)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
