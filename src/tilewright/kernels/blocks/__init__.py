"""Pieces that the kernels of all generations share."""
