"""Exact, IO-aware attention: four generations of FlashAttention behind one API.

`attention` takes equally long sequences, `attention_varlen` packed ones of unequal lengths,
`attention_decode` a few new queries and a cache. `explain` says which backend a call takes.
"""

from tilewright.api import attention, attention_decode, attention_varlen, explain

__all__ = ["attention", "attention_decode", "attention_varlen", "explain"]
__version__ = "0.1.0"
