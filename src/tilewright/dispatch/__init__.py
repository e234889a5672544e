"""Which backend takes a call, and why each other one does not."""

from tilewright.dispatch.registry import (
    BACKENDS,
    Backend,
    Prepared,
    PreparedBackward,
    choose,
    choose_backward,
)
from tilewright.dispatch.verdict import Explanation, explain

__all__ = [
    "BACKENDS",
    "Backend",
    "Explanation",
    "Prepared",
    "PreparedBackward",
    "choose",
    "choose_backward",
    "explain",
]
