"""Tiled modules with collectives inside: tensor parallelism, and experts on several ranks. All ranks try them alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.errors import InvalidValueError, NotTokenWiseError
from models import architectures
from models.in_double import make
from models.mlps import HIDDEN, Gated
from support.launcher import run_ranks

TILED = "tile(mlp, tokens=7)"


class Layer(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN, dtype=torch.double), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def stack(kind=Gated):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind()) for _ in range(2)))


def tokens(*lead, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*lead, HIDDEN, dtype=torch.double)


def gradients_of(net):
    whole = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.parameters())
    return [grad.numpy().copy() for grad in whole]


def assert_close(ours, expected):
    for mine, other in zip(ours, expected, strict=True):
        assert abs(mine - other).max() <= 1e-12 * abs(other).max()


# --- Tensor parallelism ---------------------------------------------------------------------------------------------

PLAN = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


def tensor_parallel(_rank: int, length: int) -> tuple[list, int]:
    net = stack()
    for layer in net:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), PLAN)
    applied = lowtide.apply(net, TILED)
    net(tokens(2, length)).square().sum().backward()
    return gradients_of(net), applied.report().tiles[0].tiles


def test_tensor_parallel():
    """Its hooks make the parts' inputs what the weights are: without them, the trial would fail."""
    net = stack()
    net(tokens(2, 24)).square().sum().backward()
    for ours, tiles in run_ranks(tensor_parallel, 24):
        assert tiles == 7
        assert_close(ours, gradients_of(net))


SCATTERED = {**PLAN, "norm": SequenceParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))}
GATHERED = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
FROM_PARTS = {f"mlp.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
DISTRIBUTED = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)

SEQUENCE_PLANS = {
    "gathered before": {**SCATTERED, "mlp": PrepareModuleInput(**GATHERED)},
    "gathered before, plain": {**SCATTERED, "mlp": PrepareModuleInput(**GATHERED, use_local_output=True)},
    "gathered inside": {**SCATTERED, **FROM_PARTS},
    "gathered inside, plain": {**SCATTERED, **FROM_PARTS, "norm": SequenceParallel(use_local_output=True)},
    "DTensor throughout": {**SCATTERED, "mlp": PrepareModuleInput(**GATHERED), "mlp.down": DISTRIBUTED},
}
"""Each rank has a part of the sequence between MLPs, which gather the tokens and scatter them again."""


def sequence_parallel(rank: int, length: int) -> dict[str, tuple[list, int]]:
    """Return the gradients and the tiles under each plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, plan in SEQUENCE_PLANS.items():
        net = stack()
        for layer in net:
            parallelize_module(layer, mesh, plan)
        applied = lowtide.apply(net, TILED)
        part = tokens(2, length).chunk(mesh.size(), 1)[rank]
        if name == "DTensor throughout":
            part = DTensor.from_local(part, mesh, [Shard(1)])
        loss = net(part).square().sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        found[name] = gradients_of(net), applied.report().tiles[0].tiles
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel(ranks):
    """A tile holds tokens of every rank's part of the sequence, so that each gets its own back."""
    net = stack()
    net(tokens(2, 24)).square().sum().backward()
    for found in run_ranks(sequence_parallel, 24, ranks=ranks):
        for ours, tiles in found.values():
            assert tiles >= 48 // ranks // 7
            assert_close(ours, gradients_of(net))


def uneven_sequence(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = stack()
    for layer in net:
        parallelize_module(layer, mesh, SEQUENCE_PLANS["DTensor throughout"])
    x = distribute_tensor(tokens(2, 25), mesh, [Shard(1)])
    expected = net(x).full_tensor()
    with (
        lowtide.apply(net, TILED),
        pytest.raises(InvalidValueError, match=r"0\.mlp .*25 tokens, goes to each of 2 ranks.*Pad the sequence"),
    ):
        net(x)
    assert torch.equal(net(x).full_tensor(), expected)


def test_a_sequence_that_does_not_divide_by_the_ranks_is_refused_where_it_would_be_cut():
    run_ranks(uneven_sequence)


def split_head(_rank: int) -> None:
    model, batch = make(architectures.llama)
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    expected = model(**batch).loss
    applied = lowtide.apply(model, "tile(loss, loss_tokens=10)")
    with pytest.raises(InvalidValueError, match=r"'lm_head' is split over ranks.*Leave tile\(loss\) out"):
        model(**batch)
    applied.remove()
    assert torch.equal(model(**batch).loss, expected)


def test_a_head_that_is_split_over_ranks():
    run_ranks(split_head)


# --- Experts on several ranks ---------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """Sends rows to other ranks, and gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received)
        return out, None, None


class Spread(Gated):
    """An expert per rank; the sign of a token's first feature says whose it is."""

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        order = (flat[:, 0] > 0).long().argsort(stable=True)
        sent = (flat[:, 0] > 0).long().bincount(minlength=2)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        done = super().forward(Exchange.apply(flat[order], sent, received))
        return Exchange.apply(done, received, sent)[order.argsort()].view(x.shape)


@torch.library.custom_op("lowtide_tests::counts", mutates_args=())
def exchanged_counts(sent: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


@torch.library.custom_op("lowtide_tests::exchange", mutates_args=())
def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


def keep_counts(ctx, inputs, output):
    _, ctx.sent, ctx.received = inputs


exchange.register_autograd(
    lambda ctx, grad: (exchange(grad, ctx.received, ctx.sent), None, None), setup_context=keep_counts
)


class Hidden(Gated):
    """The same, with all exchanges inside operators of its own, as packages for experts have them."""

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        owner = (flat[:, 0] > 0).long()
        order, sent = owner.argsort(stable=True), owner.bincount(minlength=2)
        counts = sent.tolist(), exchanged_counts(sent).tolist()
        done = super().forward(exchange(flat[order], *counts))
        return exchange(done, *reversed(counts))[order.argsort()].view(x.shape)


class Mixing(Spread):
    """Looks at other tokens, on rank 0 only."""

    def forward(self, x):
        out = super().forward(x)
        return out - out.mean(-2, keepdim=True) if dist.get_rank() == 0 else out


def batch(rank: int, lengths) -> torch.Tensor:
    return tokens(*lengths[rank], seed=10 + rank)


def spread(rank: int, lengths: tuple, policy: str, kind=Spread) -> tuple[list, int]:
    net = stack(kind)
    applied = lowtide.apply(net, policy, regions=["*"])
    for _ in range(2):  # the second call is not tried out
        net.zero_grad()
        net(batch(rank, lengths)).square().sum().backward()
    return gradients_of(net), applied.report().tiles[0].tiles if policy == TILED else 0


@pytest.mark.parametrize("lengths", [((2, 24), (2, 24)), ((2, 24), (1, 3)), ((1, 1), (1, 22))], ids=str)
def test_experts_on_two_ranks(lengths):
    """One rank's call may be too short to be cut, or be a lone token: it runs as many tiles as the other one."""
    ours, plain = (run_ranks(spread, lengths, policy, timeout=60) for policy in (TILED, "none"))
    assert ours[0][1] == ours[1][1] > 2
    for (mine, _), (other, _) in zip(ours, plain, strict=True):
        assert_close(mine, other)


def test_experts_whose_exchange_is_an_operator_of_its_own():
    """No dispatch mode sees what is in it. The ranks still run as many tiles as each other."""
    lengths = ((2, 24), (1, 3))
    ours, plain = (run_ranks(spread, lengths, *run, timeout=60) for run in ((TILED, Hidden), ("none",)))
    assert ours[0][1] == ours[1][1] > 2
    for (mine, _), (other, _) in zip(ours, plain, strict=True):
        assert_close(mine, other)


def test_recomputed_experts_on_two_ranks():
    lengths = ((2, 24), (1, 3))
    ours, plain = (run_ranks(spread, lengths, policy, timeout=60) for policy in ("recompute", "none"))
    for (mine, _), (other, _) in zip(ours, plain, strict=True):
        assert_close(mine, other)


WHOLE_MODEL = [
    "recompute+offload(disk)",
    "recompute+tile(attention, mlp, tokens=7)",
    "recompute+tile(loss, loss_tokens=7)",
]


def spread_model(rank: int, policies: list[str], directory: str) -> dict[str, list]:
    """Return the gradients of a language model with experts on two ranks, under each policy."""
    found = {}
    for policy in policies:
        torch.manual_seed(0)
        settings = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2}
        net = LlamaForCausalLM(LlamaConfig(**settings, num_attention_heads=2)).double().train()
        for layer in net.model.layers:
            layer.mlp = Spread()
        applied = lowtide.apply(net, policy.replace("disk", f"disk={directory}"))
        torch.manual_seed(rank)
        ids = torch.randint(1, 60, (2, 40 if rank else 24))
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        report = applied.report()
        cut = {tiled.name for tiled in report.tiles if tiled.tiles > tiled.calls}
        blocks = {"model.layers.0", "model.layers.1", "model.norm"}
        assert cut == (blocks if "attention" in policy else {"lm_head"} if "loss" in policy else set())
        assert policy == "none" or (report.regions[0].restored_bytes > 0) == ("offload" in policy)
        found[policy] = gradients_of(net)
    return found


def test_a_model_with_experts_on_two_ranks(tmp_path):
    """Ranks whose sequences have other lengths run as many tiles of a block."""
    for found in run_ranks(spread_model, ["none", *WHOLE_MODEL], str(tmp_path)):
        for policy in WHOLE_MODEL:
            for mine, other in zip(found[policy], found["none"], strict=True):
                assert abs(mine - other).max() <= 2e-6 * abs(other).max(), policy


def refused(rank: int, lengths: tuple) -> None:
    net = stack(Mixing)
    lowtide.apply(net, TILED)
    says = "depends on the other tokens" if rank == 0 else "another rank found"
    with pytest.raises(NotTokenWiseError, match=rf"0\.mlp .*{says}"):
        net(batch(rank, lengths))


@pytest.mark.parametrize("lengths", [((2, 24), (2, 24)), ((1, 22), (1, 1))], ids=str)
def test_what_one_rank_refuses_all_refuse(lengths):
    run_ranks(refused, lengths, timeout=60)


class Normed(Gated):
    def forward(self, x):
        out = super().forward(x)
        return out - out.mean(-2, keepdim=True)


def short_and_long(rank: int) -> None:
    """Without collectives inside, a rank whose calls are never cut refuses nothing."""
    net = stack(Normed)
    lowtide.apply(net, TILED)
    for _ in range(2):
        net(tokens(1, 5))
    if rank == 0:
        with pytest.raises(NotTokenWiseError):
            net(tokens(2, 24))


def test_a_module_that_is_never_cut():
    run_ranks(short_and_long, timeout=60)
