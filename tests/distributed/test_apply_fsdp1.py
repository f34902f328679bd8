"""An applied model under FSDP1, which gathers weights behind modules' backs: the gradients of the joined batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lowtide
from models import split
from models.mlps import HIDDEN, Gated
from support.foreign_warnings import ignore_warnings_of
from support.joined import assert_joined
from support.launcher import RankFailedError, run_ranks

pytestmark = ignore_warnings_of("torch", "transformers")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.double)
        self.mlp = Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, 24, HIDDEN, dtype=torch.double, generator=torch.Generator().manual_seed(rank))


def trained_weights(rank: int, policy: str, units: str, original: bool, directory: str = "") -> dict:
    net = model()
    handle = lowtide.apply(net, policy.replace("disk", f"disk={directory}"))
    wrap = {"root": None, "layers": ModuleWrapPolicy({Layer}), "linears": ModuleWrapPolicy({nn.Linear})}[units]
    cpu = torch.device("cpu")
    sharded = FullyShardedDataParallel(net, auto_wrap_policy=wrap, use_orig_params=original, device_id=cpu)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        sharded(batch(rank)).square().mean().backward()
        optimizer.step()
    regions = handle.report().regions
    assert all(region.recomputes == region.forwards == 2 for region in regions)
    assert (regions[0].restored_bytes > 0) == ("offload" in policy)  # the last one stays
    with FullyShardedDataParallel.summon_full_params(sharded):
        named = [(name.replace("_fsdp_wrapped_module.", ""), weight) for name, weight in sharded.named_parameters()]
        return {name: weight.detach().clone().numpy() for name, weight in named}


def assert_trained_on_the_joined_batch(per_rank: list[dict]) -> None:
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    for weights in per_rank:
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(torch.from_numpy(weights[name]), parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat"])
@pytest.mark.parametrize("units", ["root", "layers", "linears"])
def test_recompute(units, original):
    assert_trained_on_the_joined_batch(run_ranks(trained_weights, "recompute", units, original))


@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat"])
@pytest.mark.parametrize("units", ["root", "layers"])
def test_tiles_of_mlps_inside_a_unit(units, original):
    assert_trained_on_the_joined_batch(run_ranks(trained_weights, "recompute+tile(mlp,tokens=16)", units, original))


@pytest.mark.parametrize(
    ("units", "original"),
    [
        ("layers", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("root", True), ("layers", False), ("linears", True))
        ),
    ],
)
def test_offload_to_disk(units, original, tmp_path):
    assert_trained_on_the_joined_batch(
        run_ranks(trained_weights, "recompute+offload(disk)", units, original, str(tmp_path))
    )


TILES = ["recompute+tile(attention, mlp, tokens=7)", "recompute+tile(loss, loss_tokens=7)"]


def gradients_of_tiles(rank: int, units: str) -> list[dict]:
    """Return the gradients of a language model, each rank's on the same batch."""
    wrap = {"root": None, "layers": ModuleWrapPolicy({LlamaDecoderLayer})}[units]
    settings = {"auto_wrap_policy": wrap, "use_orig_params": True, "device_id": torch.device("cpu")}
    found = []
    for policy in TILES:
        net = split.make()
        applied = lowtide.apply(net, policy)
        sharded = FullyShardedDataParallel(net, **settings)
        sharded(**split.batch(), use_cache=False).loss.backward()
        cut = {tiled.name for tiled in applied.report().tiles if tiled.tiles > tiled.calls}
        assert cut == ({"lm_head"} if "loss" in policy else {"model.layers.0", "model.layers.1", "model.norm"})
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            named = sharded.named_parameters()
            found.append({n.replace("_fsdp_wrapped_module.", ""): w.grad.clone().numpy() for n, w in named})
    return found


@pytest.mark.parametrize("units", ["layers", pytest.param("root", marks=pytest.mark.slow)])
def test_tiles_of_blocks_and_of_the_loss(units):
    for per_policy in run_ranks(gradients_of_tiles, units):
        assert_joined(per_policy, split.reference(), tolerance=split.TOLERANCE)


def test_units_inside_a_tiled_mlp_are_refused():
    with pytest.raises(
        RankFailedError, match=r"0\.mlp \(Gated\) cannot be tiled: FSDP1 gathers the weights of 0\.mlp\.gate"
    ):
        run_ranks(trained_weights, "recompute+tile(mlp,tokens=16)", "linears", True)
