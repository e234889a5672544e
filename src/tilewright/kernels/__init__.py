"""The GPU kernels, by architecture. `catalog` lists what there is to compile."""
