"""The parts of a training step: autograd, checkpoint, offload hooks, attention, convolution, autocast, optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lowtide import simdevice


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16))


def grads_of(device: str, run) -> list[torch.Tensor]:
    model = block().to(device)
    torch.manual_seed(1)
    x = torch.randn(4, 16).to(device).requires_grad_()
    torch.manual_seed(2)
    run(model, x).square().sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


def plain(model, x):
    return model(x)


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


def reentrant(model, x):
    return checkpoint(model, x, use_reentrant=True)


def on_host(model, x):
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=x.device.type):
        return model(x)


@pytest.mark.parametrize("run", [checkpointed, reentrant, on_host])
def test_gradients_are_bit_identical_to_plain_training(sim, run):
    for ours, reference in zip(grads_of(sim, run), grads_of(sim, plain), strict=True):
        assert torch.equal(ours, reference)


def test_gradients_are_bit_identical_to_the_cpu(sim):
    for ours, cpu in zip(grads_of(sim, plain), grads_of("cpu", plain), strict=True):
        assert torch.equal(ours, cpu)


def attention(device, *, heads=2, kv_heads=2, mask=None, causal=False, dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(1, heads, 32, 16, dtype=dtype).to(device).requires_grad_()
    k, v = (torch.randn(1, kv_heads, 32, 16, dtype=dtype).to(device).requires_grad_() for _ in range(2))
    mask = None if mask is None else mask.to(device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=heads != kv_heads)
    out.float().square().sum().backward()
    return [t.cpu() for t in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"causal": True},
        {"causal": True, "dtype": torch.bfloat16},
        {"heads": 4, "causal": True},
        {"mask": torch.ones(32, 32).tril().bool()},
        {"mask": torch.ones(1, 1, 1, 32).bool()},
    ],
    ids=["full", "causal", "bf16", "grouped-query", "mask", "broadcast-mask"],
)
def test_attention_agrees_with_the_cpu(sim, case):
    tolerance = 5e-2 if case.get("dtype") == torch.bfloat16 else 1e-5
    for ours, cpu in zip(attention(sim, **case), attention("cpu", **case), strict=True):
        torch.testing.assert_close(ours, cpu, rtol=tolerance, atol=tolerance)


def test_attention_never_holds_the_scores(sim):
    tokens, heads, width = 1024, 4, 16
    q = torch.randn(1, heads, tokens, width, device=sim, requires_grad=True)
    simdevice.reset()
    before = simdevice.stats().live_bytes
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    scores = heads * tokens * tokens * 4
    assert simdevice.stats().peak_bytes - before < scores / 10

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        simdevice.reset()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert simdevice.stats().peak_bytes - before > scores, "the math path, asked for, does"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_agrees_with_the_cpu(sim, transposed, groups):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    results = []
    for device in ("cpu", sim):
        torch.manual_seed(0)
        conv = kind(4, 6, 3, stride=2, padding=1, groups=groups)
        x = torch.randn(2, 4, 9, 9, requires_grad=True)
        conv, y = conv.to(device), x.detach().to(device).requires_grad_()
        out = conv(y)
        out.square().sum().backward()
        results.append([t.detach().cpu() for t in (out, y.grad, conv.weight.grad, conv.bias.grad)])
    for ours, cpu in zip(*results, strict=True):
        torch.testing.assert_close(ours, cpu, rtol=1e-5, atol=1e-5)


def test_conv3d_as_in_a_vision_tower(sim):
    conv = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)).to(sim)
    conv(torch.randn(5, 3, 2, 4, 4, device=sim)).sum().backward()
    assert conv.weight.grad.isfinite().all().item()


def test_flops_agree_with_torchs_counter(sim):
    x = torch.randn(2, 4, 32, 16, device=sim, requires_grad=True)
    image = torch.randn(2, 3, 8, 8, device=sim, requires_grad=True)
    conv = nn.Conv2d(3, 6, 3).to(sim)
    linear = nn.Linear(16, 24).to(sim)
    simdevice.reset()
    with FlopCounterMode(display=False) as counter:
        attended = F.scaled_dot_product_attention(x, x, x)
        (linear(attended).sum() + (attended @ attended.transpose(-1, -2)).sum() + conv(image).sum()).backward()
    # torch's counter has no formula for the attention operator of out-of-tree devices: 2 products forward, 5 backward
    attention_flops = 7 * 2 * (2 * 4 * 32 * 32 * 16)
    assert simdevice.stats().flops == counter.get_total_flops() + attention_flops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_precision(sim, dtype):
    weight = torch.randn(16, 16, device=sim, requires_grad=True)
    x = torch.randn(4, 16, device=sim)
    with torch.autocast(sim, dtype=dtype):
        y = x @ weight
        assert y.dtype == dtype
        assert F.layer_norm(y, (16,)).dtype == torch.float32, "norms stay in fp32, as on CUDA"
        assert F.conv1d(x[None], weight[:, None, :3].expand(16, 4, 3).contiguous()).dtype == dtype
        assert F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 16, device=sim),) * 3).dtype == dtype
    expected = (x.to(dtype) @ weight.detach().to(dtype)).cpu()
    assert torch.equal(y.detach().cpu(), expected)
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert (x @ weight).dtype == torch.float32


def test_grad_scaler(sim):
    layer = nn.Linear(8, 8).to(sim)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(sim, init_scale=8.0)
    with torch.autocast(sim, dtype=torch.float16):
        loss = layer(torch.randn(4, 8, device=sim)).float().square().mean()
    before = layer.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, layer.weight)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_adamw_with_clipping_agrees_with_the_cpu(sim, options):
    results = []
    for device in ("cpu", sim):
        model = block().to(device).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        x = torch.ones(4, 16, device=device)
        for _ in range(3):
            model(x).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    for ours, cpu in zip(*results, strict=True):
        torch.testing.assert_close(ours, cpu, rtol=1e-5, atol=1e-6)


class TestRandomNumbers:
    def test_the_device_has_a_generator_of_its_own(self, sim):
        cpu_before, sim_before = torch.get_rng_state(), torch.sim.get_rng_state()
        torch.randn(10, device=sim)
        F.dropout(torch.ones(10, device=sim), 0.5)
        assert torch.equal(torch.get_rng_state(), cpu_before), "device numbers do not touch the CPU's state"
        assert not torch.equal(torch.sim.get_rng_state(), sim_before)

        sim_before = torch.sim.get_rng_state()
        torch.randn(10)
        assert torch.equal(torch.sim.get_rng_state(), sim_before)

    def test_state_restores_the_numbers(self, sim):
        state = torch.sim.get_rng_state()
        first = torch.rand(10, device=sim), F.dropout(torch.ones(10, device=sim), 0.5), torch.randperm(9, device=sim)
        torch.sim.set_rng_state(state)
        second = torch.rand(10, device=sim), F.dropout(torch.ones(10, device=sim), 0.5), torch.randperm(9, device=sim)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)

    def test_manual_seed_reaches_the_device(self, sim):
        torch.manual_seed(5)
        first = torch.rand(10, device=sim)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(10, device=sim), first)

    def test_explicit_generators(self, sim):
        generator = torch.Generator(device=sim).manual_seed(3)
        first = torch.rand(10, device=sim, generator=generator)
        assert torch.equal(torch.rand(10, device=sim, generator=generator.manual_seed(3)), first)
        with pytest.raises(RuntimeError, match=r"device type for generator|'sim' generator"):
            torch.rand(10, device=sim, generator=torch.Generator())

    def test_fork_rng(self, sim):
        before = torch.sim.get_rng_state()
        with torch.random.fork_rng(devices=[0], device_type=sim):
            torch.rand(10, device=sim)
        assert torch.equal(torch.sim.get_rng_state(), before)


def test_the_cap_decides_whether_a_step_fits(sim):
    """Plain training does not fit where checkpointing does: the point of the device."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))).to(sim)
    x = torch.randn(512, 64, device=sim)

    def step(run) -> None:
        y = x
        for layer in model:
            y = run(layer, y)
        y.square().mean().backward()

    simdevice.enable(memory=simdevice.stats().live_bytes + 5 * 1024**2)
    with pytest.raises(torch.OutOfMemoryError):
        step(plain)
    model.zero_grad()
    step(checkpointed)
    assert all(p.grad is not None for p in model.parameters())
