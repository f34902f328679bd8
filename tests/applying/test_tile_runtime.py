"""Faults that a review of tiling found, each as it was shown."""

from __future__ import annotations

import functools
import gc
import re
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import simdevice
from lowtide.errors import InPlaceError, InvalidValueError, NoRegionError, NotTokenWiseError
from lowtide.regions import find_mlps, find_regions
from models import architectures
from models.in_double import assert_same, make
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

transformers, peft = architectures.transformers, architectures.peft

pytestmark = [ignore_warnings_of("peft", "torch", "transformers"), ignore_dropped_caches]


class Mlp(nn.Module):
    def __init__(self, then=None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.then = then or (lambda _self, y: y)

    def forward(self, x):
        return self.then(self, self.down(torch.relu(self.up(x))))


class Block(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp, self.norm = mlp, nn.LayerNorm(32)

    def forward(self, x):
        out = self.mlp(x)
        return x + self.norm(out[0] if isinstance(out, tuple) else out)


def model_of(mlp_of):
    torch.manual_seed(0)
    return nn.ModuleList(Block(mlp_of()) for _ in range(2)).double()


def x(*lead):
    torch.manual_seed(1)
    return torch.randn(*(lead or (2, 48)), 32, dtype=torch.double)


def test_the_trial_of_a_gradient_inside_is_not_seen_by_a_checkpoint():
    """Its saved tensors would be waited for in the recompute, which has no trial."""

    def plus_slope(_mlp, y):
        with torch.enable_grad():
            point = y if y.requires_grad else y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(point.sin().sum(), point, create_graph=True)
        return y + slope

    def gradient(policy):
        model, value = model_of(lambda: Mlp(plus_slope)), x().requires_grad_()
        applied = lowtide.apply(model, policy)
        model[1](model[0](value)).square().sum().backward()
        return value.grad, sum(tiled.recomputed_tiles for tiled in applied.report().tiles)

    ours, tiles = gradient("recompute+tile(mlp, tokens=10)")
    torch.testing.assert_close(ours, gradient("none")[0])
    assert tiles > 0


def test_the_trial_is_not_seen_by_selective_checkpointing():
    """Its products would be cached, and popped by the recompute instead of the tile's."""

    def gradient(policy):
        model = model_of(Mlp)
        lowtide.apply(model, policy)
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        value = x().requires_grad_()
        checkpoint(model[0], value, use_reentrant=False, context_fn=contexts).square().sum().backward()
        return value.grad

    expected = gradient("none")
    assert (gradient("tile(mlp, tokens=32)") - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (lambda _, y: y + torch.cat([torch.zeros_like(y[:1]), y[:-1]]), "other tokens"),  # time comes first
        (lambda _, y: y * (torch.arange(y.shape[:-1].numel()) < 600).view(*y.shape[:-1], 1), "how many"),
    ],
)
def test_company_of_other_kinds(then, says):
    model = model_of(lambda: Mlp(then))
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with pytest.raises(NotTokenWiseError, match=says):
        model[0](x())


def test_a_trial_in_evaluation_does_not_vouch_for_training():
    class Normed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(32)

        def forward(self, x):
            return self.batch_norm(super().forward(x).flatten(0, 1)).view(x.shape)

    model = model_of(Normed)
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with torch.no_grad():
        model.eval()[0](x())
    with pytest.raises(NotTokenWiseError, match="other tokens"):
        model.train()[0](x())


def leave_auxiliary_loss(module, y):
    module.auxiliary = y.square().mean()
    return y


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (leave_auxiliary_loss, "leaves a tensor in its attribute 'auxiliary'"),
        (lambda _, y: (y, y.square().mean()), "has no row for each"),
    ],
)
def test_what_comes_once_per_call_cannot_come_per_tile(then, says):
    model = model_of(lambda: Mlp(then))
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with pytest.raises(NotTokenWiseError, match=says):
        model[0](x())


def test_a_module_that_changes_its_input():
    config = transformers.MixtralConfig(**architectures.TEXT, num_local_experts=4, router_jitter_noise=0.1)
    model = transformers.MixtralForCausalLM(config).train()
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with pytest.raises(NotTokenWiseError, match="changes its input in place"):
        model(**architectures.language(2))


@pytest.mark.parametrize("hook", ["before", "after"])
def test_hooks_on_the_head_act_once(hook):
    model, batch = make(architectures.llama)
    if hook == "before":
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    else:
        model.lm_head.register_forward_hook(lambda _, __, out: out * 0.5)
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "tile(loss, loss_tokens=10)"):
        assert_same(architectures.train_step(model, batch), expected, 2e-6)


def test_weights_that_are_swapped_in_for_a_call():
    model = model_of(Mlp)
    weights = {name: (weight.detach() * 2).requires_grad_() for name, weight in model[0].named_parameters()}

    def gradients():
        out = torch.func.functional_call(model[0], weights, (x(),))
        return torch.autograd.grad(out.square().sum(), list(weights.values()))

    expected = gradients()
    lowtide.apply(model, "tile(mlp, tokens=10)")
    for ours, grad in zip(gradients(), expected, strict=True):
        assert (ours - grad).norm() <= 1e-12 * grad.norm()


def test_a_weight_changed_under_autocast():
    mlp = Mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lowtide.tile(mlp, x().float(), tokens=10)
    with torch.no_grad():
        mlp.down.weight.mul_(100)
    with pytest.raises(InPlaceError):
        out.float().sum().backward()


def test_a_buffer_is_counted_up_once():
    class Counting(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.shape[:-1].numel()
            return super().forward(x)

    mlp = Counting().double()
    lowtide.tile(mlp, x().requires_grad_(), tokens=10).sum().backward()
    assert mlp.seen == 96


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "electra", "xlnet", "mobilebert", "perceiver", "git", "gemma3n_text"]
)
def test_attention_and_whole_layers_are_not_taken_for_mlps(model_type):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))
    names = {name for _, name, _ in find_mlps(find_regions(model))}
    assert all(re.search(r"\.(mlp|ff|ffn|ffn\.\d)$", name) for name in names), sorted(names)[:5]


def test_a_half_precision_loss_scale_reaches_small_gradients():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4096, 32), torch.randn(4000, 32)
    labels = torch.randint(0, 4000, (4096,))

    def gradient(dtype, scale, loss_of):
        leaf = hidden.to(dtype).requires_grad_()
        (loss_of(leaf, weight.to(dtype)) * scale).backward()
        return leaf.grad.double() / scale

    def plain(h, w):
        return nn.functional.cross_entropy((h @ w.t()).float(), labels)

    def tiled(h, w):
        return lowtide.linear_cross_entropy(h, w, labels, tokens=512)

    exact = gradient(torch.double, 1.0, plain)
    errors = [(gradient(torch.half, 65536.0, f) - exact).norm() / exact.norm() for f in (plain, tiled)]
    assert errors[1] <= 1.1 * errors[0]


def test_a_head_that_is_trained_as_a_copy_sums_in_float32():
    def error(tokens):
        model, batch = make(architectures.llama)
        config = peft.LoraConfig(r=4, target_modules=["up_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        exact = peft.get_peft_model(model, config).double()
        expected = architectures.train_step(exact, batch)
        low = exact.bfloat16()
        lowtide.apply(low, f"tile(loss, loss_tokens={tokens})")
        ours = architectures.train_step(low, batch)
        (name,) = [name for name in expected if "lm_head" in name]
        return (ours[name] - expected[name]).norm() / expected[name].norm()

    assert error(1) <= 1.3 * error(48)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_deterministic_anomaly_detection():
    torch.use_deterministic_algorithms(mode=True)
    try:
        value = x().bfloat16().requires_grad_()
        with torch.autograd.detect_anomaly(check_nan=True):
            lowtide.tile(Mlp().bfloat16(), value, tokens=10).sum().backward()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert value.grad.abs().max() > 0


def test_a_forward_that_is_a_partial():
    """As accelerate's hooks leave it."""
    model = model_of(lambda: Mlp(lambda module, y: nn.functional.dropout(y, 0.1, module.training)))
    for block in model:
        block.mlp.forward = functools.partial(type(block.mlp).forward, block.mlp)
    applied = lowtide.apply(model, "tile(mlp, tokens=10)")
    model[0](x()).sum().backward()
    assert applied.report().tiles[0].tiles == 10


class Cast(nn.Sequential):
    """PEFT's recipe for a head in single precision."""

    def forward(self, x):
        return super().forward(x).float()


def test_a_head_in_a_wrapper():
    model, batch = make(architectures.llama)
    model.lm_head = Cast(model.lm_head)
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "tile(loss, loss_tokens=10)"):
        assert_same(architectures.train_step(model, batch), expected, 2e-6)


def test_a_head_that_tells_nothing():
    model, _ = make(architectures.llama)
    model.lm_head = nn.Identity()
    with pytest.raises(NoRegionError, match="does not say how many logits"):
        lowtide.apply(model, "tile(loss)")


@pytest.mark.parametrize("policy", ["none; *.ffn: tile(mlp)", "recompute; visual.*: none"])
def test_a_rule_that_fits_nothing_is_refused(policy):
    with pytest.raises(InvalidValueError, match=r"matches no region and no MLP: .* names like 'model\.layers\.0'"):
        lowtide.apply(make(architectures.llama)[0], policy)


def test_a_bias_that_is_added_to_the_logits():
    config = transformers.BartConfig(
        vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).double().train()
    model.final_logits_bias.normal_()
    batch = {"input_ids": architectures.ids(), "labels": architectures.ids(16)}
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "tile(loss, loss_tokens=10)"):
        assert_same(architectures.train_step(model, batch), expected, 2e-6)


def test_a_loss_made_of_the_outputs_logits_afterwards():
    model, batch = make(architectures.llama)
    expected = model(**batch).loss
    lowtide.apply(model, "tile(loss, loss_tokens=10)")
    logits = model(**batch).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss.float(), expected.float())
    assert logits[..., : logits.shape[-1]].shape == logits.shape
    with pytest.raises(lowtide.errors.LogitsNotComputedError):
        torch.mul(torch.ones(()), logits)


def test_a_handle_and_its_store_die_with_the_model(sim):
    gc.collect()
    gc.disable()
    try:
        model = model_of(Mlp).to(sim)
        applied = lowtide.apply(model, "recompute+offload+tile(mlp, tokens=10)")
        store = weakref.ref(applied.store)
        value = model[1](model[0](x().to(sim)))
        value.sum().backward()
        del model, applied, value
        assert store() is None
        assert simdevice.violations() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(-1,), (2, -1), (7, -1), (-1, 64)])
def test_a_reshape_that_mixes_tokens_and_classes_is_refused(shape):
    model, batch = make(architectures.llama)
    lowtide.apply(model, "tile(loss)")
    with pytest.raises(lowtide.errors.LogitsNotComputedError, match="reshaped"):
        model(**batch).logits.view(*shape)


@pytest.mark.parametrize(("policy", "is_asked"), [("tile(loss)", True), ("tile(loss, loss_tokens=10)", False)])
def test_a_fused_kernel_is_asked_for_unless_a_tile_size_is_given(monkeypatch, policy, is_asked):
    asked = []
    monkeypatch.setattr(
        sys.modules["lowtide.losses.linear_cross_entropy"], "use_liger", lambda *_: asked.append(1) and False
    )
    model, batch = make(architectures.llama)
    lowtide.apply(model, policy)
    model(**batch).loss.backward()
    assert bool(asked) == is_asked
