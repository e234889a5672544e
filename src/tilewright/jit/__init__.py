"""Compiles kernels, keeps what was compiled, and loads it. Nothing else touches the compiler.

`load` gives the callable of a kernel: from this process, a bundle, the disk cache, or a compiler.
The DSL and TVM FFI are imported when they are first needed, and not before.
"""

from tilewright.jit.loader import load, why_unavailable

__all__ = ["load", "why_unavailable"]
