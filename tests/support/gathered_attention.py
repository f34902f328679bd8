"""Context parallelism that runs on a CPU: a `with` in which torch's attention has the keys of all ranks.

Torch's own (`torch.distributed.tensor.experimental.context_parallel`) works the same way, by replacing the function for
as long as the `with` lasts, but knows the attention kernels of GPUs only.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Gathered(torch.autograd.Function):
    """All ranks' parts of a sequence, one behind the other. Each rank's queries have a part in their gradients."""

    @staticmethod
    def forward(_ctx, part):
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -2)

    @staticmethod
    def backward(_ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), -2)[dist.get_rank()]


@contextlib.contextmanager
def gathered_attention() -> Iterator[None]:
    """Let each rank's queries attend to all keys up to their own place in the sequence."""
    plain = F.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert is_causal or attn_mask is None
        length = query.shape[-2]
        key, value = map(_Gathered.apply, (key, value))
        start = dist.get_rank() * length
        rows = torch.arange(start, start + length)[:, None]
        mask = torch.arange(key.shape[-2]) <= rows
        return plain(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield
