"""Which kernel `scaled_dot_product_attention` would take on an accelerator.

On blank tensors torch takes the mathematical form, which makes the whole square of scores: a GPU rarely does. The
choice follows torch's `sdp_utils.cpp`: flash where there is no mask, numbers are 16 bits wide and heads are at most 256
wide; the memory-efficient kernel with masks and in float32; the mathematical form otherwise. cuDNN's kernel is only
taken on request: torch prefers flash by default.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

KERNELS = ("auto", "flash", "efficient", "cudnn", "math", "cpu")
_WIDEST_HEAD = 256
_LANES = 8


class Attention:
    """Stands in for `scaled_dot_product_attention`; counts what it picked."""

    def __init__(self, kernel: str = "auto", *, has_flash: bool = True) -> None:
        if kernel not in KERNELS:
            raise InvalidValueError(f"{kernel!r} is no attention kernel; known: {', '.join(KERNELS)}")
        self.kernel = kernel
        self.has_flash = has_flash
        self.picked: collections.Counter[str] = collections.Counter()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = self._choose(query, attn_mask, dropout_p, grouped=enable_gqa)
        self.picked[kernel] += 1
        run: Callable[..., torch.Tensor] = getattr(self, f"_{kernel}")
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def _choose(self, query: torch.Tensor, mask: torch.Tensor | None, dropout: float, *, grouped: bool) -> str:
        if self.kernel == "cpu" and (dropout or (mask is not None and mask.requires_grad)):
            return "math"
        if self.kernel != "auto":
            return self.kernel
        width = query.shape[-1]
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if self.has_flash and mask is None and is_half and width <= _WIDEST_HEAD and width % _LANES == 0:
            return "flash"
        if not grouped and width % _LANES == 0:
            return "efficient"
        return "math"

    def _flash(
        self, query: Any, key: Any, value: Any, _mask: Any, dropout: Any, causal: Any, scale: Any, _: Any
    ) -> Any:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
        return out[0]

    _cudnn = _flash  # the same results, but for the layout of the row sums

    def _cpu(self, query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, _: Any) -> Any:
        out = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )
        return out[0]

    def _efficient(
        self, query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, _: Any
    ) -> Any:
        if mask is not None:
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
            mask = mask.expand(*query.shape[:3], key.shape[2])
        out = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, dropout, causal, scale=scale)
        return out[0]

    def _math(
        self, query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, grouped: Any
    ) -> Any:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
        )
        return out[0]
