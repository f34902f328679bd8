"""Counts of one training step on any device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operators(TorchDispatchMode):
    """Operators, matrix products among them, and their FLOPs: torch's own formulas, without its look at modules, which
    trips over what peers do. And how often fused attention was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.products = self.flops = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        del types
        output = func(*args, **(kwargs or {}))
        self.all += 1
        self.attention += "attention" in str(func) and "backward" not in str(func)
        if func._overloadpacket in flop_registry:
            self.products += 1
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


class AttentionFlops(Operators):
    """Counts, too, the FLOPs of the fused attention of the CPU and of other devices, which torch's formulas lack.

    A causal square counts half. A forward has two products, a backward five.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_forward = self.attention_backward = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._overloadpacket.__name__
        if name in _CAUSAL:
            *_, query, key, value = args[: 4 if name.endswith("backward") else 3]
            place = _CAUSAL[name]
            pairs = query.shape[:3].numel() * key.shape[2] / (2 if len(args) > place and args[place] else 1)
            product = pairs * (query.shape[3] + value.shape[3])
            if name.endswith("backward"):
                self.attention_backward += 5 * product
            else:
                self.attention_forward += 2 * product
        return super().__torch_dispatch__(func, types, args, kwargs)


_CAUSAL = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_fused_attention_overrideable_backward": 13,
}
"""The place of the argument that says whether attention is causal."""
