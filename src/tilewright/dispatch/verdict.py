"""The answer of `tilewright.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.dispatch.registry import BACKENDS, choose, choose_backward
from tilewright.problem import AttentionProblem


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes, what that is, and why each other one does not run.

    `rejected` maps a backend's name to the reason; it is in the order of preference. `backward` is
    the backend whose backward pass follows: the same, or the best that can, where
    `backward_rejected` has the reason for each better one.
    """

    problem: AttentionProblem
    backend: str
    summary: str
    rejected: dict[str, str]
    backward: str
    backward_rejected: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "problem": str(self.problem),
            "backend": self.backend,
            "summary": self.summary,
            "rejected": dict(self.rejected),
            "backward": self.backward,
            "backward_rejected": dict(self.backward_rejected),
        }

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"takes {self.backend}: {self.summary}"]
        lines += [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        lines += self.of_backward()
        return "\n".join(lines)

    def of_backward(self) -> list[str]:
        """Lines that say which other backend's backward follows, and why; none if its own does."""
        if self.backward == self.backend:
            return []
        reasons = self.backward_rejected.items()
        return [
            f"its backward is that of {self.backward}",
            *(f"not that of {name}: {reason}" for name, reason in reasons),
        ]


def explain(problem: AttentionProblem, name: str | None = None) -> Explanation:
    """Explain the choice; `name` is the backend that the caller asked for, if any."""
    chosen = choose(problem, name)
    rejected = {}
    for backend in BACKENDS.values():
        if backend is chosen:
            continue
        preferred = "another backend was asked for" if name else f"{chosen.name} comes first"
        rejected[backend.name] = backend.why_not(problem) or preferred
    backward, backward_rejected = choose_backward(problem, chosen)
    return Explanation(
        problem, chosen.name, chosen.summary, rejected, backward.name, backward_rejected
    )
