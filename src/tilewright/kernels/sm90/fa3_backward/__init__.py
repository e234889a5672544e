"""FA-3's backward on Hopper: dQ, dK and dV by recomputing P from the log-sum-exp."""
