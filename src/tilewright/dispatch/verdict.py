"""The answer of `tilewright.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.dispatch.registry import BACKENDS, choose
from tilewright.problem import AttentionProblem


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes, what that is, and why each other one does not run.

    `rejected` maps a backend's name to the reason; it is in the order of preference.
    """

    problem: AttentionProblem
    backend: str
    summary: str
    rejected: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "problem": str(self.problem),
            "backend": self.backend,
            "summary": self.summary,
            "rejected": dict(self.rejected),
        }

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"takes {self.backend}: {self.summary}"]
        lines += [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


def explain(problem: AttentionProblem, name: str | None = None) -> Explanation:
    """Explain the choice; `name` is the backend that the caller asked for, if any."""
    chosen = choose(problem, name)
    rejected = {}
    for backend in BACKENDS.values():
        if backend is chosen:
            continue
        preferred = "another backend was asked for" if name else f"{chosen.name} comes first"
        rejected[backend.name] = backend.why_not(problem) or preferred
    return Explanation(problem, chosen.name, chosen.summary, rejected)
