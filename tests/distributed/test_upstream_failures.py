"""The failures that Lowtide began with: each shown with the original mechanism first, then right."""

from __future__ import annotations

import peft
import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowtide
from models import tiny as tiny_models
from models.adapted import make
from support.foreign_warnings import ignore_warnings_of
from support.joined import assert_joined, to_numpy
from support.launcher import RankFailedError, run_ranks

pytestmark = ignore_warnings_of("peft", "torch", "transformers")

READY_TWICE = "Expected to mark a variable ready only once"


class Shared(nn.Module):
    """Runs its first block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)).double()
        self.reentrant = False

    def forward(self, x):
        for layer in (self.layers[0], *self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def shared() -> Shared:
    torch.manual_seed(0)
    return Shared()


def rows(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(16, 32, dtype=torch.double, requires_grad=True)


def shared_gradients(rank: int, engine: str, options: dict) -> dict:
    net = shared()
    if engine == "reentrant":
        net.reentrant = True
    else:
        lowtide.apply(net, "recompute")
    ddp = DistributedDataParallel(net, **options)
    ddp(rows(rank)).square().mean().backward()
    return to_numpy(net)


def joined_shared() -> Shared:
    net = shared()
    sum(net(rows(rank)).square().mean() / 2 for rank in range(2)).backward()
    return net


def test_reentrant_with_unused_parameters_marks_twice():
    options = {"find_unused_parameters": True}
    with pytest.raises(RankFailedError, match=READY_TWICE):
        run_ranks(shared_gradients, "reentrant", options)
    assert_joined(run_ranks(shared_gradients, "lowtide", options), joined_shared(), tolerance=1e-12)


def test_reentrant_with_a_shared_block_is_an_error_or_silently_wrong():
    try:
        per_rank = run_ranks(shared_gradients, "reentrant", {})
    except RankFailedError as error:
        assert READY_TWICE in str(error)  # noqa: PT017  (either is the fault)
    else:
        with pytest.raises(AssertionError):
            assert_joined(per_rank, joined_shared(), tolerance=1e-3)
    assert_joined(run_ranks(shared_gradients, "lowtide", {}), joined_shared(), tolerance=1e-12)


def vlm_lora(rank: int, engine: str, options: dict) -> dict:
    model = make("qwen3_vl", "lora, frozen embeddings")
    torch.manual_seed(10 + rank)
    batch = tiny_models.qwen3_vl()[1]
    batch["pixel_values"] = batch["pixel_values"].double()
    if engine == "reentrant":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    else:
        lowtide.apply(model, "recompute")
    ddp = DistributedDataParallel(model, **options)
    ddp(**batch, use_cache=False).loss.backward()
    return to_numpy(model)


def test_a_vision_language_model_with_lora():
    """unslothai/unsloth#3713"""
    options = {"find_unused_parameters": True}
    with pytest.raises(RankFailedError, match=READY_TWICE):
        run_ranks(vlm_lora, "reentrant", options)
    per_rank = run_ranks(vlm_lora, "lowtide", options)
    assert per_rank[0].keys() == per_rank[1].keys()
    assert any("visual" in name for name in per_rank[0])
    for name, grad in per_rank[0].items():
        assert (grad == per_rank[1][name]).all(), "the ranks agree"


class BackwardPerTile(torch.autograd.Function):
    """How others tile: each tile calls `.backward()`."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(part) for part in x.split(4)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        parts = []
        for part, upstream in zip(x.split(4), grad.split(4), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(leaf).backward(upstream)
            parts.append(leaf.grad)
        return None, torch.cat(parts)


class Tiled(nn.Module):
    def __init__(self, engine: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32, dtype=torch.double)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
        self.engine = engine

    def forward(self, x):
        x = self.first(x)
        if self.engine == "backward per tile":
            return BackwardPerTile.apply(self.mlp, x)
        return lowtide.tile(self.mlp, x, tokens=4) if self.engine == "lowtide" else self.mlp(x)


def tiled_gradients(rank: int, engine: str) -> dict:
    net = Tiled(engine)
    ddp = DistributedDataParallel(net)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rows(rank)).square().mean().backward()
    return to_numpy(net)


def test_a_tiled_mlp_that_calls_backward_per_tile():
    with pytest.raises(RankFailedError, match=READY_TWICE):
        run_ranks(tiled_gradients, "backward per tile")
    plain = Tiled("plain")
    sum(plain(rows(rank)).square().mean() / 2 for rank in range(2)).backward()
    assert_joined(run_ranks(tiled_gradients, "lowtide"), plain, tolerance=1e-12)


class Opaque:
    """An output that DDP cannot look into."""

    def __init__(self, loss) -> None:
        self.loss = loss


class ReturnsOpaque(Shared):
    def forward(self, x):
        return Opaque(super().forward(x).square().mean())


def opaque_gradients(rank: int, static: bool) -> dict:
    torch.manual_seed(0)
    net = ReturnsOpaque()
    lowtide.apply(net, "recompute")
    ddp = DistributedDataParallel(net, static_graph=static)
    ddp(rows(rank)).loss.backward()
    return to_numpy(net)


def agree(per_rank) -> bool:
    return all((grad == per_rank[1][name]).all() for name, grad in per_rank[0].items())


def test_an_opaque_output_under_a_static_graph():
    """DDP never synchronises there, with or without Lowtide, and says nothing. A transformers output is fine."""
    assert agree(run_ranks(opaque_gradients, False))
    assert not agree(run_ranks(opaque_gradients, True)), "if this fails, torch has mended it"


def deferred_logits(rank: int) -> dict:
    model = make("llama")
    lowtide.apply(model, "recompute+tile(loss, loss_tokens=7)")
    ddp = DistributedDataParallel(model, static_graph=True)
    torch.manual_seed(rank)
    ids = torch.randint(1, 100, (2, 20))
    ddp(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return to_numpy(model)


def test_logits_that_are_not_computed_do_not_hide_the_loss_from_a_static_graph():
    assert agree(run_ranks(deferred_logits))


class TestOneProcess:
    @pytest.mark.filterwarnings("ignore:lowtide. .* was already replaced by")
    def test_offload_in_checkpoint_function_is_never_called_by_the_non_reentrant_engine(self, sim, monkeypatch):
        """ArcticTraining#373: the patch is there, and nothing is offloaded."""
        calls = []
        original = torch.utils.checkpoint.CheckpointFunction

        class Offloading(original):
            @staticmethod
            def forward(ctx, *args):
                calls.append(1)
                return original.forward(ctx, *args)

        monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", Offloading)
        net, x = shared().to(sim), rows(0).detach().to(sim).repeat(64, 1).requires_grad_()
        checkpoint(net.layers[0], x, use_reentrant=False).sum().backward()
        assert calls == []
        with lowtide.patch_torch(offload="host"):
            y = x
            for layer in net.layers:
                y = checkpoint_by_name(layer, y)
            lowtide.simdevice.reset()
            y.sum().backward()
        assert lowtide.simdevice.stats().h2d_bytes >= x.nbytes

    def test_a_patch_applied_twice_wraps_twice_and_ours_does_not(self, monkeypatch):
        calls = []

        def naive_patch():
            below = torch.utils.checkpoint.checkpoint

            def wrapped(function, *args, **kwargs):
                calls.append(1)
                return below(function, *args, **kwargs)

            monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", wrapped)

        naive_patch()
        naive_patch()
        torch.utils.checkpoint.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), use_reentrant=False)
        assert len(calls) == 2
        monkeypatch.undo()
        net = shared()
        applied = lowtide.apply(net, "recompute")
        assert lowtide.apply(net, "recompute") is applied
        net(rows(0)).sum().backward()
        assert [region.recomputes for region in applied.report().regions] == [2, 1, 1]

    def test_frozen_inputs(self):
        """Reentrant: no gradient at all, and only a warning."""
        x = rows(0).detach()
        net = shared()
        net.reentrant = True
        assert not net(x).requires_grad
        net.reentrant = False
        lowtide.apply(net, "recompute")
        net(x).sum().backward()
        assert all(p.grad is not None for p in net.parameters())

    def test_lora_in_a_vision_tower_after_prepare_model_for_kbit_training(self):
        """PEFT's default ends up reentrant: the tower's LoRA weights get nothing, and the loss looks fine."""

        def gradients(prepare):
            torch.manual_seed(0)
            model, batch = tiny_models.qwen3_vl()
            if prepare:
                model.is_loaded_in_8bit = True  # as bitsandbytes would mark it
                model = peft.prepare_model_for_kbit_training(model)
            config = peft.LoraConfig(r=4, target_modules=["qkv", "q_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, config).train()
            if not prepare:
                lowtide.apply(model, "recompute")
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            tower = [p.grad for n, p in model.named_parameters() if "visual" in n and p.requires_grad]
            return loss.detach(), [grad for grad in tower if grad is not None and grad.abs().max() > 0]

        loss, tower = gradients(prepare=True)
        assert torch.isfinite(loss)
        assert tower == [], "if this fails, PEFT has mended it"
        loss, tower = gradients(prepare=False)
        assert len(tower) == 4

    def test_dropout_without_a_preserved_random_state(self):
        """accelerate's FSDP2 wrapper passes preserve_rng_state=False: with LoRA dropout, gradients are far off."""
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 32)).double()

        def gradient(run):
            x = rows(0)
            torch.manual_seed(1)
            run(x).square().sum().backward()
            return x.grad

        expected = gradient(block)
        careless = gradient(lambda x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False))
        assert (careless - expected).norm() > 0.1 * expected.norm()
        assert torch.equal(gradient(lambda x: lowtide.checkpoint(block, x)), expected)

    def test_a_bias_before_a_softmax_over_choices_has_no_gradient(self):
        """Bert-like MultipleChoice with dropout: one number added to all choices changes nothing.

        So the true gradient of `classifier.bias` is zero, and what is computed is rounding: sometimes exactly zero. It
        is not lost by checkpointing.
        """
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
        model = transformers.BertForMultipleChoice(config).double().train()
        ids = torch.randint(0, 64, (3, 4, 10))
        labels = torch.tensor([0, 1, 2])

        def gradients():
            model.zero_grad()
            torch.manual_seed(1)
            model(input_ids=ids, labels=labels).loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}

        plain = gradients()
        with lowtide.apply(model, "recompute"):
            ours = gradients()
        largest = max(grad.abs().max() for grad in plain.values())
        for found in (plain, ours):
            assert found["classifier.bias"] is not None
            assert found["classifier.bias"].abs().max() <= 1e-14 * largest
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
        with torch.no_grad():
            before = model.eval()(input_ids=ids, labels=labels).loss
            model.classifier.bias += 3.0
            torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, before)


def checkpoint_by_name(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
