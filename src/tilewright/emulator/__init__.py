"""An emulator of CuTe DSL kernels: executes their PTX for sm_80, sm_90a and sm_100a on the CPU."""

from tilewright.emulator.emulate import Emulator, Result
from tilewright.emulator.errors import EmulationError
from tilewright.emulator.machine import Options

__all__ = ["EmulationError", "Emulator", "Options", "Result"]
