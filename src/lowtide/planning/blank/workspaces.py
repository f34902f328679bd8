"""Memory that kernels take for themselves while they run: no tensor of the program shows it.

Each formula follows the kernel's source in torch. cuBLAS and cuDNN keep fixed workspaces, which are among the stated
margins of a plan.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_FLOAT32 = 4
_FLASH_ROWS = 128
_SMALL_HEAD = 128


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _flash_backward(args: tuple[Any, ...]) -> int:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.

    The gradient of the queries is summed in float32 over rows rounded to 128 and heads rounded to 32 (64 above 128);
    so is the row sum of the softmax. With grouped queries, the gradients of keys and values are made for all heads.
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
    """attention_backward.cu, `_efficient_attention_backward`: float32 sums of the query's gradient, and row sums."""
    query = args[1]
    batch, heads, rows, width = query.shape
    accumulates = query.dtype is not torch.float32
    return int(batch * heads * rows * (width * accumulates + 1) * _FLOAT32)


def _safe_softmax(args: tuple[Any, ...]) -> int:
    """attention.cpp, `_safe_softmax`: a mask of the scores that are minus infinity, a byte each."""
    return int(args[0].numel())


_FORMULAS = {
    aten._safe_softmax: _safe_softmax,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.linear})


def workspace_of(packet: Any, args: tuple[Any, ...], quantized: set[int]) -> int:
    """Bytes that an operation takes beyond its results. A quantized weight is unpacked for each product."""
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(args)
    if quantized and packet in _PRODUCTS:
        return sum(
            arg.nbytes for arg in args if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata in quantized
        )
    return 0
