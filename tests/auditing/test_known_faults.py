"""Known faults of transformers' own checkpointing, for calibration: the audit finds them, and ours has none of them."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import lowtide
import lowtide_zoo as zoo
from lowtide import compat
from lowtide.auditing import Verdict, audit
from models import tiny as tiny_models
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    ignore_warnings_of("peft", "torch", "transformers"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5"), reason="the faults are those of transformers 5"
    ),
]
LIBRARY_WIDE = {"idempotent", "reversible", "copy and pickle"}
"""`gradient_checkpointing_enable` adds a hook each time, leaves it behind, and the hook is a closure."""


def failed(report) -> set[str]:
    return {f"{check.mode}: {check.name}" for check in report.failures if check.name not in LIBRARY_WIDE}


def recompute(model):
    return lowtide.apply(model, "recompute")


@functools.cache
def tiny_model(name: str) -> zoo.TinyModel:
    return zoo.find(name)


def reports(name: str, checks=None):
    """Of transformers' own flag in both modes, and of ours."""
    model, batch = tiny_model(name).build(), tiny_model(name).batch()
    own = audit(model, batch, modes=("default", "reentrant"), dropout=0.1, checks=checks)
    return own, audit(model, batch, configure=recompute, dropout=0.1, checks=checks)


def test_llama_is_right_but_for_what_holds_for_all():
    model, batch = tiny_models.llama()
    report = audit(model, batch, dropout=0.1)
    assert failed(report) == {"reentrant: DDP readiness"}, report
    assert {check.name for check in report.failures} == {*LIBRARY_WIDE, "DDP readiness"}
    ours = audit(model, batch, configure=recompute, dropout=0.1)
    assert ours.ok, ours
    assert ours["gradient values"].evidence["identical"]


def test_mllama_never_recomputes_its_vision_layers():
    own, ours = reports("mllama", ["recomputed", "gradient values"])
    assert failed(own) >= {"default: recomputed"}
    assert "model.vision_model.transformer.layers" in own["default: recomputed"].summary
    assert ours.ok, ours
    assert "model.vision_model.transformer.layers" in ours["recomputed"].summary


def test_a_router_loses_part_of_its_gradient_in_reentrant_mode():
    own, ours = reports("mixtral", ["gradient values", "gradients present", "outputs", "experts"])
    assert failed(own) == {"reentrant: gradient values"}, own
    assert any("gate" in name for name in own["reentrant: gradient values"].evidence["different"])
    assert own["reentrant: outputs"].verdict is Verdict.PASS, "the loss looks fine"
    assert ours.ok, ours
    assert ours["experts"].verdict is Verdict.PASS


def test_adapters_in_a_vision_tower_get_nothing_in_reentrant_mode():
    model, batch = tiny_models.qwen3_vl()
    report = audit(model, batch, modes=("default", "reentrant"), checks=["adapters on a frozen base"])
    assert failed(report) == {"reentrant: adapters on a frozen base"}
    lost = report["reentrant: adapters on a frozen base"].evidence["lost"]
    assert lost
    assert all("visual" in name for name in lost)


def test_a_clvp_conditioning_encoder_loses_its_gradients():
    """Its code calls torch's checkpoint by hand, on a spectrogram that needs no gradient, in the reentrant mode."""
    from transformers.models.clvp.modeling_clvp import ClvpConditioningEncoder

    torch.manual_seed(0)
    batch = {name: value for name, value in tiny_model("clvp").batch().items() if name != "return_loss"}
    model = ClvpConditioningEncoder(tiny_model("clvp").config)
    report = audit(model, batch, configure=lambda m: setattr(m, "gradient_checkpointing", True))
    assert "configured: gradients present" in failed(report), report
    assert {"mel_conv.weight", "mel_conv.bias"} <= set(report["gradients present"].evidence["lost"])
    ours = audit(model, batch, configure=recompute, checks=["recomputed", "gradients present", "gradient values"])
    assert ours.ok, ours


def test_a_bias_before_a_softmax_over_choices_is_named_not_reported_lost():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertForMultipleChoice(config)
    batch = {"input_ids": torch.randint(0, 64, (3, 4, 10)), "labels": torch.tensor([0, 1, 2])}

    class Loses:
        """Rounding that comes out as exactly zero, as it sometimes does."""

        def __init__(self, model) -> None:
            self.applied = recompute(model)
            self.handle = model.classifier.bias.register_hook(torch.zeros_like)

        def remove(self) -> None:
            self.applied.remove()
            self.handle.remove()

    report = audit(model, batch, configure=Loses, checks=["gradients present", "gradient values"])
    assert report.ok, report
    found = report["gradients present"].evidence, report["gradient values"].evidence
    assert any("classifier.bias" in [*e["zero_by_mathematics"], *e.get("noise", [])] for e in found)


def test_checkpoint_wrappers_that_do_not_preserve_the_random_state():
    """What accelerate's FSDP2 plugin does."""

    def wrap(model):
        layers = {type(layer) for layer in model.model.layers}
        wrapper = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: type(m) in layers)

    model, batch = tiny_models.llama()
    report = audit(model, batch, configure=wrap, dropout=0.1, checks=["recomputed", "gradient values", "random state"])
    assert failed(report) == {"configured: gradient values", "configured: random state"}, report


@pytest.mark.parametrize("preserves", [True, False])
def test_checkpoint_wrappers_on_a_model_that_is_judged_as_it_is(preserves):
    """The wrappers keep a partial of torch's function: the reference must not recompute by it."""
    model, batch = tiny_models.llama()
    model.model.layers = torch.nn.ModuleList(
        checkpoint_wrapper(layer, preserve_rng_state=preserves) for layer in model.model.layers
    )
    partials = [layer.checkpoint_fn for layer in model.model.layers]
    report = audit(model, batch, dropout=0.1, checks=["recomputed", "gradient values", "random state"])
    wrong = set() if preserves else {"as it is: gradient values", "as it is: random state"}
    assert failed(report) == wrong, report
    assert report["recomputed"].verdict is Verdict.PASS
    assert [layer.checkpoint_fn for layer in model.model.layers] == partials


class TestOffload:
    """On the emulated device: bytes leave it, or they do not."""

    CHECKS = ("offload", "memory", "gradient values", "in-place changes")

    def test_ours(self, device):
        model, batch = tiny_models.llama()
        model.config.num_hidden_layers = 6
        model = transformers.LlamaForCausalLM(model.config).to(device)
        batch = {name: value.to(device) for name, value in batch.items()}
        report = audit(
            model,
            batch,
            configure=lambda m: lowtide.apply(m, "recompute+offload"),
            offload=True,
            checks=self.CHECKS,
        )
        assert report.ok, report
        evidence = report["offload"].evidence
        assert evidence["moved_bytes"] == evidence["expected_bytes"] == 5 * 2 * 24 * 32 * 4
        assert evidence["most_blocks_restored_at_once"] <= 2

    def test_one_that_is_not_there(self, device):
        model, batch = tiny_models.llama()
        batch = {name: value.to(device) for name, value in batch.items()}
        report = audit(model.to(device), batch, modes=["default"], offload=True, checks=["offload"])
        assert failed(report) == {"default: offload"}

    @pytest.mark.skipif(
        compat.installed_version("transformers") < Version("5"), reason="transformers 4 has no offload of its own"
    )
    @pytest.mark.parametrize("moves", [True, False], ids=["positional", "keyword"])
    def test_transformers_own(self, device, moves):
        """Its hooks see positional inputs alone: layers that are called with keywords keep everything, silently."""
        if moves:
            model, batch = tiny_models.llama()
        else:
            config = transformers.Llama4VisionConfig(
                hidden_size=32,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                projector_input_dim=32,
                projector_output_dim=32,
                vision_output_dim=32,
            )
            model, batch = transformers.Llama4VisionModel(config), {"pixel_values": torch.randn(4, 3, 16, 16)}
        report = audit(
            model.to(device),
            {name: value.to(device) for name, value in batch.items()},
            configure=lambda copy: copy.gradient_checkpointing_enable(offload=True),
            offload=True,
            checks=["recomputed", "offload"],
        )
        assert report["recomputed"].verdict == "pass"
        assert (report["offload"].evidence["moved_bytes"] > 0) == moves
        assert (report["offload"].verdict == "pass") == moves, report
