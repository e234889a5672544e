"""Attention as PyTorch operators: what the dispatcher, autograd and torch.compile see."""

from tilewright.torch_ops.ops import Call, append_kv, attend, attend_backward, plan_backward

__all__ = ["Call", "append_kv", "attend", "attend_backward", "plan_backward"]
