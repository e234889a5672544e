"""Small CuTe DSL programs, one hardware mechanism each."""
