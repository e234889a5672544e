"""From a problem and its tensors to a kernel's launch: which kernel, what it is passed, and where.

`fa3` launches the FA-3 forward kernel; `device` holds what launches on one GPU share.
"""
