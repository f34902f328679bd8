"""Instruments that watch one training step from outside, whatever engine runs it.

- Pre-forward hooks count each module's calls, in forward and in backward apart. Pre-hooks, because a recomputation may
  stop early and never reach the end of a module.
- A dispatch mode sees every operator, in recomputations too. It remembers each new storage weakly and by the block that
  made it: what is alive after forward is what the graph holds, through hooks, closures, keywords or caches alike. And
  it takes a checksum of every random draw.
- Hooks on the parameters count how often each is accumulated into.

None of them holds anything alive, and none changes a value.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch import (
    StorageWeakRef,
    TorchDispatchMode,
    current_node,
    is_functorch_wrapped,
    pytree,
    schema_of,
    sequence_number,
)
from lowtide.auditing.comparison import checksum
from lowtide.modules import ancestors, named_modules, named_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType
    from typing import Self


@dataclasses.dataclass(frozen=True)
class Held:
    """A storage that was made in forward, known weakly."""

    reference: StorageWeakRef
    nbytes: int
    block: str

    @property
    def is_alive(self) -> bool:
        return not self.reference.expired()  # type: ignore[no-untyped-call]


class Calls:
    """Counts calls of every module, and knows which blocks are being run now."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self.in_backward = False
        self.forward: collections.Counter[str] = collections.Counter()
        self.backward: collections.Counter[str] = collections.Counter()
        self.inputs: dict[str, list[Held]] = {}
        """The storages that each block was given in forward."""
        self.most_restored_alive = 0
        """In backward: recomputations whose inputs are still alive as another one begins."""
        self._restored: dict[int | str, list[Held]] = {}
        """By recomputation: the inputs of the block that it began with."""
        self.begun: set[str] = set()
        """Blocks that a recomputation began with; others were run again as parts of them, or after them."""
        self._run_again: set[str] = set()
        self._modules = {name: module for name, module in named_modules(model) if takes_hooks(module)}
        self._blocks = set(blocks)
        self._children: dict[str, list[str]] = {}
        self._running: list[str] = []
        self._handles: list[Any] = []

    def runs_in_backward(self, name: str) -> int:
        """How often a block ran again. Engines that replace a block's `forward` run it inside of its hooks: then its
        parts tell, if most of those that forward called were called."""
        if self.backward[name] or not self.forward[name]:
            return self.backward[name]
        parts = list(_called_parts(name, self._children, self.forward))
        again = sorted(-(-self.backward[part] * self.forward[name] // self.forward[part]) for part in parts)
        return again[(len(again) - 1) // 2] if again else 0  # the median; a few may come after an early stop

    @property
    def block(self) -> str:
        """The innermost block that is running, or nothing."""
        return self._running[-1] if self._running else ""

    def __enter__(self) -> Self:
        for name in self._modules:
            self._children.setdefault(name.rpartition(".")[0], []).append(name)
        for name, module in self._modules.items():
            before = functools.partial(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            if name in self._blocks:
                after = functools.partial(self._after, name)
                self._handles.append(module.register_forward_hook(after, always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        (self.backward if self.in_backward else self.forward)[name] += 1
        if name in self._blocks:
            self._running.append(name)
        if self.in_backward:
            self._count_restored(name, (args, kwargs))
        elif name in self._blocks:
            self.inputs.setdefault(name, []).extend(_storages((args, kwargs), name))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        while self._running and self._running.pop() != name:
            pass

    def _count_restored(self, name: str, values: Any) -> None:
        """As a block begins to run again, known by its first part: the inputs of how many others are still there?

        Blocks that run for the same node of the graph belong to one recomputation: they lie inside of one another
        (LongCat's layers hold two attentions each), and what is passed between them is no input that was restored.
        """
        block = next((outer for outer in (name, *ancestors(name)) if outer in self._blocks), None)
        if block is None or block in self._run_again:
            return
        self._run_again.add(block)
        node = current_node()
        recomputation = block if node is None else sequence_number(node)
        if recomputation in self._restored:
            return
        inputs = _storages(values, block)
        given = {held.reference.cdata for held in inputs}
        alive = [
            other
            for other, held in self._restored.items()
            if any(one.is_alive and one.reference.cdata not in given for one in held)
        ]
        self.most_restored_alive = max(self.most_restored_alive, len(alive))
        self._restored[recomputation] = inputs
        self.begun.add(block)


def takes_hooks(module: nn.Module) -> bool:
    """TorchScript's modules take none, and hide their attributes: they are parts of what does."""
    return not isinstance(module, torch.jit.ScriptModule)


def _called_parts(name: str, children: dict[str, list[str]], calls: collections.Counter[str]) -> Iterator[str]:
    """The outermost modules in a module that are called; containers are not, their content is."""
    for child in children.get(name, ()):
        if calls[child]:
            yield child
        else:
            yield from _called_parts(child, children, calls)


def _storages(values: Any, block: str) -> list[Held]:
    """Of the floating-point tensors in a block's arguments: masks and indices are shared and small."""
    found: dict[int, Held] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, nn.Parameter):
            held = _held(leaf, block)
            if held is not None:
                found[held.reference.cdata] = held
    return list(found.values())


def _held(tensor: Tensor, block: str) -> Held | None:
    if tensor.layout is not torch.strided or is_functorch_wrapped(tensor):
        return None
    storage = tensor.untyped_storage()
    return Held(StorageWeakRef(storage), storage.nbytes(), block)  # type: ignore[no-untyped-call]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator: new storages in forward, random draws in forward and in backward."""

    def __init__(self, calls: Calls, device: torch.device, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._device = device.type
        self._known = [held for held in (_held(tensor, "") for tensor in known) if held is not None]
        self._seen = {held.reference.cdata for held in self._known}
        self._held: list[Held] = []
        self.forward_draws: collections.Counter[int] = collections.Counter()
        self.backward_draws: collections.Counter[int] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if _draws(func, args, kwargs or {}):
            draws = self.backward_draws if self._calls.in_backward else self.forward_draws
            draws.update(checksum(tensor) for tensor in tensors)
        if not self._calls.in_backward:
            for tensor in tensors:
                self._remember(tensor)
        return outputs

    def _remember(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device or type(tensor) is not Tensor:
            return
        held = _held(tensor, self._calls.block)
        if held is not None and held.reference.cdata not in self._seen:
            self._seen.add(held.reference.cdata)
            self._held.append(held)

    def alive_bytes(self) -> collections.Counter[str]:
        """Bytes that forward made and that are still held, by block."""
        alive: collections.Counter[str] = collections.Counter()
        for held in self._held:
            if held.is_alive:
                alive[held.block] += held.nbytes
        return alive


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers. Fused attention and fused recurrent layers are tagged as if they did,
    but do with dropout only; and their backward is told the numbers that forward drew."""
    if torch.Tag.nondeterministic_seeded not in func.tags or schema_of(func).name.endswith("_backward"):
        return False
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


class Accumulations:
    """How often each parameter is accumulated into. DDP counts on once."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._count, name)
            )
            for name, parameter in named_parameters(model)
            if parameter.requires_grad and parameter.is_leaf
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, name: str, parameter: Tensor) -> None:
        del parameter
        self.counts[name] += 1


def in_the_graph_of(loss: Tensor, model: nn.Module) -> set[str]:
    """The parameters that can be reached from the loss: what DDP's find_unused_parameters looks for."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return found
