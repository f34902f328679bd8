"""Models context parallelism as torch's `context_parallel` does it: a ring of ranks around causal attention.

A rank has a part of the tokens from the front of the sequence and one from its back, so that all have the same work. It
gathers the keys and values of all ranks, in one exchange beside its first kernel, and attends to one rank's after the
other; results are joined in float32 by their row sums. Backward gathers keys and values once more, and passes their
gradients on from rank to rank, in float32.

`ring_attention` takes the place of `scaled_dot_product_attention`, as torch does. The ring is one operator, as it is
for torch: whoever keeps the outputs of attention keeps those of the whole ring, and nothing is gathered again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from lowtide.simulation.attention import Attention
    from lowtide.simulation.collectives import Group
    from lowtide.simulation.ledger import Ledger

aten = torch.ops.aten

_RANK = 0
"""The rank that is simulated. Others compute as much, on other halves."""

_NAMESPACE = "lowtide_flash_attention"
"""Where the ring is an operator. Policies that keep attention know it by such a name."""


def require_ring(model: nn.Module, ranks: int, tokens: int | None) -> None:
    """Refuse a model whose attention is not torch's, and a sequence that cannot be divided evenly."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "_attn_implementation", None) != "sdpa":
        raise PlanError(
            f"cp={ranks}: the attention of {type(model).__name__} is not transformers' 'sdpa', where context "
            "parallelism takes its place: plan it without cp"
        )
    if tokens is not None and tokens % (2 * ranks):
        raise PlanError(
            f"cp={ranks}: {tokens} tokens cannot be divided into {2 * ranks} parts of the same length, of which each "
            "rank has one from the front and one from the back: give a multiple"
        )


@contextlib.contextmanager
def ring_attention(group: Group, ledger: Ledger) -> Iterator[None]:
    """Let torch's attention run on the tokens of all ranks inside."""
    functions = torch.nn.functional
    attention: Any = functions.scaled_dot_product_attention
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    ring = _Ring(attention, group)
    schema = "forward(Tensor query, Tensor key, Tensor value, float? scale) -> (Tensor, Tensor)"
    library.define(schema)  # type: ignore[no-untyped-call]

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with ledger:
            return ring.attend(*args)

    library.impl("forward", run, "Meta")  # type: ignore[no-untyped-call]
    ring.operator = getattr(torch.ops, _NAMESPACE).forward.default
    ledger.composed.add(ring.operator)
    functions.scaled_dot_product_attention = ring
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = attention
        ledger.composed.remove(ring.operator)


class _Turn(NamedTuple):
    """What a rank computes with the keys and values of one rank, which has them in two halves."""

    is_causal: bool = False
    first_keys: bool = False
    """Whether only the first half of the keys comes before the queries."""
    last_queries: bool = False
    """Whether the keys come before the last half of the queries only."""


def _turn(number: int) -> _Turn:
    if number == 0:
        return _Turn(is_causal=True)
    return _Turn(first_keys=True) if number <= _RANK else _Turn(last_queries=True)


class _Ring:
    """A replacement of `scaled_dot_product_attention` that attends to the tokens of all ranks."""

    operator: Any = None

    def __init__(self, attention: Attention, group: Group) -> None:
        self._attention = attention
        self._group = group

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
        here = f"cp={self._group.ranks}"
        if attn_mask is not None or not is_causal:
            raise PlanError(
                f"{here}: the model attends under a mask (a window, or padding) or to later tokens, and the ring is "
                "for causal attention alone: plan it without cp"
            )
        kernel = self._attention.choose(query, None, dropout_p, grouped=enable_gqa)
        if dropout_p or kernel not in ("flash", "cpu"):
            what = "dropout in attention" if dropout_p else f"the attention kernel {kernel!r} ({query.dtype})"
            raise PlanError(f"{here} is modelled for flash attention without dropout, and this is {what}: plan bf16")
        out: torch.Tensor = _Attend.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return out

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention to the keys of all ranks, and the row sums."""
        joined = _Joined()
        for number, key_now, value_now in self._rotated(key, value, keeps_packed=False):
            turn = _turn(number)
            q = query.chunk(2, 2)[1] if turn.last_queries else query
            k, v = ((x.chunk(2, 2)[0] if turn.first_keys else x) for x in (key_now, value_now))
            out, sums = self._run(q, k, v, turn.is_causal, scale)
            joined.add(out.float(), sums.float(), last_half=turn.last_queries)
        return joined.out.to(query.dtype), joined.sums.squeeze(-1)

    def attend_backward(self, gradient: torch.Tensor, saved: tuple[Any, ...], scale: float | None) -> list[Any]:
        """Return the gradients of queries, keys and values."""
        query, key, value, out, sums = saved
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
        passed = dq  # until the first gradients are passed on
        for number, key_now, value_now in self._rotated(key, value, keeps_packed=True):
            turn = _turn(number)
            given = (gradient, query, out, sums)
            if turn.last_queries:
                dout, q, o, s = (x.chunk(2, 2)[1] for x in given)
                given = (dout, q, o, s.contiguous())
            k, v = ((x.chunk(2, 2)[0] if turn.first_keys else x) for x in (key_now, value_now))
            found = self._run_backward(*given, k, v, turn.is_causal, scale)
            if number:
                packed = passed  # of the turn before
                dk, dv = self._unpack(packed, dk, dv)
            dk, dv = (
                self._added(x, new, 0 if turn.first_keys else None) for x, new in zip((dk, dv), found[1:], strict=True)
            )
            packed = torch.cat([dk.flatten(), dv.flatten()])
            passed, arrival = self._group.pass_on(packed)
            dq = self._added(dq, found[0], 1 if turn.last_queries else None)
            self._group.wait(arrival)
        whole = passed.to(key.dtype)
        return [dq.to(query.dtype), *self._unpack(whole, dk, dv)]

    def _rotated(
        self, key: torch.Tensor, value: torch.Tensor, *, keeps_packed: bool
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of one rank after the other, this one's first.

        What was sent last stays for a whole backward (`keeps_packed`), and is freed at once in forward.
        """
        key, value = key.contiguous(), value.contiguous()
        ranks = self._group.ranks
        mine = torch.cat([key.flatten(), value.flatten()])
        everybodys, arrival = self._group.begin_gather(mine)
        packed = mine if keeps_packed else None
        del mine
        yield 0, key, value
        self._group.wait(arrival)
        for number in range(1, ranks):
            key, value = self._unpack(everybodys.chunk(ranks)[number], key, value)
            if number < ranks - 1:
                packed = torch.cat([key.flatten(), value.flatten()])  # as if it had to be passed on
            packed = packed if keeps_packed else None
            yield number, key, value

    @staticmethod
    def _unpack(packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return packed[: key.numel()].view(key.shape), packed[key.numel() :].view(value.shape)

    @staticmethod
    def _added(total: torch.Tensor, new: torch.Tensor, half: int | None) -> torch.Tensor:
        """Return the sum, in the memory of the total if all of it gets something."""
        if half is None:
            return total.add_(new)
        halves = [*total.chunk(2, 2)]
        halves[half] += new
        return torch.cat(halves, 2)

    def _run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = "cpu" if self._attention.kernel == "cpu" else "flash"
        self._attention.picked[kind] += 1
        run = aten._scaled_dot_product_flash_attention
        run = aten._scaled_dot_product_flash_attention_for_cpu if kind == "cpu" else run
        out, sums, *_ = run(query, key, value, 0.0, causal, scale=scale)
        return out, sums

    def _run_backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        given = (gradient, query, key, value, out, sums)
        if self._attention.kernel == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return tuple(run(*given, 0.0, causal, scale=scale))
        lengths = (None, None, query.shape[2], key.shape[2], 0.0, causal)
        seeds = (query.new_empty((), dtype=torch.long), query.new_empty((), dtype=torch.long))
        return tuple(aten._scaled_dot_product_flash_attention_backward(*given, *lengths, *seeds, scale=scale))


class _Joined:
    """The attention to several runs of keys, joined by their row sums."""

    out: torch.Tensor
    sums: torch.Tensor

    def add(self, out: torch.Tensor, sums: torch.Tensor, *, last_half: bool) -> None:
        """Join attention to more keys, of all queries or of their last half."""
        sums = sums.unsqueeze(-1)
        if not hasattr(self, "out"):
            self.out, self.sums = out, sums
            return
        before, sums_before = ((x.chunk(2, 2)[1] if last_half else x) for x in (self.out, self.sums))
        joined = before - (sums - sums_before).sigmoid() * (before - out)
        joined_sums = sums_before - torch.nn.functional.logsigmoid(sums_before - sums)
        if last_half:
            joined_sums = torch.cat([self.sums.chunk(2, 2)[0], joined_sums], 2)
            joined = torch.cat([self.out.chunk(2, 2)[0], joined], 2)
        self.out, self.sums = joined, joined_sums


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, ring: _Ring, scale: float | None) -> torch.Tensor:
        out, sums = ring.operator(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.ring, ctx.scale = ring, scale
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *ctx.ring.attend_backward(gradients[0], ctx.saved_tensors, ctx.scale), None, None
