"""Runs one training step and observes it: forward, loss, backward, always from the same weights, buffers and seed.

An `Experiment` says what is run, `observe` runs it on a model under the instruments, and an `Observation` holds what
was seen. The model is left as it was: gradients, buffers, mode and the caller's random state are put back. Only the
CPU's generators and those of the model's devices are seeded.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch import NON_PERSISTENT, DropoutNd, buffers_of, pytree
from lowtide.auditing.instruments import Accumulations, Calls, Operators, parameters_in_graph, takes_hooks
from lowtide.modules import device_of, named_buffers, named_parameters
from lowtide.objective import objective, tensors_of
from lowtide.randomness import preserved_generators, set_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from lowtide.auditing.comparison import Gradients
    from lowtide.auditing.instruments import TrackedStorage
    from lowtide.auditing.stacks import Stack


@dataclasses.dataclass
class Observation:
    """Everything that the checks look at in one run."""

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: Gradients
    buffers: dict[str, Tensor]
    forward_calls: collections.Counter[str]
    """Calls of every module in forward."""
    backward_calls: collections.Counter[str]
    held_bytes: collections.Counter[str]
    """Bytes alive after forward, by block; the empty name stands for everything outside of blocks."""
    inputs: dict[str, list[tuple[int, bool]]]
    """For each block that a recompute began with: the bytes of inputs that no other block has, and whether they were
    still in memory after forward."""
    most_restored_alive: int
    """How many recomputes at most had inputs that were still alive as another recompute began."""
    forward_draws: collections.Counter[int]
    """Checksums of all random numbers that were drawn."""
    backward_draws: collections.Counter[int]
    accumulations: collections.Counter[str]
    """How often each parameter accumulated a gradient."""
    in_graph: set[str]
    """Parameters that the loss's graph reaches."""
    forward_operators: collections.Counter[tuple[str, str]]
    """Calls of the operators that compute something, by block and name."""
    backward_operators: collections.Counter[str]

    @property
    def total_held(self) -> int:
        return sum(self.held_bytes.values())


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is run: the same for the reference and for every set-up."""

    batch: Any
    loss: Callable[[Any], Tensor] | None
    stacks: tuple[Stack, ...]
    seed: int
    dropout: float | None

    @property
    def blocks(self) -> list[str]:
        return [block for stack in self.stacks for block in stack.blocks]

    def call(self, model: nn.Module) -> Any:
        """Call the model with a copy of the batch. A copied input requires a gradient if the original does."""
        batch = pytree.tree_map(_copy_input, self.batch)
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)

    def objective(self, outputs: Any) -> Tensor:
        return objective(outputs, self.loss)

    @contextlib.contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """Set train mode, the dropout asked for and the seed, and clear the gradients; undo all of it afterwards."""
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        modes = [(module, module.training) for module in model.modules()]
        with preserved_generators(model) as devices, _preserved_buffers(model), _with_dropout(model, self.dropout):
            model.train()
            for parameter, _ in gradients:
                parameter.grad = None
            set_seed(self.seed, devices)
            try:
                yield
            finally:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)
                for module, mode in modes:
                    module.training = mode


def observe(model: nn.Module, experiment: Experiment) -> Observation:
    """Run one step of `model` under the instruments, and return what they saw."""
    known = [*model.parameters(), *model.buffers()]
    calls = Calls(model, experiment.blocks)
    operators = Operators(calls, device_of(model), known)
    with experiment.prepared(model), Accumulations(model) as accumulations, calls, operators:
        outputs = experiment.call(model)
        loss = experiment.objective(outputs)
        copies = {name: tensor.detach().clone() for name, tensor in tensors_of(outputs).items()}
        del outputs
        in_graph = parameters_in_graph(loss, model)
        held_bytes = operators.alive_bytes()
        inputs = {name: [(storage, storage.is_alive) for storage in given] for name, given in calls.inputs.items()}
        for tensor in copies.values():
            held_bytes[""] -= tensor.untyped_storage().nbytes()  # the audit's own, not the graph's
        calls.in_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        return Observation(
            loss=loss.detach().clone(),
            outputs=copies,
            gradients=_gradients(model),
            buffers={name: buffer.detach().clone() for name, buffer in named_buffers(model)},
            forward_calls=calls.forward,
            backward_calls=_backward_calls(calls, experiment),
            held_bytes=held_bytes,
            inputs=_unshared({name: given for name, given in inputs.items() if name in calls.started_recompute}),
            most_restored_alive=calls.most_restored_alive,
            forward_draws=operators.forward_draws,
            backward_draws=operators.backward_draws,
            accumulations=accumulations.counts,
            in_graph=in_graph,
            forward_operators=operators.forward_operators,
            backward_operators=operators.backward_operators,
        )


def gradients_with(model: nn.Module, experiment: Experiment, before_backward: Callable[[], None]) -> Gradients:
    """Run a step without instruments, call `before_backward` in its middle, and return the gradients."""
    with experiment.prepared(model):
        loss = experiment.objective(experiment.call(model))
        before_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)


def _gradients(model: nn.Module) -> Gradients:
    return {name: _copy_gradient(parameter.grad) for name, parameter in named_parameters(model)}


def _copy_gradient(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    unsharded = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return unsharded.detach().clone()


def _copy_input(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return value.detach().clone().requires_grad_(value.requires_grad)


def _backward_calls(calls: Calls, experiment: Experiment) -> collections.Counter[str]:
    blocks = {block: calls.runs_in_backward(block) for block in experiment.blocks}
    return collections.Counter({**calls.backward, **blocks})


def _unshared(inputs: dict[str, list[tuple[TrackedStorage, bool]]]) -> dict[str, list[tuple[int, bool]]]:
    """Leave out what several blocks are given, such as position embeddings: that may well stay in memory."""
    takers = collections.Counter(storage.key for given in inputs.values() for storage, _ in given)
    return {
        name: [(storage.nbytes, is_alive) for storage, is_alive in given if takers[storage.key] == 1]
        for name, given in inputs.items()
    }


@contextlib.contextmanager
def _preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Put back buffers that forward replaces, and remove those that it adds.

    With them goes what else their module remembers: RoPE replaces its frequencies and notes for which length.
    """
    saved = [
        (module, dict(buffers_of(module)), _attributes(module)) for module in model.modules() if takes_hooks(module)
    ]
    try:
        yield
    finally:
        for module, buffers, attributes in saved:
            if _were_replaced(buffers_of(module), buffers):
                _restore(buffers_of(module), buffers)
                _restore(vars(module), attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return vars(module) | {NON_PERSISTENT: set(getattr(module, NON_PERSISTENT))}


def _were_replaced(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() != before.keys() or any(now[name] is not value for name, value in before.items())


def _restore(now: MutableMapping[str, Any], before: Mapping[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


@contextlib.contextmanager
def _with_dropout(model: nn.Module, probability: float | None) -> Iterator[None]:
    """Set every dropout of the model to one probability: the dropout modules, and the numbers that attention reads."""
    changed: list[tuple[nn.Module, str, float]] = []
    for module in model.modules() if probability is not None else ():
        attributes = ["p"] if isinstance(module, DropoutNd) else _dropout_attributes(module)
        for attribute in attributes:
            changed.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, probability)
    try:
        yield
    finally:
        for module, attribute, before in changed:
            setattr(module, attribute, before)


def _dropout_attributes(module: nn.Module) -> list[str]:
    """Return the names of the dropout probabilities that forward reads.

    A ratio of zero is left alone: because of it, the layer that it controls may not have been built (PP-DocLayoutV3).
    """
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or name == "drop_rate") and "layer" not in name
        if value > 0 or not name.endswith("ratio")
    ]
