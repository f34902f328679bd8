"""`lowtide.apply` on plain models: active, exact, reversible, and never silent."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError, LowtideError, NoRegionError, OffloadError, SilentNoOpError
from models.stacked import BOUNDARY, LAYERS, WIDTH, Block, assert_same, batch, build, train_step


@pytest.mark.parametrize(
    "policy",
    ["none", "recompute", "recompute(every=2)", "offload", "recompute+offload", "recompute+offload; *.0: none"],
)
def test_gradients_are_bit_identical(device, policy):
    model = build()
    expected = train_step(model)
    with lowtide.apply(model, policy) as applied:
        for _ in range(2):
            assert_same(train_step(model), expected)
        assert applied.policy == lowtide.Policy.parse(policy)


@pytest.mark.parametrize("policy", ["recompute", "recompute(every=2)"])
def test_gradients_are_bit_identical_on_the_cpu(policy):
    model = build("cpu")
    expected = train_step(model, "cpu")
    with lowtide.apply(model, policy):
        assert_same(train_step(model, "cpu"), expected)


def test_the_report_counts_what_happened(device):
    model = build()
    applied = lowtide.apply(model, "recompute+offload")
    train_step(model)
    report = applied.report()
    assert [r.forwards for r in report.regions] == [1] * LAYERS
    assert [r.recomputes for r in report.regions] == [1] * LAYERS
    assert [r.packed_bytes for r in report.regions] == [BOUNDARY] * (LAYERS - 1) + [0]
    assert [r.restored_bytes for r in report.regions] == [BOUNDARY] * (LAYERS - 1) + [0]
    assert report.regions[-1].kept_bytes == BOUNDARY
    assert (report.host_bytes, report.peak_host_bytes) == (0, (LAYERS - 1) * BOUNDARY)
    assert f"layers.0-{LAYERS - 1} x{LAYERS}" in str(report)
    assert report.to_dict()["regions"][0]["name"] == "layers.0"
    assert '"recomputes": 1' in report.to_json()


def test_every_second_region(device):
    model = build()
    applied = lowtide.apply(model, "recompute(every=2)")
    train_step(model)
    assert [r.recomputes for r in applied.report().regions] == [1, 0, 1, 0, 1, 0]


def test_memory_with_a_cap_plain_and_recompute_run_out_and_offload_trains(sim):
    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(24))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Tall().to(sim).train()
    x = torch.randn(512, WIDTH, device=sim)
    model(x[:1]).sum().backward()  # gradients exist from here on
    base, boundary = simdevice.stats().live_bytes, 512 * WIDTH * 4
    simdevice.enable(memory=base + 20 * boundary)

    def fits(policy) -> bool:
        with lowtide.apply(model, policy):
            try:
                model(x).square().mean().backward()
            except torch.OutOfMemoryError:
                return False
        return True

    assert [fits(policy) for policy in ("none", "recompute", "recompute+offload")] == [False, False, True]


def instance_state(model):
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def test_remove_leaves_the_model_as_it_was(device):
    model = build()
    model.gradient_checkpointing = True
    before = instance_state(model)
    with pytest.warns(UserWarning, match="own gradient checkpointing is switched off"):
        applied = lowtide.apply(model, "recompute+offload")
    assert model.gradient_checkpointing is False, "else blocks would be recomputed twice"
    assert "forward" in model.layers[0].__dict__
    applied.remove()
    applied.remove()
    after = instance_state(model)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys()
        assert all(before[name][key] is after[name][key] for key in before[name])


def test_twice_is_once_and_another_policy_takes_the_place(device):
    model = build()
    first = lowtide.apply(model, "recompute")
    assert lowtide.apply(model, "recompute") is first
    second = lowtide.apply(model, "recompute+offload")
    assert second is not first
    train_step(model)
    assert [r.recomputes for r in second.report().regions] == [1] * LAYERS
    assert [r.recomputes for r in first.report().regions] == [0] * LAYERS
    second.remove()
    assert "forward" not in model.layers[0].__dict__


def test_a_policy_that_is_refused_leaves_the_one_in_force(device, tmp_path):
    model = build()
    first = lowtide.apply(model, "recompute")
    for refused, why in {
        f"recompute+offload(disk={tmp_path}/missing)": "cannot be used",
        "recompute+offload(disk)": "does not say where",
        "recompute; *.tower: none": "matches no region",
    }.items():
        with pytest.raises(LowtideError, match=why):
            lowtide.apply(model, refused)
    train_step(model)
    assert [r.recomputes for r in first.report().regions] == [1] * LAYERS


def test_state_dict_deepcopy_and_pickle_work(device):
    model = build()
    keys = list(model.state_dict())
    expected = train_step(model)
    applied = lowtide.apply(model, "recompute+offload")
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  (our own bytes)
        assert twin.layers[0].forward.module is twin.layers[0], "the copy calls its own parameters"
        assert_same(train_step(twin), expected)
    assert applied.report().regions[0].forwards == 0, "and the policy stays with the original"


def test_an_instance_forward_of_somebody_else_is_kept(device):
    model = build()
    calls = []
    own = model.layers[0].forward

    def wrapped(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    model.layers[0].forward = wrapped
    applied = lowtide.apply(model, "recompute")
    train_step(model)
    assert len(calls) == 2
    applied.remove()
    assert model.layers[0].__dict__["forward"] is wrapped


def test_eval_and_no_grad_are_untouched(sim):
    model = build()
    applied = lowtide.apply(model, "recompute+offload")
    simdevice.reset()
    with torch.no_grad():
        model(batch())
    model.eval()
    model(batch())
    assert [r.forwards for r in applied.report().regions] == [0] * LAYERS
    assert simdevice.stats().d2h_bytes == 0


def test_applied_before_the_model_is_moved(device):
    model = build("cpu")
    applied = lowtide.apply(model, "recompute+offload")
    model.to(device)
    train_step(model)
    assert applied.report().regions[0].packed_bytes == BOUNDARY


def test_caches_are_dropped_in_training_with_one_warning(device):
    model = build()
    model.cache = []
    lowtide.apply(model, "recompute")
    with pytest.warns(UserWarning, match="key-value caches are dropped in training") as caught:
        train_step(model)
    assert len(caught) == 1
    assert model.cache == []


def test_a_full_host_tier_is_said(device):
    model = build()
    applied = lowtide.apply(model, f"recompute+offload(host={2 * BOUNDARY}B)")
    train_step(model)
    report = applied.report()
    assert sum(r.packed_bytes for r in report.regions) == 2 * BOUNDARY
    assert sum(r.declined_bytes for r in report.regions) > 0
    assert "found no room" in str(report)


class TestGuard:
    class Opaque:
        """Hides a tensor where nobody looks."""

        def __init__(self, x):
            self.x = x

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
            for layer in self.layers:
                inner = layer.forward
                layer.forward = lambda box, inner=inner: inner(box.x)

        def forward(self, x):
            for layer in self.layers:
                x = layer(TestGuard.Opaque(x))
            return x

    def test_inputs_that_no_store_sees_are_an_error_that_names_the_region(self, device):
        model = self.Hidden().to(device).train()
        lowtide.apply(model, "recompute+offload")
        with pytest.raises(SilentNoOpError, match=r"region 'layers\.0'.*expected its saved tensors to be offloaded"):
            model(batch()).sum().backward()

    def test_not_strict_is_a_warning(self, device):
        model = self.Hidden().to(device).train()
        lowtide.apply(model, "recompute+offload", strict=False)
        with pytest.warns(UserWarning, match="expected its saved tensors"):
            model(batch()).sum().backward()

    def test_a_region_that_is_not_recomputed_is_an_error(self, device, monkeypatch):
        """An engine that turned into a no-op: the region's forward runs, but nothing is run again."""
        from lowtide.applying import region_runtime

        monkeypatch.setattr(
            region_runtime, "run_region", lambda forward, args, kwargs, *_, **__: forward(*args, **kwargs)
        )
        model = build()
        lowtide.apply(model, "recompute")
        with pytest.raises(SilentNoOpError, match="expected a recompute in backward"):
            train_step(model)

    def test_a_region_without_a_gradient_is_no_alarm(self, device):
        model = build()
        lowtide.apply(model, "recompute")
        x = model.embed(batch())
        x = model.layers[0](x)
        model.layers[1](x)  # its output is not used
        x.sum().backward()
        assert model.layers[0].up.weight.grad is not None
        assert model.layers[1].up.weight.grad is None


class TestWrongUse:
    def test_not_a_module(self):
        with pytest.raises(InvalidValueError, match=r"needs a torch\.nn\.Module, got list"):
            lowtide.apply([], "recompute")

    def test_no_region(self):
        with pytest.raises(NoRegionError):
            lowtide.apply(nn.Linear(3, 3), "recompute")

    def test_a_bad_policy_leaves_the_model_alone(self, device):
        model = build()
        before = instance_state(model)
        with pytest.raises(InvalidValueError):
            lowtide.apply(model, "recompute+ofload")
        assert instance_state(model) == before

    def test_host_offload_of_a_cpu_model_is_refused(self, device):
        model = build("cpu")
        lowtide.apply(model, "recompute+offload")
        with pytest.raises(OffloadError, match="disk tier"):
            train_step(model, "cpu")


def towers():
    def stack():
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))

    return nn.ModuleDict({"encoder": stack(), "decoder": stack()})


def test_a_handle_on_a_part_is_not_taken_for_the_whole():
    model = towers()
    part = lowtide.apply(model["encoder"], "recompute")
    whole = lowtide.apply(model, "recompute")
    assert whole is not part
    assert len(whole.regions) == 4
    assert lowtide.apply(model, "recompute") is whole
    whole.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_two_handles_on_parts_both_give_way_to_the_whole():
    model = towers()
    lowtide.apply(model["encoder"], "recompute")
    lowtide.apply(model["decoder"], "recompute")
    lowtide.apply(model, "recompute(every=2)").remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
