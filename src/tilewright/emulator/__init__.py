"""An emulator of CuTe DSL kernels: executes their PTX for sm_80, sm_90a and sm_100a on the CPU."""

from .emulate import Emulator, Result
from .errors import EmulationError
from .machine import Options

__all__ = ["EmulationError", "Emulator", "Options", "Result"]
