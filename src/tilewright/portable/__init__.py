"""Exact attention in plain PyTorch, on any device: the kernels' readable twin and the fallback.

`softmax` explains the online softmax, `tiled_forward` and `tiled_backward` are the algorithm,
`fused` calls PyTorch's own CPU kernel where it fits, `sequences` makes dense calls of ragged
batches.
"""

from tilewright.portable.append import append_rows, check_append
from tilewright.portable.sequences import backward, forward, read_batch

__all__ = ["append_rows", "backward", "check_append", "forward", "read_batch"]
