"""Diffusion and vision models under every policy: gradients and buffers are the plain model's, or it is refused.

They run with `make test-vision`, which installs diffusers and timm.
"""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.errors import NoRegionError, SilentNoOpError
from models.vision import MODELS, specimen
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("diffusers", "peft", "timm", "torch", "torchvision", "transformers")

WITHOUT_MLP = ("AutoencoderKL", "ConvNeXt of convolutions", "EfficientNet", "RegNet")
WITH_MLP = [name for name in MODELS if name not in WITHOUT_MLP]
WITH_ATTENTION = [name for name in WITH_MLP if name != "ConvNeXt"]
TOLERANCE = 1e-5
"""Of a gradient's norm in single precision: tiles add in a different order."""

FIRST_REGIONS = {
    "UNet2DCondition": ("down_blocks.0.resnets.0", 17),
    "SD3": ("transformer_blocks.0", 2),
    "Flux": ("transformer_blocks.0", 4),
    "Wan": ("blocks.0", 2),
    "HunyuanVideo": ("transformer_blocks.0", 4),
    "LTX": ("transformer_blocks.0", 2),
    "AutoencoderKL": ("encoder.down_blocks.0", 10),
    "ViT": ("blocks.0", 2),
    "EVA-02": ("blocks.0", 2),
    "Swin": ("layers.0.blocks.0", 4),
    "ConvNeXt": ("stages.0.blocks.0", 8),
    "ConvNeXt of convolutions": ("stages.0.blocks.0", 8),
    "EfficientNet": ("blocks.0", 16),
    "RegNet": ("s1", 13),
}
"""The first region of each model, and how many it has."""


def step(made):
    """Return the gradients and the buffers after one step on random targets."""
    made.model.zero_grad()
    torch.manual_seed(1)
    output = made.model(**made.batch)
    output = output if isinstance(output, torch.Tensor) else output.sample
    (output * torch.randn_like(output)).sum().backward()
    grads = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
    return grads, {name: buffer.clone() for name, buffer in made.model.named_buffers()}


def under(name, policy, made=None):
    """Return the step of a model under a policy, and the report."""
    made = made or specimen(name)
    with lowtide.apply(made.model, policy) as applied:
        grads, buffers = step(made)
        return grads, buffers, applied.report()


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_recompute_is_bit_identical(name):
    expected, buffers = step(specimen(name))
    grads, buffers_after, report = under(name, "recompute")
    assert_equal(grads, expected)
    assert_equal(buffers_after, buffers)
    assert (report.regions[0].name, len(report.regions)) == FIRST_REGIONS[name]
    assert all(region.recomputes == region.forwards == 1 for region in report.regions)


@pytest.mark.parametrize("name", ["Wan", "UNet2DCondition", "RegNet"])
def test_offload_to_disk_is_bit_identical(name, tmp_path):
    expected, _ = step(specimen(name))
    grads, _, report = under(name, f"recompute+offload(disk={tmp_path}, tmpfs)")
    assert_equal(grads, expected)
    assert sum(region.packed_bytes for region in report.regions) > 0


@pytest.mark.filterwarnings("ignore:lowtide. region .*resnets.* expected to keep attention")
@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_kept_attention_is_bit_identical(name):
    expected, _ = step(specimen(name))
    grads, _, report = under(name, "recompute(keep=attention)")
    assert_equal(grads, expected)
    assert sum(region.kept_outputs for region in report.regions) > 0


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITH_ATTENTION])
def test_attention_that_is_not_there_cannot_be_kept(name):
    with pytest.raises(SilentNoOpError, match="expected to keep attention, and it called no such operator"):
        under(name, "recompute(keep=attention)")


@pytest.mark.parametrize("name", WITH_MLP)
def test_mlps_in_tiles(name):
    expected, _ = step(specimen(name))
    grads, _, report = under(name, "recompute+tile(mlp, tokens=4)")
    assert grads.keys() == expected.keys()
    assert max(float((grads[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in expected.items()) < TOLERANCE
    assert report.tiles
    assert report.tiles[0].tiles > report.tiles[0].calls > 0
    assert all(tiles.tiles >= tiles.calls > 0 for tiles in report.tiles), "a ConvNeXt's last stage has two tokens"


@pytest.mark.parametrize("name", WITHOUT_MLP)
def test_tiles_of_mlps_are_refused_where_there_is_none(name):
    with pytest.raises(NoRegionError, match=r"tile\(mlp\): no region of .* holds an MLP"):
        lowtide.apply(specimen(name).model, "tile(mlp)")


@pytest.mark.parametrize("name", MODELS)
def test_tiles_of_attention_and_of_the_loss_are_refused_by_name(name):
    """Their processors call torch's attention themselves, and no labels go in."""
    model = specimen(name).model
    with pytest.raises(NoRegionError, match=r"tile\(attention\): no region of .*'tile\(mlp\)' tiles its MLPs"):
        lowtide.apply(model, "tile(attention)")
    with pytest.raises(NoRegionError, match=r"tile\(loss\): .* has no head .*use tile\(mlp\)"):
        lowtide.apply(model, "recompute+tile")
    assert all("forward" not in vars(module) for module in model.modules())


def test_diffusers_own_checkpointing_is_switched_off():
    expected, _ = step(specimen("Wan"))
    made, runs = specimen("Wan"), []
    made.model.enable_gradient_checkpointing()
    made.model.blocks[0].ffn.register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.warns(UserWarning, match="own gradient checkpointing is switched off"):
        grads, *_ = under("Wan", "recompute", made)
    assert_equal(grads, expected)
    assert len(runs) == 2, "recomputed once"


def test_adapters_on_a_frozen_transformer():
    peft = pytest.importorskip("peft")

    def with_adapters():
        made = specimen("Wan")
        made.model.requires_grad_(False)
        made.model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "ffn.net.2"], init_lora_weights=False))
        return made

    torch.manual_seed(5)
    expected, _ = step(with_adapters())
    torch.manual_seed(5)
    grads, _, report = under("Wan", "recompute", with_adapters())
    assert len(grads) == 2 * 2 * 3, "of to_q in two attentions and of an MLP, in two blocks"
    assert_equal(grads, expected)
    assert all(region.recomputes == 1 for region in report.regions)
