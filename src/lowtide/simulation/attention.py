"""Models attention on an accelerator: which kernel `scaled_dot_product_attention` takes, and kernels' workspaces.

On meta tensors torch takes the mathematical form, which makes the whole square of scores: a GPU rarely does. The class
`Attention` chooses as torch's `sdp_utils.cpp` does: flash where there is no mask, numbers are 16 bits wide and heads
are at most 256 wide; the memory-efficient kernel with masks and in float32; the mathematical form otherwise. cuDNN's
kernel is only taken on request: torch prefers flash by default. Tiled blocks call flash themselves, where torch says
that it can be used; here, `Attention` says so, and counts those calls with its own.

A workspace is memory that a kernel takes for itself while it runs, so that no tensor of the program shows it.
`workspace_of` has a formula for each such kernel, after its source in torch. cuBLAS' are there all the time,
and are the accelerator's (`blas_workspace`).
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowtide._torch import storage_key
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

T = TypeVar("T")

KERNELS = ("auto", "flash", "efficient", "cudnn", "math", "cpu")

_WIDEST_HEAD = 256

_HEAD_MULTIPLE = 8
"""Flash and the memory-efficient kernel take heads whose width is a multiple of this."""


class Attention:
    """A replacement of `scaled_dot_product_attention` that takes an accelerator's kernels, and counts its choices."""

    def __init__(self, kernel: str = "auto", *, has_flash: bool = True) -> None:
        if kernel not in KERNELS:
            raise InvalidValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")
        self.kernel = kernel
        self.has_flash = has_flash
        self.picked: collections.Counter[str] = collections.Counter()

    @property
    def device_type(self) -> str:
        """Return the type of the device that has these kernels."""
        return "cpu" if self.kernel == "cpu" else "cuda"

    def can_use_flash(self, parameters: Any, _debug: bool = False) -> bool:
        """Answer as `torch.backends.cuda.can_use_flash_attention` does on this accelerator."""
        mask, dropout, grouped = parameters.attn_mask, parameters.dropout, parameters.enable_gqa
        return self.choose(parameters.query, mask, dropout, grouped=grouped) == "flash"

    def counted(self, run: Callable[..., T]) -> Callable[..., T]:
        """Return a function that calls a fused kernel itself, and counts it like the others."""

        @functools.wraps(run)
        def run_and_count(*args: Any) -> T:
            self.picked["cpu" if self.kernel == "cpu" else "flash"] += 1
            return run(*args)

        return run_and_count

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
        kernel = self.choose(query, attn_mask, dropout_p, grouped=enable_gqa)
        self.picked[kernel] += 1
        run: Callable[..., torch.Tensor] = getattr(self, f"_{kernel}")
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def choose(self, query: torch.Tensor, mask: torch.Tensor | None, dropout: float, *, grouped: bool) -> str:
        """Return the name of the kernel that a call takes."""
        if self.kernel == "cpu" and (dropout or (mask is not None and mask.requires_grad)):
            return "math"
        if self.kernel != "auto":
            return self.kernel
        width = query.shape[-1]
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if self.has_flash and mask is None and is_half and width <= _WIDEST_HEAD and width % _HEAD_MULTIPLE == 0:
            return "flash"
        if not grouped and width % _HEAD_MULTIPLE == 0:
            return "efficient"
        return "math"

    def _flash(
        self, query: Any, key: Any, value: Any, _mask: Any, dropout: Any, causal: Any, scale: Any, _: Any
    ) -> Any:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
        return out[0]

    _cudnn = _flash  # it differs only in the layout of the row sums

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


# --- Workspaces -----------------------------------------------------------------------------------------------------

_FLOAT32 = 4
_FLASH_ROWS = 128
_SMALL_HEAD = 128

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.linear})


def workspace_of(packet: Any, args: tuple[Any, ...], quantized: set[int]) -> int:
    """Return the bytes that an operation takes beyond its results.

    A quantized weight is unpacked for each product: `quantized` has the storages of all such weights.
    """
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(args)
    if quantized and packet in _PRODUCTS:
        return sum(
            arg.nbytes
            for arg in args
            if isinstance(arg, torch.Tensor) and storage_key(arg.untyped_storage()) in quantized
        )
    return 0


def _flash_backward(args: tuple[Any, ...]) -> int:
    """Count the float32 sums of flash attention's backward, as `mha_bwd` allocates them.

    The queries' gradient is summed in float32, with rows rounded up to 128 and the width of heads to 32 (above 128, to
    64); so is the row sum of the softmax. With grouped queries, the gradients of keys and values are made for all
    heads. Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    _, query, key = args[:3]
    batch, heads, rows, width = query.shape
    rows_rounded = _round_up(rows, _FLASH_ROWS)
    width_rounded = _round_up(width, 32 if width <= _SMALL_HEAD else 64)
    nbytes = batch * heads * rows_rounded * (width_rounded + 1) * _FLOAT32
    if key.shape[1] != heads:
        nbytes += 2 * batch * heads * key.shape[2] * width * query.element_size()
    return int(nbytes)


def _efficient_backward(args: tuple[Any, ...]) -> int:
    """Count the float32 sums of the queries' gradient, and the row sums.

    Source: attention_backward.cu, `_efficient_attention_backward`.
    """
    query = args[1]
    batch, heads, rows, width = query.shape
    accumulates = query.dtype is not torch.float32
    return int(batch * heads * rows * (width * accumulates + 1) * _FLOAT32)


def _safe_softmax(args: tuple[Any, ...]) -> int:
    """Count the mask of the scores that are minus infinity, a byte each. Source: attention.cpp, `_safe_softmax`."""
    return int(args[0].numel())


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


_FORMULAS = {
    aten._safe_softmax: _safe_softmax,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
