"""Calls fused attention kernels with the log-sum-exp of each row, so that a tile's queries can see part of the keys.

A tile of queries attends to the keys before it and to its own. Where a kernel aligns causal masks to the lower right,
that is one call; elsewhere it is two, all keys before the tile and a causal square, whose outputs are joined by their
row sums. In backward each of the two gets the joint output and row sums, and returns its share of the gradients.

With grouped queries, kernels make gradients of keys and values for every query head. So the backward runs one group
after the other, and what it takes beside the gradients is one group's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten

ALL = slice(None)

_LOWER_RIGHT = ("cuda",)
"""Where flash attention aligns causal masks to the lower right, as `torch.nn.attention.bias` relies on."""

_OVERRIDEABLE = ("xpu", "sim")
"""Devices that implement torch's overrideable fused attention."""

_MASKED = ("cpu", "sim")
"""Where a kernel that gives row sums takes masks, and heeds torch's switch for flash attention (`sdpa_kernel`)."""

META_STANDS_FOR = "cuda"
"""The device whose kernels meta tensors take: a simulated device says which it is."""

_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8


def _kind_of(tensor: torch.Tensor) -> str:
    """Return the type of the device whose kernels a tensor takes."""
    return META_STANDS_FOR if tensor.is_meta else tensor.device.type


def has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    """Return whether a fused kernel that gives row sums takes these tensors."""
    if query.shape[-1] != value.shape[-1] or query.shape[1] % key.shape[1]:
        return False
    kind = _kind_of(query)
    if kind not in ("cpu", *_LOWER_RIGHT, *_OVERRIDEABLE):
        return False
    if kind in _MASKED and not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if mask is not None and not (kind in _MASKED and _is_plain_mask(mask)):
        return False
    if kind in _LOWER_RIGHT:
        width = query.shape[-1]
        is_taken = query.dtype in (torch.float16, torch.bfloat16) and width <= _WIDEST_HEAD
        return is_taken and width % _HEAD_MULTIPLE == 0 and _takes_flash(query, key, value)
    return True


def _is_plain_mask(mask: torch.Tensor) -> bool:
    """Return whether a mask has a column for each key, and is a constant."""
    return mask.dim() == 4 and mask.shape[-1] > 1 and not mask.requires_grad  # noqa: PLR2004


def added_to_scores(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers to add to the scores of some queries, as torch makes them of booleans."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.to(query.dtype).expand(-1, -1, query.shape[2], -1).contiguous()


def _takes_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether this GPU and the user's settings (`sdpa_kernel`) allow flash attention."""
    is_grouped = query.shape[1] != key.shape[1]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, is_grouped)
    return bool(torch.backends.cuda.can_use_flash_attention(parameters))


def kernel_of(query: torch.Tensor) -> Any:
    """Return the operator that computes attention on the query's device."""
    if _kind_of(query) == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu.default
    if _kind_of(query) in _OVERRIDEABLE:
        return aten._scaled_dot_product_fused_attention_overrideable.default
    return aten._scaled_dot_product_flash_attention.default


def as_autocast_would(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors as autocast does for `scaled_dot_product_attention`. It does not know the kernels beneath it."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)


class Rows(NamedTuple):
    """The queries of one tile, and how they attend."""

    start: int
    end: int
    is_causal: bool
    scale: float | None
    keys: slice = ALL
    """The keys that they see, if that is not told by their order."""

    def pieces(self, key: torch.Tensor) -> list[tuple[slice, bool]]:
        """Return the runs of keys that the rows attend to, and whether each is causal."""
        if not self.is_causal:
            return [(self.keys, False)]
        if _kind_of(key) in _LOWER_RIGHT:
            return [(slice(0, self.end), True)]
        return [*([(slice(0, self.start), False)] if self.start else []), (slice(self.start, self.end), True)]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a tile's queries to all keys that they may see, and the log-sum-exp of each row.

    A `mask` is added to the scores of the keys that the rows see.
    """
    parts = [
        run_kernel(query, key[:, :, keys], value[:, :, keys], causal, rows.scale, mask)
        for keys, causal in rows.pieces(key)
    ]
    out, row_sums = parts[0]
    for other, other_sums in parts[1:]:
        joint = torch.logaddexp(row_sums, other_sums)
        shares = [(sums - joint).exp().unsqueeze(-1) for sums in (row_sums, other_sums)]
        out, row_sums = (out * shares[0] + other * shares[1]).to(query.dtype), joint
    return out, row_sums


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    rows: Rows,
    mask: torch.Tensor | None = None,
) -> Iterator[tuple[slice, slice, slice, tuple[torch.Tensor, ...]]]:
    """Yield (dq, dk, dv) piece by piece, after the query heads, key heads and rows of keys that they are for."""
    for heads, group in _groups(query, key):
        for keys, causal in rows.pieces(key):
            given = (gradient[:, heads], query[:, heads], key[:, group, keys], value[:, group, keys])
            made = (out[:, heads], row_sums[:, heads])
            yield heads, group, keys, _backward(*given, *made, causal, rows.scale, _mask_of(mask, heads))


def _mask_of(mask: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    """Return the mask of some query heads, which may share one."""
    return mask if mask is None or mask.shape[1] == 1 else mask[:, heads]


def _groups(query: torch.Tensor, key: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return the query heads and the key heads that belong together; all at once if there is one for each."""
    width = query.shape[1] // key.shape[1]
    if width == 1:
        return [(ALL, ALL)]
    return [(slice(g * width, (g + 1) * width), slice(g, g + 1)) for g in range(key.shape[1])]


def run_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the device's fused kernel. Return attention, and the log-sum-exp of each row."""
    if _kind_of(query) == "cpu":
        run = aten._scaled_dot_product_flash_attention_for_cpu
        made = []
        for heads, group in _groups(query, key):
            wide = _widened(query[:, heads], key[:, group], value[:, group])
            made.append(run(query[:, heads], *wide, 0.0, causal, attn_mask=_mask_of(mask, heads), scale=scale))
        out, row_sums = (torch.cat(column, 1) for column in zip(*made, strict=True)) if len(made) > 1 else made[0]
        return out, row_sums
    if _kind_of(query) in _OVERRIDEABLE:
        run = aten._scaled_dot_product_fused_attention_overrideable
        out, row_sums, *_ = run(query, key, value, mask, 0.0, causal, scale=scale)
        return out, row_sums
    out, row_sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out, row_sums


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    if _kind_of(query) == "cpu":
        run = aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = _widened(query, key, value)
        dq, dk, dv = run(gradient, query, *wide, out, row_sums, 0.0, causal, attn_mask=mask, scale=scale)
        if key.shape[1] < query.shape[1]:
            dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
        return dq, dk, dv
    lengths: tuple[Any, ...] = (None, None, query.shape[2], key.shape[2], 0.0, causal)
    if _kind_of(query) in _OVERRIDEABLE:
        run = aten._scaled_dot_product_fused_attention_overrideable_backward
        needs, seeds = [True, True, True, False], _no_seeds(query)
        found = run(gradient, query, key, value, mask, needs, out, row_sums, *lengths, *seeds, scale=scale)
        return tuple(found[:3])
    run = aten._scaled_dot_product_flash_attention_backward
    return tuple(run(gradient, query, key, value, out, row_sums, *lengths, *_no_seeds(query), scale=scale))


def _no_seeds(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a seed and an offset, which a kernel without dropout does not read."""
    return query.new_empty((), dtype=torch.long), query.new_empty((), dtype=torch.long)


def _widened(query: torch.Tensor, *keys: torch.Tensor) -> list[torch.Tensor]:
    """Return keys and values with a head for each of the query's: all have one each, or share one."""
    return [tensor.expand(-1, query.shape[1], -1, -1) for tensor in keys]
