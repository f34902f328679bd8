"""Tries out on a few tokens whether a block may run in tiles: before its first call that is cut.

First with a token-wise function in the place of attention: then the block must be token-wise like any tiled module
(`probe`), in all that it computes and leaves behind. Then with its attention: the block must return in tiles what it
returns for the whole. What a block adds to its input is compared, for beside the input it may be small.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import no_dispatch_modes, without_parametrize_cache
from lowtide.counters import TileLedger
from lowtide.errors import CannotCutError, OddCallError
from lowtide.tensor_tree import flatten
from lowtide.tiling.attention_call import seen_by
from lowtide.tiling.block_arguments import BlockArguments, sample
from lowtide.tiling.collectives import hold_on_all
from lowtide.tiling.probe import FAILURES, Trial
from lowtide.tiling.remains import tolerance_of
from lowtide.tiling.tiled_block import AttentionCall, BlockSettings, recorded, refuse_other_ranks, run_block
from lowtide.tiling.tiled_function import TiledFunction, gathered
from lowtide.tiling.twin import evaluate, twin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lowtide.tiling.hooks import Hook
    from lowtide.tiling.probe import Finding

_TOKENS, _TILES = 13, 3

_AUTOCAST_TOLERANCE = 2e-2


class BlockTrial:
    """A trial of one block on the first tokens of a call, which are taken when it is made."""

    def __init__(self, name: str, tiled: TiledFunction, named: Mapping[str, Any], length: int) -> None:
        self._name = name
        self._tiled = tiled
        self._count = min(length, _TOKENS)
        self._named = sample(named, length, self._count)

    def run(self, hooks: list[Hook]) -> Finding:
        """Run the block with these hooks of its parts. Raises `CannotCutError` if its call cannot be cut at all."""
        _refuse_what_a_trial_may_miss(self._tiled.module)
        arguments = BlockArguments(self._named, self._count)
        function = functools.partial(_rows, self._tiled.function, arguments)
        tensors = tuple(arguments.take())
        tiled = TiledFunction(function, self._tiled.module)
        with recorded():
            finding = Trial(self._name, tiled, tensors, {}, torch.Size((self._count,))).run(hooks)
            return finding if finding.fault is not None else self._compared(finding, hooks)

    def _compared(self, finding: Finding, hooks: list[Hook]) -> Finding:
        """Add to a finding whether the block in tiles is the whole block, on all ranks that it meets."""
        agree = functools.partial(hold_on_all, finding.groups, next(iter(self._named.values())).device)
        fault = self._find_difference(hooks, agree)
        if not agree(fault is None)[0] and fault is None:
            fault = "another rank found that it is not in tiles what it is for the whole"
        return finding._replace(fault=fault)

    def _find_difference(self, hooks: list[Hook], agree: Callable[..., list[bool]]) -> str | None:
        """Return why the block in tiles is not the whole block, in words; None if it is."""
        try:
            is_same = self._is_same(hooks, agree)
        except OddCallError:  # on all ranks
            raise
        except CannotCutError as reason:
            return str(reason)
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"it fails on a few of its tokens alone ({type(error).__name__}: {error})"
        return None if is_same else "its output in tiles is not what it is for the whole"

    def _is_same(self, hooks: list[Hook], agree: Callable[..., list[bool]]) -> bool:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            no_dispatch_modes(),
            without_parametrize_cache(),
            gathered(self._tiled),
        ):
            whole, tiled = (twin_of(self._tiled, hooks) for _ in range(2))
            for twin in (whole, tiled):
                evaluate(twin.module)  # type: ignore[arg-type]
            plain, _ = flatten(whole.function(**_copied(self._named)))
            settings = BlockSettings(tiles=min(_TILES, self._count), agree=agree)
            cut, _ = flatten(run_block(tiled, _copied(self._named), settings, TileLedger(self._name)))
        hidden = next(iter(self._named.values()))
        pairs = zip(plain, cut, strict=False)
        return len(plain) == len(cut) and all(_is_close(one, two, hidden) for one, two in pairs)


def _copied(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in new containers and tensors: a block may leave something in them."""
    tensors, tree = flatten(dict(named))
    copies: dict[str, Any] = tree.unflatten([tensor.clone() for tensor in tensors])
    return copies


def _is_close(plain: torch.Tensor, cut: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return whether two outputs agree, as far as the type of the numbers can tell; NaN agrees with NaN."""
    if plain.shape != cut.shape or plain.dtype != cut.dtype or not torch.equal(plain.isnan(), cut.isnan()):
        return False
    is_autocast = torch.is_autocast_enabled(plain.device.type)
    tolerance = _AUTOCAST_TOLERANCE if is_autocast else tolerance_of(plain) / 10
    rounding = torch.finfo(plain.dtype).eps * _norm(plain)
    added = plain - hidden if plain.shape == hidden.shape else plain
    return _norm(plain - cut) <= tolerance * _norm(added) + rounding


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().nan_to_num(0.0, 0.0, 0.0).norm())


def _rows(forward: Callable[..., Any], arguments: BlockArguments, *rows: torch.Tensor) -> Any:
    """Run the block on some tokens with a token-wise attention. Return what it adds to its input, tokens first."""
    given = arguments.filled(rows)
    hidden = next(iter(given.values()))
    with seen_by(_TokenWiseAttention()):
        outputs, tree = flatten(forward(**given))
    is_exact = hidden.dtype in (torch.float32, torch.float64)  # else the difference would be noise
    added = [out - hidden if is_exact and out.shape == hidden.shape else out for out in outputs]
    for tensor in added:
        if tensor.shape[:2] != hidden.shape[:2]:
            raise CannotCutError(f"it returns a tensor of shape {tuple(tensor.shape)}, which has no row per token")
    return tree.unflatten([tensor.movedim(1, 0) for tensor in added])


class _TokenWiseAttention:
    """Stands in for attention: each token looks at itself alone, with a weight that its query and key tell."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None

    def __call__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        if self._module not in (None, module):
            return function(module, query, key, value, *more, **options)
        if self._module is module:
            raise CannotCutError("it computes attention more than once")
        self._module = module
        refuse_other_ranks(AttentionCall(function, module, query, key, value, None, options))
        if query.shape[2] != key.shape[2]:
            raise CannotCutError(f"its attention has {key.shape[2]} keys for {query.shape[2]} tokens")
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        weight = (query * key).mean(-1, keepdim=True).sigmoid()
        return (weight * value).transpose(1, 2).contiguous(), None


def _refuse_what_a_trial_may_miss(module: nn.Module | None) -> None:
    """Refuse a convolution, whose effect may be small, and stochastic depth, which is drawn once for all tokens."""
    for path, part in [] if module is None else module.named_modules():
        kernel = getattr(part, "kernel_size", 1)
        if max(kernel if isinstance(kernel, tuple) else (kernel,)) != 1:
            raise CannotCutError(f"its part {path!r} is a convolution over neighbouring tokens")
        kind = type(part).__name__.lower()
        if part.training and any(word in kind for word in _STOCHASTIC_DEPTH) and _drops(part):
            raise CannotCutError(
                f"its part {path!r} drops all tokens of a sample at once, and each tile would draw anew"
            )


_STOCHASTIC_DEPTH = ("droppath", "drop_path", "stochasticdepth", "stochastic_depth")


def _drops(module: nn.Module) -> bool:
    rates = [getattr(module, name, 0.0) for name in ("drop_prob", "p", "drop_path", "drop_rate")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
