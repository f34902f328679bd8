"""One training step, observed: forward, loss, backward, from the same weights, buffers and random state each time.

The model is left as it was: gradients, buffers, mode and the caller's random state are put back. Only the CPU and the
devices that the model is on are seeded.
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
from lowtide.auditing.instruments import Accumulations, Calls, Operators, in_the_graph_of, takes_hooks
from lowtide.modules import device_of, named_buffers, named_parameters
from lowtide.objective import objective, tensors_of
from lowtide.randomness import preserved_generators, set_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from lowtide.auditing.instruments import Held
    from lowtide.auditing.stacks import Stack


@dataclasses.dataclass
class Observation:
    """Everything that the checks go by."""

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    forward_calls: collections.Counter[str]
    backward_calls: collections.Counter[str]
    held_bytes: collections.Counter[str]
    """Alive after forward, by block; what lies outside of blocks has no name."""
    inputs: dict[str, list[tuple[int, bool]]]
    """By block that a recomputation began with: bytes of the inputs that are its own, and whether they are still in
    memory after forward."""
    most_restored_alive: int
    forward_draws: collections.Counter[int]
    """Checksums of all random numbers that were drawn."""
    backward_draws: collections.Counter[int]
    accumulations: collections.Counter[str]
    in_graph: set[str]

    @property
    def total_held(self) -> int:
        return sum(self.held_bytes.values())


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is run: the same for the reference and for every candidate."""

    batch: Any
    loss: Callable[[Any], Tensor] | None
    stacks: tuple[Stack, ...]
    seed: int
    dropout: float | None

    def call(self, model: nn.Module) -> Any:
        """The model's outputs on a copy of the batch: inputs that need a gradient do so there, too."""
        batch = pytree.tree_map(_copied_input, self.batch)
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)

    def scalar(self, outputs: Any) -> Tensor:
        return objective(outputs, self.loss)

    @contextlib.contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """Train mode, dropout as asked for, no gradients, the seed; everything as before at the end."""
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        modes = [(module, module.training) for module in model.modules()]
        with preserved_generators(model) as devices, _own_buffers(model), _dropout(model, self.dropout):
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
    """Run one step and write down what happened."""
    known = [*model.parameters(), *model.buffers()]
    calls = Calls(model, {block for stack in experiment.stacks for block in stack.blocks})
    operators = Operators(calls, device_of(model), known)
    with experiment.prepared(model), Accumulations(model) as accumulations, calls, operators:
        outputs = experiment.call(model)
        loss = experiment.scalar(outputs)
        kept = {name: tensor.detach().clone() for name, tensor in tensors_of(outputs).items()}
        del outputs
        in_graph = in_the_graph_of(loss, model)
        held_bytes = operators.alive_bytes()
        inputs = {name: [(held, held.is_alive) for held in given] for name, given in calls.inputs.items()}
        for tensor in kept.values():
            held_bytes[""] -= tensor.untyped_storage().nbytes()  # ours
        calls.in_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        return Observation(
            loss=loss.detach().clone(),
            outputs=kept,
            gradients={name: _copied(parameter.grad) for name, parameter in named_parameters(model)},
            buffers={name: buffer.detach().clone() for name, buffer in named_buffers(model)},
            forward_calls=calls.forward,
            backward_calls=collections.Counter({**calls.backward, **_runs_of_blocks(calls, experiment)}),
            held_bytes=held_bytes,
            inputs=_own_inputs({name: given for name, given in inputs.items() if name in calls.begun}),
            most_restored_alive=calls.most_restored_alive,
            forward_draws=operators.forward_draws,
            backward_draws=operators.backward_draws,
            accumulations=accumulations.counts,
            in_graph=in_graph,
        )


def gradients_of(model: nn.Module, experiment: Experiment, meddle: Callable[[], None]) -> dict[str, Tensor | None]:
    """The gradients of a step in which something is done between forward and backward."""
    with experiment.prepared(model):
        loss = experiment.scalar(experiment.call(model))
        meddle()
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: _copied(parameter.grad) for name, parameter in named_parameters(model)}


def _runs_of_blocks(calls: Calls, experiment: Experiment) -> dict[str, int]:
    return {block: calls.runs_in_backward(block) for stack in experiment.stacks for block in stack.blocks}


def _own_inputs(inputs: dict[str, list[tuple[Held, bool]]]) -> dict[str, list[tuple[int, bool]]]:
    """Without what several blocks share, such as position embeddings: that may well stay."""
    givers = collections.Counter(held.reference.cdata for given in inputs.values() for held, _ in given)
    return {
        name: [(held.nbytes, is_alive) for held, is_alive in given if givers[held.reference.cdata] == 1]
        for name, given in inputs.items()
    }


def _copied_input(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return value.detach().clone().requires_grad_(value.requires_grad)


def _copied(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().clone()


@contextlib.contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that forward replaces come back, and those that it adds go. With them what else their module remembers:
    RoPE replaces its frequencies and writes down for which length."""
    held = [
        (module, dict(buffers_of(module)), _attributes(module)) for module in model.modules() if takes_hooks(module)
    ]
    try:
        yield
    finally:
        for module, buffers, attributes in held:
            if _are_others(buffers_of(module), buffers):
                _put_back(buffers_of(module), buffers)
                _put_back(vars(module), attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return vars(module) | {NON_PERSISTENT: set(getattr(module, NON_PERSISTENT))}


def _are_others(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() != before.keys() or any(now[name] is not value for name, value in before.items())


def _put_back(now: MutableMapping[str, Any], before: Mapping[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


@contextlib.contextmanager
def _dropout(model: nn.Module, probability: float | None) -> Iterator[None]:
    """Every dropout of the model at one probability: its modules, and the numbers that attention reads."""
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
    """Numbers that forward reads. A ratio of zero is none: it may have kept the layer from being built that it asks for
    (PP-DocLayoutV3)."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or name == "drop_rate") and "layer" not in name
        if value > 0 or not name.endswith("ratio")
    ]
