"""Tiled MLPs in the cases that training meets: does every gradient equal the untiled module's?

Modules are in double precision, so that a difference is a fault. Each engine is called as its documentation says.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from bench import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    Engine = Callable[[nn.Module, torch.Tensor, int], Any]

ACCURACY = 1e-9
"""Relative."""


class Mlp(nn.Module):
    """Llama's, with dropout if it is asked for."""

    def __init__(
        self, hidden: int = 32, inner: int = 80, dtype: torch.dtype = torch.double, dropout: float = 0
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        self.hidden, self.dropout = hidden, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(F.dropout(x, self.dropout))) * self.up(x))


class Routed(nn.Module):
    """Two experts and a router whose logits are an output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2, dtype=torch.double)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x)
        weights = logits.softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), logits


def untiled(mlp: nn.Module, x: torch.Tensor, _shards: int) -> Any:
    return mlp(x)


def ours(mlp: nn.Module, x: torch.Tensor, shards: int) -> Any:
    return lowtide.tile(mlp, x, tokens=-(-x.shape[:-1].numel() // shards))


def deepspeed() -> Engine:
    tiled = peers.load("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
    return lambda mlp, x, shards: tiled.apply(lambda m, t: m(t), mlp, x, shards, list(mlp.parameters()))


def liger() -> Engine:
    tiled = peers.load("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
    return lambda mlp, x, shards: tiled(lambda m, t: m(t), mlp, x, shards)


def unsloth() -> Engine:
    tiled = peers.load("unsloth_zoo.tiled_mlp").TiledMLP

    def run(mlp: nn.Module, x: torch.Tensor, shards: int) -> Any:
        count = x.shape[:-1].numel()
        chunk = -(-count // shards)
        return tiled.apply(mlp.forward, mlp, x, True, max(1, count // chunk), chunk)

    return run


ENGINES: dict[str, Callable[[], Engine]] = {
    "untiled": lambda: untiled,
    "Lowtide": lambda: ours,
    "DeepSpeed TiledMLP": deepspeed,
    "Liger tiled MLP": liger,
    "unsloth tiled MLP": unsloth,
}


def gradients(engine: Engine, module: nn.Module, x: torch.Tensor, shards: int = 4) -> list[torch.Tensor | None]:
    module.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    output = engine(module, x, shards)
    parts = output if isinstance(output, tuple) else (output,)
    sum(part.square().sum() for part in parts).backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def is_right(ours: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or bool((a - b).norm() <= ACCURACY * b.norm()))
        for a, b in zip(ours, expected, strict=True)
    )


def batch(*lead: int, requires_grad: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*lead, 32, dtype=torch.double, requires_grad=requires_grad)


def like_untiled(engine: Engine, module: nn.Module, x: torch.Tensor, shards: int = 4) -> bool:
    return is_right(gradients(engine, module, x, shards), gradients(untiled, module, x, shards))


def case_dense(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 64))


def case_batch_of_three(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(3, 21))


def case_fewer_tokens_than_tiles(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 9), shards=6)


def case_input_without_gradient(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 64, requires_grad=False))


def case_frozen_weights(engine: Engine) -> bool:
    return like_untiled(engine, Mlp().requires_grad_(False), batch(1, 64))


def case_router_logits(engine: Engine) -> bool:
    return like_untiled(engine, Routed(), batch(1, 64))


def case_dropout(engine: Engine) -> bool:
    """Against the tiles one by one with the same random numbers."""
    mlp, x = Mlp(dropout=0.3), batch(1, 64)

    def one_by_one(mlp: nn.Module, x: torch.Tensor, shards: int) -> torch.Tensor:
        return torch.cat([mlp(part) for part in x.chunk(shards, 1)], 1)

    return is_right(gradients(engine, mlp, x), gradients(one_by_one, mlp, x))


def case_hooks_fire_once(engine: Engine) -> bool:
    mlp, fired = Mlp(), []
    for parameter in mlp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    engine(mlp, batch(1, 64), 4).sum().backward()
    return len(fired) == len(list(mlp.parameters()))


def case_autograd_grad(engine: Engine) -> bool:
    mlp, x = Mlp(), batch(1, 64)
    torch.autograd.grad(engine(mlp, x, 4).sum(), x)
    return all(parameter.grad is None for parameter in mlp.parameters())


class Ddp(nn.Module):
    """A tiled MLP behind a layer, as in a model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.first, self.mlp, self.engine = nn.Linear(32, 32, dtype=torch.double), Mlp(), engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.engine(self.mlp, self.first(x), 4)


def _rank(name: str, rank: int, store: str, options: dict[str, bool], results: Any) -> None:
    """One of two processes; it knows the joined batch, and judges its own gradients."""
    try:
        torch.manual_seed(0)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model, reference = Ddp(ENGINES[name]()), Ddp(untiled)
        reference.load_state_dict(model.state_dict())
        batches = [torch.full((1, 64, 32), 0.1 + one, dtype=torch.double) for one in range(2)]
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(batches[rank]).square().mean().backward()
        sum(reference(one).square().mean() / 2 for one in batches).backward()
        results.put(is_right([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]))
    except RuntimeError:
        results.put(False)
    results.close()
    results.join_thread()
    os._exit(0)


def under_ddp(name: str, options: dict[str, bool]) -> bool:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(name, rank, f"{folder}/store", options, results)) for rank in range(2)
        ]
        for process in ranks:
            process.start()
        got = [results.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    return all(got)


CASES: dict[str, Callable[[Engine], bool]] = {
    "dense": case_dense,
    "batch of three": case_batch_of_three,
    "fewer tokens than tiles": case_fewer_tokens_than_tiles,
    "input without gradient": case_input_without_gradient,
    "frozen weights": case_frozen_weights,
    "router logits": case_router_logits,
    "dropout": case_dropout,
    "hooks fire once": case_hooks_fire_once,
    "autograd.grad leaves .grad alone": case_autograd_grad,
}
DDP = {
    "DDP": {},
    "DDP, find_unused_parameters": {"find_unused_parameters": True},
    "DDP, static_graph": {"static_graph": True},
}


def verdict(case: str, engine: Engine) -> str:
    try:
        return "right" if CASES[case](engine) else "wrong"
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is the result)
        return f"raises {type(error).__name__}"
