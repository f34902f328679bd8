"""Gradients of keys and values that many tiles saw: as exact in bfloat16 in many tiles as in few."""

from __future__ import annotations

import functools
import itertools

import torch

from lowtide.tiling.attention_kernels import Rows
from lowtide.tiling.key_values import KeyValueGrads, fused_attention, hand_out

LENGTH, HEADS, KEY_HEADS, WIDTH = 2048, 4, 2, 16


def gradients(dtype: torch.dtype, tiles: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of all keys and values, whose causal attention is computed in tiles of queries."""
    torch.manual_seed(0)
    query, key, value, weight = (
        torch.randn(1, heads, LENGTH, WIDTH).bfloat16().to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    key.requires_grad_()
    value.requires_grad_()
    grads, after, loss = KeyValueGrads(), None, torch.zeros(())
    whole = hand_out(grads, key, value)
    ends = [LENGTH * index // tiles for index in range(tiles + 1)]
    for start, end in itertools.pairwise(ends):
        rows = Rows(start, end, is_causal=True, scale=None)
        out, after = fused_attention(grads, rows, None, after, query[:, :, start:end], None, *whole)
        loss = loss + (out * weight[:, :, start:end]).sum().double()
    loss.backward()
    return key.grad, value.grad


@functools.cache
def errors(tiles: int) -> list[float]:
    pairs = zip(gradients(torch.bfloat16, tiles), gradients(torch.float64, 1), strict=True)
    return [float((ours.double() - exact).norm() / exact.norm()) for ours, exact in pairs]


def test_tiles_are_exact_in_double_precision():
    for ours, exact in zip(gradients(torch.float64, 16), gradients(torch.float64, 1), strict=True):
        assert (ours - exact).norm() <= 1e-12 * exact.norm()


def test_sums_in_bfloat16_would_be_seen():
    """Each key's gradient is the sum of as many parts as tiles saw it. The sums are in float32, and rounded once."""
    for many, few in zip(errors(64), errors(16), strict=True):
        assert many <= few < 0.01
