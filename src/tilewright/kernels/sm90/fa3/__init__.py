"""FlashAttention-3 on Hopper (arXiv 2407.08608)."""
