"""The oracle: attention by its formulas, untiled, without autograd.

Give it float64 and it is what every other path is judged by; give it bfloat16 and it is the plain
same-dtype attention whose error sets the tolerance. It shares no code with what it judges.
"""

from tilewright.reference.backward import backward
from tilewright.reference.forward import forward
from tilewright.reference.sequences import (
    backward_paged,
    backward_varlen,
    forward_paged,
    forward_varlen,
)

__all__ = [
    "backward",
    "backward_paged",
    "backward_varlen",
    "forward",
    "forward_paged",
    "forward_varlen",
]
