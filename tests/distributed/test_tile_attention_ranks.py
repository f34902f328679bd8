"""Blocks in tiles on several ranks, which meet in collectives inside, or whose attention reaches other ranks' tokens.

All ranks cut a call alike, or none does: refused by name, or left alone and right.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel

import lowtide
from lowtide.errors import NotTokenWiseError
from models import attentive
from models.tiny import IS_4
from support import ignore_dropped_caches
from support.deepspeed_on_sim import RATE, initialize, use_cpu
from support.foreign_warnings import ignore_warnings_of
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks

pytestmark = [
    ignore_warnings_of("torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention"),
]


LENIENT = "recompute+tile(attention, mlp, tokens=12)"


def blocks_of(applied):
    names = {region.name for region in applied.regions}
    return [tiles for tiles in applied.report().tiles if tiles.name in names]


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed"
)

# --- Ranks whose calls differ ---------------------------------------------------------------------------------------

DIFFERENT = {
    "a mask later": [(None, None), (None, "mask"), ("mask", None)],
    "a mask at once": [(None, "mask"), (None, None)],
    "an odd call": [(None, None), ("weights", None), (None, "mask")],
}
"""What is unusual in each step of two ranks."""


def batch_of(rank: int, kind: str | None) -> dict:
    """Return a batch of another length on each rank, with padding or one that asks for attention weights."""
    given = attentive.batch("llama", length=23 + 8 * rank, padded=kind == "mask")
    return given | ({"output_attentions": True} if kind == "weights" else {})


class Meeting(nn.Module):
    """An MLP in which all ranks meet, as experts on several ranks do."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        here = torch.ones((), dtype=x.dtype)
        dist.all_reduce(here)
        return self.mlp(x) * here / dist.get_world_size()


def meets_in_blocks(rank: int, steps: list) -> list[tuple[float, list[int]]]:
    """Return the error of each step, and how many tiles each block has run by then."""
    plain, model = (attentive.make("llama", "eager", dtype=torch.float32) for _ in range(2))
    for layer in model.model.layers:
        layer.mlp = Meeting(layer.mlp)
    applied = lowtide.apply(model, LENIENT)
    found = []
    for kinds in steps:
        expected = attentive.step(plain, batch_of(rank, kinds[rank]))
        ours = attentive.step(model, batch_of(rank, kinds[rank]))
        ours = {name.replace("mlp.mlp", "mlp"): gradient for name, gradient in ours.items()}
        found.append((attentive.error(ours, expected), [tiles.tiles for tiles in blocks_of(applied)]))
    return found


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_whose_calls_differ_meet_all_the_same(name):
    one, two = run_ranks(meets_in_blocks, DIFFERENT[name], timeout=60)
    assert [error for error, _ in one + two if not error < 1e-4] == []
    assert [tiles for _, tiles in one] == [tiles for _, tiles in two]
    assert one[-1][1][0] - one[0][1][0] >= 6 * (len(one) - 2), "in tiles, but for the odd call"


def under_zero3(rank: int, steps: list) -> tuple[dict, list[int]]:
    """Return the weights after some steps, and how many tiles each block has run."""
    use_cpu()
    import deepspeed

    model = attentive.make("llama", "eager", dtype=torch.float32)
    applied = lowtide.apply(model, LENIENT)
    engine = initialize(model, 3)
    for kinds in steps:
        engine.backward(engine(**batch_of(rank, kinds[rank]), use_cache=False).loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: weight.detach().clone().numpy() for name, weight in model.named_parameters()}
    return weights, [tiles.tiles for tiles in blocks_of(applied)]


@needs_deepspeed
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_whose_calls_differ_under_zero3(name):
    (ours, tiles), (theirs, their_tiles) = run_ranks(under_zero3, DIFFERENT[name], timeout=300)
    assert tiles == their_tiles
    assert min(tiles) >= 6 * (len(DIFFERENT[name]) - 1)
    model = attentive.make("llama", "eager", dtype=torch.float32)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for kinds in DIFFERENT[name]:
        model.zero_grad()
        for rank in range(2):
            (model(**batch_of(rank, kinds[rank]), use_cache=False).loss / 2).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(RATE * weight.grad)
    for parameter, weight in model.named_parameters():
        for found in (ours[parameter], theirs[parameter]):
            error = (torch.from_numpy(found) - weight.detach()).norm()
            assert error <= 1e-3 * (weight.detach() - start[parameter]).norm() + 1e-7, parameter


def strict_on_one_rank(rank: int) -> str:
    """Return how a call is refused that only one rank cannot cut."""
    model = attentive.make("llama", "eager")
    for layer in model.model.layers:
        layer.mlp = Meeting(layer.mlp)
    lowtide.apply(model, "recompute+tile(attention, tokens=12)")
    attentive.step(model, batch_of(rank, None))
    try:
        model(**batch_of(rank, "weights" if rank else None))
    except NotTokenWiseError as error:
        return str(error)
    return "not refused"


def test_a_refusal_on_one_rank_is_one_on_all():
    other, own = run_ranks(strict_on_one_rank, timeout=60)
    assert "another rank's call of it cannot be cut" in other
    assert "output_attentions" in own


# --- Units of FSDP inside a block -----------------------------------------------------------------------------------


def with_units_inside(rank: int, policy: str) -> tuple[dict, set] | str:
    """Return the gradients of ranks of which one's call is too short to be cut, and why blocks are left alone."""
    model = attentive.make("llama")
    mesh = init_device_mesh("cpu", (2,))
    applied = lowtide.apply(model, policy)
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = attentive.batch("llama", rows=1, length=(9, 31)[rank])
    try:
        for _ in range(2):
            model.zero_grad()
            model(**given, use_cache=False).loss.backward()
    except NotTokenWiseError as error:
        return str(error)
    return to_numpy(model), {tiles.left_alone for tiles in blocks_of(applied)}


def test_a_block_whose_parts_are_gathered_by_themselves_is_left_alone():
    (ours, why), (theirs, their_why) = run_ranks(with_units_inside, LENIENT, timeout=60)
    assert why == {""}, "too short to be cut"
    assert [text.partition(":")[0] for text in their_why] == [
        "FSDP2 gathers the weights of its part 'mlp' by themselves"
    ]
    model = attentive.make("llama")
    for length in (9, 31):
        (model(**attentive.batch("llama", rows=1, length=length), use_cache=False).loss / 2).backward()
    assert_joined([ours, theirs], model, tolerance=1e-6)


def test_a_block_whose_parts_are_gathered_by_themselves_is_refused_on_all_ranks():
    for text in run_ranks(with_units_inside, "recompute+tile(attention, tokens=12)", timeout=60):
        assert "FSDP2 gathers the weights of its part 'mlp'" in text


def given_a_dtensor(_rank: int) -> set:
    """Return why blocks run whole whose hidden states are spread over ranks."""
    model = attentive.make("llama", dtype=torch.float32)
    applied = lowtide.apply(model, "recompute+tile(tokens=12)")
    hidden = DTensor.from_local(torch.randn(1, 24, 32), init_device_mesh("cpu", (2,)), [Replicate()])
    with pytest.raises(RuntimeError):  # its weights are plain tensors
        model.model.layers[0](hidden, position_embeddings=(hidden, hidden))
    return {tiles.left_alone for tiles in blocks_of(applied)}


def test_hidden_states_that_are_spread_over_ranks_are_the_reason():
    for found in run_ranks(given_a_dtensor, timeout=60):
        assert found - {""}, "the block that was called"
        assert all("its hidden states are a DTensor" in reason for reason in found - {""})


# --- Attention that reaches other ranks -----------------------------------------------------------------------------


def replaced_attention(*args, **kwargs):
    return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)


def test_a_replaced_attention_of_torch_is_refused_or_left_alone(monkeypatch):
    model, batch = attentive.make("llama"), attentive.batch("llama")
    expected = attentive.step(model, batch)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", replaced_attention)
    with (
        lowtide.apply(model, "recompute+tile(attention, tokens=12)"),
        pytest.raises(NotTokenWiseError, match="with its attention: its attention is replaced by one that may reach"),
    ):
        model(**batch)
    with lowtide.apply(model, "recompute+tile(attention, mlp, tokens=12)") as applied:
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-6
        names = {region.name for region in applied.regions}
        assert all("replaced" in tiles.left_alone for tiles in applied.report().tiles if tiles.name in names)


def in_context_parallel(rank: int) -> str:
    """Return how a step with torch's context parallelism is refused."""
    mesh = init_device_mesh("cpu", (2,))
    model, ids = attentive.make("llama", dtype=torch.float32), attentive.batch("llama", length=32)["input_ids"]
    positions = torch.arange(32).expand(ids.shape[0], -1).contiguous()
    lowtide.apply(model, "recompute+tile(attention, tokens=12)")
    with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False)
        except NotTokenWiseError as error:
            return str(error)
    return "not refused"


def test_context_parallelism_is_refused():
    assert all("model.layers.0" in text and "context parallelism" in text for text in run_ranks(in_context_parallel))


def under_ulysses(rank: int) -> str:
    """Return how a step with DeepSpeed's Ulysses is refused."""
    use_cpu()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    model, batch = attentive.make("llama", dtype=torch.float32), attentive.batch("llama", length=32)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=2,
        seq_length=32,
        seq_length_is_variable=True,
    )
    ids = batch["input_ids"].chunk(2, 1)[rank]
    positions = torch.arange(32).chunk(2)[rank].expand_as(ids)
    lowtide.apply(model, "recompute+tile(attention, tokens=8)")
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    except NotTokenWiseError as error:
        return str(error)
    return "not refused"


@needs_deepspeed
def test_ulysses_is_refused():
    assert all("model.layers.0" in text and "Ulysses" in text for text in run_ranks(under_ulysses, timeout=300))
