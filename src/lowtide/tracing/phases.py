"""Tracks where a real step is: its phase, and the region that runs, whatever engine runs it.

In forward, hooks on the regions tell. In backward nothing is put into the graph: every node carries the number that it
got in forward, and the numbers that a region's forward handed out are known, so the node that runs now tells the
region. A recomputation is code that runs in backward with gradients on, or that calls a module. It ends with the node
that needed it, or as soon as that node's own work begins.

Each stretch of the step is recorded as a `Span`. A span ends with the last thing that was seen of it, not when the next
one begins.
"""

from __future__ import annotations

import bisect
import collections
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import ENGINE_FUNCTION, current_node, graph_task_id, next_sequence_number, sequence_number
from lowtide.modules import ancestors, named_modules
from lowtide.recording import Moment

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from torch import nn

_ACCUMULATES = 2**62
"""Nodes that accumulate a parameter's gradient have numbers above this: they belong to whichever region runs."""

_IN_BETWEEN = (
    __file__,
    str(Path(__file__).with_name("ledger.py")),
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
"""Files whose code is on the call stack between an operation and this module."""

_FUNCTIONS = "/torch/autograd/function.py"
"""The file that calls the backward of a custom `Function`."""


class Span(NamedTuple):
    """A stretch of the step: `forward`, `recompute`, `backward`, `optimizer`, or `between` two of them."""

    phase: str
    region: str
    """Empty outside all regions."""
    begin: float
    end: float
    """Seconds since the trace began, on the host's clock."""


class _Numbers(NamedTuple):
    """The numbers that the nodes of a region's forward got: the first, and the one past the last."""

    first: int
    end: int
    region: str


class _Recompute(NamedTuple):
    """A recomputation that runs now."""

    region: str
    node: int | None
    """The number of the node that needed it."""
    depth: int
    """How many modules were being called when it began."""


class PhaseTracker:
    """Knows the current moment of the step. `on_move` is called with the next moment, before it becomes current."""

    def __init__(self, regions: Iterable[str], clock: Callable[[], float], on_move: Callable[[Moment], None]) -> None:
        self.moment = Moment("between", "")
        self.spans: list[Span] = []
        self.called_again: collections.Counter[str] = collections.Counter()
        """How often each region itself was called in a backward: somebody's checkpoint runs it again."""
        self.in_optimizer = False
        self._regions = set(regions)
        self._clock = clock
        self._on_move = on_move
        self._began = self._seen = clock()
        self._calls: list[str] = []
        self._numbers: list[_Numbers] = []
        self._first = 0
        self._recompute: _Recompute | None = None
        self._tasks: dict[int, tuple[str | None, bool]] = {}
        """For each backward: the region that it is a part of, and whether it runs with gradients on."""

    def watch(self, model: nn.Module, stack: contextlib.ExitStack) -> None:
        """Put hooks on the modules; `stack` removes them. TorchScript modules take none, and count as their parents."""
        stack.callback(self._end)
        for name, module in named_modules(model):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            before = functools.partial(self._before, name)
            after = functools.partial(self._after, name)
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _end(self) -> None:
        self._move(Moment("between", ""))
        self._on_move = lambda _: None  # a cycle would keep the model alive

    def update(self) -> Moment:
        """Find out where the step is now, at the beginning of each operation."""
        task = graph_task_id()
        self._move(self._in_forward() if task < 0 else self._in_backward(task))
        return self.moment

    def extend(self) -> None:
        """Extend the current span: an operation has ended in it."""
        self._seen = self._clock()

    def _in_forward(self) -> Moment:
        self._recompute = None
        if self.in_optimizer:
            return Moment("optimizer", "")
        if self.moment.phase == "forward":
            return self.moment
        return Moment("forward" if self._calls else "between", "")

    def _in_backward(self, task: int) -> Moment:
        node = current_node()
        number = None if node is None else sequence_number(node)
        outer, keeps_graph = self._task(task)
        if self._recompute is not None and self._continues(self._recompute, number, keeps_graph=keeps_graph):
            return self.moment
        self._recompute = None
        region = outer if outer is not None else self._region_of(number)
        if torch.is_grad_enabled() and not keeps_graph:
            self._recompute = _Recompute(region, number, len(self._calls))
            return Moment("recompute", region)
        return Moment("backward", region)

    def _task(self, task: int) -> tuple[str | None, bool]:
        """Describe a backward. One inside a recomputation is that region's: a reentrant checkpoint runs one."""
        if task not in self._tasks:
            outer = None if self._recompute is None else self._recompute.region
            self._tasks[task] = (outer, torch.is_grad_enabled() and not self._calls)
            self._recompute = None
        return self._tasks[task]

    def _continues(self, recompute: _Recompute, number: int | None, *, keeps_graph: bool) -> bool:
        if number != recompute.node:
            return False
        if len(self._calls) > recompute.depth or (torch.is_grad_enabled() and not keeps_graph):
            return True
        return not _is_nodes_own_work()  # a checkpoint detaches tensors, and a region may use no_grad

    def _region_of(self, number: int | None) -> str:
        if number is None or not 0 <= number < _ACCUMULATES:
            return self.moment.region
        place = bisect.bisect_right(self._numbers, number, key=lambda numbers: numbers.first) - 1
        if place < 0 or number >= self._numbers[place].end:
            return ""
        return self._numbers[place].region

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        del module, args
        task = graph_task_id()
        if task >= 0:
            self.called_again[name] += name in self._regions
            self._begin_recompute(name, task)
        elif not name:
            self._calls.clear()  # an interrupt may have left some
            self._move(Moment("forward", ""))
        elif name in self._regions:
            self._first = next_sequence_number()
            self._move(Moment("forward", name))
        elif self.moment.phase != "forward":
            self._move(Moment("forward", ""))
        self.extend()
        self._calls.append(name)

    def _begin_recompute(self, name: str, task: int) -> None:
        region = next((outer for outer in (name, *ancestors(name)) if outer in self._regions), None)
        self._task(task)
        node = current_node()
        number = None if node is None else sequence_number(node)
        if region is None or (self._recompute is not None and self._recompute[:2] == (region, number)):
            return
        self._recompute = _Recompute(region, number, len(self._calls))
        self._move(Moment("recompute", region))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        while self._calls and self._calls.pop() != name:
            pass
        self.extend()
        if name in self._regions and self.moment == Moment("forward", name):
            self._remember_numbers(_Numbers(self._first, next_sequence_number(), name))
            self._move(Moment("forward", ""))

    def _remember_numbers(self, numbers: _Numbers) -> None:
        if numbers.end > numbers.first:
            bisect.insort(self._numbers, numbers)

    def _move(self, moment: Moment) -> None:
        if moment == self.moment:
            return
        self._on_move(moment)
        if self._seen > self._began:
            self.spans.append(Span(*self.moment, self._began, self._seen))
        self.moment = moment
        self._began = self._seen = self._clock()


def _is_nodes_own_work() -> bool:
    """Return whether an operation is a node's own work: no Python code called it, except a `Function`'s backward."""
    frame = sys._getframe()
    outermost = ""
    while frame is not None and frame.f_code.co_name != ENGINE_FUNCTION:
        file = frame.f_code.co_filename
        outermost = outermost if file.endswith(_IN_BETWEEN) else file
        frame = frame.f_back  # type: ignore[assignment]
    return not outermost or outermost.endswith(_FUNCTIONS)
