"""Which machine instructions a kernel consists of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

# An address, perhaps a predicate, and the instruction's name, whose parts are joined by dots.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)")


def disassembler() -> str | None:
    """nvdisasm, of PATH, of CUDA_HOME, or of a wheel that carries it."""
    wheels = Path(sysconfig.get_path("purelib"))
    places = [
        *os.environ.get("PATH", "").split(os.pathsep),
        str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")),
        *map(str, wheels.glob("nvidia/*/bin")),
        str(wheels / "triton" / "backends" / "nvidia" / "bin"),
    ]
    return shutil.which("nvdisasm", path=os.pathsep.join(places))


def instructions(cubin: Path, program: str) -> Counter[str]:
    """How often each instruction occurs, by its whole name: HGMMA.64x128x16.F32.BF16."""
    listed = subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True)
    return Counter(_INSTRUCTION.findall(listed.stdout))
