"""Makes every trouble of docs/troubleshooting.md and prints the messages as JSON; a program, run by the page's test."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as torch_checkpoint

import lowtide
from lowtide import simdevice
from lowtide.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

TROUBLES: list[Callable[[], Any]] = []


def trouble(function: Callable[[], Any]) -> Callable[[], Any]:
    TROUBLES.append(function)
    return function


def main() -> None:
    warnings.filterwarnings("ignore", message="(?!lowtide)")
    json.dump([message_of(function) for function in TROUBLES], sys.stdout)


def message_of(function: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="lowtide: ")
            function()
    except Exception as error:  # noqa: BLE001  (whatever it is, the page must know it)
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function.__name__} makes no trouble")


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))


def llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).train()


def ids() -> torch.Tensor:
    return torch.randint(0, 64, (1, 12))


# These two come first: there is no accelerator yet.


@trouble
def offload_on_the_cpu() -> None:
    lowtide.apply(stack(), "recompute+offload")


@trouble
def device_that_is_not_there() -> None:
    simdevice.stats()


@trouble
def out_of_memory() -> None:
    simdevice.enable(memory="64MiB")
    torch.empty(2**27, device="sim")


@trouble
def ready_twice() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return torch_checkpoint.checkpoint(self.layer, x, use_reentrant=True)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Reentrant(), find_unused_parameters=True)
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()


@trouble
def nothing_is_tiled() -> None:
    model = llama()
    lowtide.apply(model, "recompute+tile(loss)")
    model.model(ids(), use_cache=False).last_hidden_state.sum().backward()


def inside_another_checkpoint(policy: str) -> None:
    model = stack()
    lowtide.apply(model, policy)
    x = torch.randn(4, 8, requires_grad=True)
    for block in model:
        x = torch_checkpoint.checkpoint(block, x, use_reentrant=False)
    x.sum().backward()


@trouble
def offload_inside_another_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inside_another_checkpoint(f"recompute+offload(disk={folder}, tmpfs)")


@trouble
def recompute_inside_another_checkpoint() -> None:
    inside_another_checkpoint("recompute")


@trouble
def a_rule_for_a_part_of_a_block() -> None:
    lowtide.apply(llama(), "none; *.mlp: recompute")


@trouble
def regions_that_are_not_called() -> None:
    lowtide.apply(llama().model, "recompute", regions=["layers"])


@trouble
def a_part_of_a_model() -> None:
    model = llama()
    lowtide.apply(model, "recompute")
    lowtide.apply(model.model.layers[:1], "none; 0: recompute", regions=["0"])


class ByHand(torch.autograd.Function):
    """Runs blocks without gradients, and differentiates them in a backward of its own, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.Sequential) -> Any:
        ctx.layers = layers
        ctx.save_for_backward(x)
        return layers(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                for part in layer:
                    y = part(y)
        torch.autograd.backward(y, grads)
        return x.grad, None


@trouble
def evaluation_mode() -> None:
    model = llama().eval()
    lowtide.apply(model, "recompute")
    model(input_ids=ids(), labels=ids()).loss.backward()


@trouble
def nothing_is_recomputed() -> None:
    model = stack()
    lowtide.apply(model, "recompute")
    ByHand.apply(torch.randn(4, 8, requires_grad=True), model).sum().backward()


@trouble
def patch_is_never_called() -> None:
    lowtide.patch_torch().remove()


def squares(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().sum()


@trouble
def inside_torch_func_grad() -> None:
    lowtide.apply(model := stack(), "recompute")
    torch.func.grad(squares(model))(torch.randn(4, 8))


@trouble
def backward_after_vmap() -> None:
    lowtide.apply(model := stack(), "recompute")
    torch.vmap(squares(model))(torch.randn(3, 4, 8)).sum().backward()


@trouble
def offload_inside_vmap() -> None:
    lowtide.apply(model := stack().to("sim"), "recompute+offload")
    torch.vmap(squares(model))(torch.randn(3, 4, 8, device="sim"))


@trouble
def tiles_inside_vmap() -> None:
    linear = nn.Linear(8, 8)
    torch.vmap(lambda x: lowtide.tile(linear, x, tokens=2))(torch.randn(3, 4, 8))


@trouble
def in_place_with_torch() -> None:
    x = torch.randn(4, requires_grad=True).clone()
    y = x.square().sum()
    x.add_(1)
    y.backward()


@trouble
def in_place() -> None:
    model = stack().to("sim")
    lowtide.apply(model, "recompute+offload")
    x = torch.randn(1024, 8, device="sim", requires_grad=True).clone()
    y = model(x)
    x.add_(1)
    y.sum().backward()


@trouble
def in_place_weight() -> None:
    linear = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    y = lowtide.tile(linear, torch.randn(1, 16, 8, requires_grad=True), tokens=4)
    with torch.no_grad():
        linear[0].weight.add_(1)
    y.sum().backward()


@trouble
def logits_are_read() -> None:
    model = llama()
    lowtide.apply(model, "tile(loss)")
    model(input_ids=ids(), labels=ids()).logits.argmax(-1)


@trouble
def not_token_wise() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.down(self.up(x - x.mean(1, keepdim=True)).relu())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mixes()

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.mlp(x)

    model = nn.Sequential(*(Block() for _ in range(2)))
    lowtide.apply(model, "tile(mlp, tokens=4)")
    model(torch.randn(1, 16, 8))


@trouble
def tiled_power_iteration() -> None:
    model = stack()
    for mlp in model:
        nn.utils.parametrizations.spectral_norm(mlp[0])
    lowtide.apply(model, "tile(mlp, tokens=4)")
    model(torch.randn(1, 16, 8))


@trouble
def cache_with_content() -> None:
    model = llama()
    lowtide.apply(model, "recompute")
    cache = transformers.DynamicCache(config=model.config)
    for layer in range(2):
        cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), layer)
    model(input_ids=ids(), labels=ids(), past_key_values=cache).loss.backward()


@trouble
def no_blocks() -> None:
    lowtide.apply(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "recompute")


@trouble
def no_directory() -> None:
    lowtide.apply(stack(), "recompute+offload(disk=/no/such/directory)")


@trouble
def no_room_on_the_disk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lowtide.apply(stack(), f"recompute+offload(disk={folder}, limit=9000TiB, tmpfs)")


@trouble
def unknown_word() -> None:
    Policy.parse("recompute+ofload")


@trouble
def rule_that_fits_nothing() -> None:
    lowtide.apply(stack(), "recompute; visual.*: none")


@trouble
def recomputed_shapes() -> None:
    rows = iter((4, 0))  # as weights that are gathered in forward, and released in the recompute
    x = torch.randn(4, 4, requires_grad=True)
    torch_checkpoint.checkpoint(lambda x: x[: next(rows)].exp().sum(), x, use_reentrant=False).backward()


@trouble
def one_graph_with_a_seam() -> None:
    model = stack()
    lowtide.apply(model, "recompute")
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 8))


@trouble
def second_derivative() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = lowtide.linear_cross_entropy(hidden, torch.randn(16, 8), torch.randint(0, 16, (4,)))
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    grad.sum().backward()


@trouble
def nothing_to_audit() -> None:
    lowtide.audit(stack().requires_grad_(requires_grad=False), (torch.randn(4, 8),))


@trouble
def device_rules() -> None:
    simdevice.enable(on_violation="raise")
    x = torch.randn(256, device="sim")
    side = torch.Stream("sim")
    host = torch.empty(256, pin_memory=True)
    with side:
        host.copy_(x, non_blocking=True)
    host.sum().item()
    torch.ones(1, device="sim").add_(1)


if __name__ == "__main__":
    main()
