"""One peer's patch of torch's checkpoint and ours on top of it, in processes of their own.

A peer is known here by the path of a function `apply_it()` that patches this process as the peer's users would: it runs
in ranks, never in the process of the tests, because a peer's import changes more than it says. What comes back is
plain data.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import sys
import types
import warnings

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice

LAYERS = 4
WIDTH = 64
ROWS = 128
BOUNDARY = ROWS * WIDTH * 8
"""Bytes of a checkpointed layer's input, in double precision."""
LEAVES = (LAYERS - 1) * BOUNDARY
"""What Lowtide moves: the last layer's input, which backward needs first, stays."""

REENTRANT = {"True": {"use_reentrant": True}, "False": {"use_reentrant": False}, "not passed": {}}
READY_TWICE = "Expected to mark a variable ready only once"


def skip_without(package: str) -> None:
    """Skips a test module; looking for a package does not import it. `make test-peers` checks that all are there."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-peers", allow_module_level=True)


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


class Chain(nn.Module):
    """Layers as frameworks checkpoint them: through torch's function, looked up at each call. One is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)).double()
        self.unused = nn.Linear(WIDTH, WIDTH).double()
        self.options: dict | None = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.options is None else torch.utils.checkpoint.checkpoint(layer, x, **self.options)
        return x


def rows(rank: int = 0) -> torch.Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.double)


@dataclasses.dataclass
class Step:
    """What a step did."""

    d2h: int
    h2d: int
    gradients: dict

    @property
    def moved(self) -> tuple[int, int]:
        return self.d2h, self.h2d

    def assert_same_gradients(self, other: Step) -> None:
        assert self.gradients.keys() == other.gradients.keys()
        assert all((grad == other.gradients[name]).all() for name, grad in self.gradients.items())


def step(model: nn.Module, run) -> Step:
    """One forward and backward of `run()`, and the bytes that crossed between device and host meanwhile."""
    model.zero_grad()
    simdevice.reset()
    run().backward()
    stats = simdevice.stats()
    return Step(
        stats.d2h_bytes,
        stats.h2d_bytes,
        {name: p.grad.cpu().numpy() for name, p in model.named_parameters() if p.grad is not None},
    )


@dataclasses.dataclass
class Seen:
    """What was seen with a peer's patch in force: its own work, ours on top, and what is there afterwards."""

    plain: Step
    theirs: Step
    ours: Step
    calls: int
    warned: list[str]
    changed: list[str]
    """Names of functions and classes, in all modules, that mean something else after ours was removed."""
    during: list[str]
    """The same, while ours was in force."""


def patched_chain(rank: int, apply_it: str, options: dict) -> Seen:
    chain = Chain().to("sim")
    x = rows(rank).to("sim").requires_grad_()

    def run():
        return chain(x).square().mean()

    plain = step(chain, run)
    pkgutil.resolve_name(apply_it)()
    chain.options = options
    return _watch(plain, chain, run)


def patched_llama(rank: int, apply_it: str, options: dict | None) -> Seen:
    """transformers' own switch, which binds the function that it finds at that moment."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train().to("sim")
    ids = torch.randint(0, 128, (2, 64)).to("sim")

    def run():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def enable_and_run():
        model.gradient_checkpointing_enable(options)
        return run()

    plain = step(model, run)
    pkgutil.resolve_name(apply_it)()
    return _watch(plain, model, enable_and_run)


def _watch(plain: Step, model: nn.Module, run) -> Seen:
    theirs = step(model, run)
    before = _names()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch = lowtide.patch_torch(offload="host")
    during = _changed(before)
    ours = step(model, run)
    patch.remove()
    warned = [str(warning.message) for warning in caught]
    return Seen(plain, theirs, ours, patch.calls, warned, _changed(before), during)


def ddp_gradients(rank: int, apply_it: str, engine: str, options: dict) -> tuple[dict, tuple[int, int]]:
    """The gradients that DDP makes under a peer's patch, and the bytes moved: by DDP alone, the peer, ours on top."""
    pkgutil.resolve_name(apply_it)()
    chain = Chain().to("sim")
    chain.options = None if engine == "plain" else options
    before = _names()
    patch = lowtide.patch_torch(offload="host") if engine == "lowtide" else None
    parallel = DistributedDataParallel(chain, find_unused_parameters=True)
    x = rows(rank).to("sim").requires_grad_()
    for _ in range(2):  # the second step runs with rebuilt buckets
        done = step(chain, lambda: parallel(x).square().mean())
    if patch is not None:
        patch.remove()
        assert _changed(before) == []
    return done.gradients, done.moved


def moved_beyond(results: list, plain: list) -> list[tuple[int, int]]:
    """By rank: the bytes that moved besides those of DDP's collectives, which are staged through the host here."""
    return [
        (d2h - plain_d2h, h2d - plain_h2d)
        for (_, (d2h, h2d)), (_, (plain_d2h, plain_h2d)) in zip(results, plain, strict=True)
    ]


def joined_chain() -> Chain:
    """The plain model in one process on both ranks' rows, after its backward."""
    chain = Chain()
    sum(chain(rows(rank)).square().mean() / 2 for rank in range(2)).backward()
    return chain


def _names() -> dict:
    return {
        (module_name, name): held
        for module_name, module in list(sys.modules.items())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if type(held) is types.FunctionType or type(held) in (type, torch.autograd.function.FunctionMeta)
    }


def _changed(before: dict) -> list[str]:
    return [
        f"{module}.{name}"
        for (module, name), held in before.items()
        if sys.modules[module].__dict__.get(name) is not held
    ]
