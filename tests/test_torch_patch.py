"""`lowtide.patch_torch`: every call of torch's checkpoint is answered, by whatever name, and nothing stays."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import types

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError, OffloadError
from models.tiny import llama, transformers

GENUINE = {"checkpoint": torch.utils.checkpoint.checkpoint}  # a name of this module would be patched, too


@pytest.fixture
def framework():
    """A module that has imported the function under a name of its own."""
    module = types.ModuleType("a_framework")
    module.activation_checkpoint = GENUINE["checkpoint"]
    sys.modules["a_framework"] = module
    yield module
    del sys.modules["a_framework"]


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert torch.utils.checkpoint.checkpoint is GENUINE["checkpoint"]
    assert transformers.modeling_utils.checkpoint is GENUINE["checkpoint"]


def train(layers, x, run):
    """Hook firings and gradients of a chain that runs each layer twice: reentrant checkpoints fire hooks twice then."""
    fired = []
    handles = [p.register_post_accumulate_grad_hook(lambda _: fired.append(1)) for p in layers.parameters()]
    layers.zero_grad()
    for layer in (*layers, *layers):
        x = run(layer, x)
    x.square().sum().backward()
    for handle in handles:
        handle.remove()
    return len(fired), [p.grad.cpu() for p in layers.parameters()]


def stack(device="cpu"):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)).to(device)
    return layers, torch.randn(64, 64).to(device).requires_grad_()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_one_graph_whatever_is_asked_for(framework, use_reentrant):
    layers, x = stack()
    once, expected = train(layers, x, lambda layer, x: layer(x))

    def run(layer, x):
        return framework.activation_checkpoint(layer, x, use_reentrant=use_reentrant)

    if use_reentrant:
        assert train(layers, x, run)[0] == 2 * once, "the fault is real"
    with lowtide.patch_torch() as patch:
        fired, grads = train(layers, x, run)
    assert fired == once
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert patch.calls == 6
    assert framework.activation_checkpoint is GENUINE["checkpoint"]


def test_offload_moves_bytes(sim, framework):
    layers, x = stack(sim)
    _, expected = train(layers, x, lambda layer, x: layer(x))
    simdevice.reset()
    with lowtide.patch_torch(offload="host"):
        _, grads = train(layers, x, lambda layer, x: framework.activation_checkpoint(layer, x, use_reentrant=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert simdevice.stats().d2h_bytes >= 4 * x.nbytes


class TestCurried:
    """`checkpoint(**settings)(function)`: torch has it since 2.14, and the patch with any torch."""

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_one_graph(self, framework, use_reentrant):
        layers, x = stack()
        once, expected = train(layers, x, lambda layer, x: layer(x))
        with lowtide.patch_torch() as patch:
            checkpointed = framework.activation_checkpoint(use_reentrant=use_reentrant)
            fired, grads = train(layers, x, lambda layer, x: checkpointed(layer)(x))
        assert fired == once
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        assert patch.calls == 6

    def test_offload_moves_bytes(self, sim, framework):
        layers, x = stack(sim)
        _, expected = train(layers, x, lambda layer, x: layer(x))
        simdevice.reset()
        with lowtide.patch_torch(offload="host"):
            checkpointed = framework.activation_checkpoint(use_reentrant=False)
            _, grads = train(layers, x, lambda layer, x: checkpointed(layer)(x))
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        assert simdevice.stats().d2h_bytes >= 4 * x.nbytes

    def test_settings_are_honoured(self, framework):
        x = torch.ones(3, requires_grad=True)
        with lowtide.patch_torch():
            with pytest.raises(ValueError, match="determinism_check"):
                framework.activation_checkpoint(determinism_check="wrong")(torch.tanh)(x)
            with pytest.raises(InvalidValueError, match=r"without a function .* x: pass arguments to the wrapped"):
                framework.activation_checkpoint(x=x)(torch.tanh)(x)

    def test_functions_wrapped_inside_are_torchs_own_afterwards(self, framework):
        """Also where torch has no such form itself, before 2.14."""
        below, runs = framework.activation_checkpoint, []

        def tanh(x):
            runs.append(1)
            return x.tanh()

        with lowtide.patch_torch() as patch:
            wrapped = framework.activation_checkpoint(use_reentrant=False)(tanh)
            assert wrapped.__name__ == "tanh"
            wrapped(torch.ones(3, requires_grad=True)).sum().backward()
        assert framework.activation_checkpoint is below
        x = torch.ones(3, requires_grad=True)
        wrapped(x).sum().backward()
        assert patch.calls == 1
        assert len(runs) == 4, "run again in both backwards"
        torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_a_keyword_that_is_ours_and_not_torchs_belongs_to_the_function(framework):
    """Torch hands `offload` on, so a function may have one. `respect_saved_tensors_hooks` is a setting everywhere."""
    x, seen = torch.ones(3, requires_grad=True), []

    def scale(x, *, offload):
        seen.append(offload)
        return x.sin() * offload

    with lowtide.patch_torch() as patch:
        out = framework.activation_checkpoint(
            scale, x, offload=2.0, use_reentrant=False, respect_saved_tensors_hooks=False
        )
        out.sum().backward()
    assert patch.calls == 1
    assert seen == [2.0, 2.0], "forward and recompute"
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_transformers_with_its_own_flag():
    torch.manual_seed(0)
    model, batch = llama()
    model.train()
    batch["use_cache"] = False  # as with checkpointing: without a cache, transformers 4.57 gives attention another mask
    model(**batch).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with lowtide.patch_torch() as patch:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model(**batch).loss.backward()
    assert patch.calls == 2
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    model(**batch).loss.backward()  # the stored function passes the call on
    assert patch.calls == 2


def test_a_model_on_the_cpu_cannot_be_offloaded(framework):
    layers, x = stack()
    with lowtide.patch_torch(offload="host"), pytest.raises(OffloadError, match="disk tier"):
        framework.activation_checkpoint(layers[0], x, use_reentrant=False)


def test_names_imported_meanwhile_are_put_back(framework):
    with lowtide.patch_torch() as patch:
        framework.later = torch.utils.checkpoint.checkpoint
        framework.later(torch.tanh, torch.ones(3, requires_grad=True))
    assert framework.later is GENUINE["checkpoint"]
    assert patch.calls == 1


def test_patches_stack_and_go_in_any_order(framework):
    x = torch.ones(3, requires_grad=True)
    outer = lowtide.patch_torch()
    inner = lowtide.patch_torch()
    framework.activation_checkpoint(torch.tanh, x)
    assert (outer.calls, inner.calls) == (0, 1), "answered once"
    outer.remove()
    framework.activation_checkpoint(torch.tanh, x)
    assert inner.calls == 2
    inner.remove()
    inner.remove()
    assert framework.activation_checkpoint is GENUINE["checkpoint"]


def test_somebody_elses_patch_is_named_and_comes_back(framework, monkeypatch):
    def unsloth_checkpoint(function, *args, **_):
        return function(*args)

    with monkeypatch.context() as patched:
        patched.setattr(torch.utils.checkpoint, "checkpoint", unsloth_checkpoint)
        with pytest.warns(UserWarning, match=f"already replaced by {__name__}.*unsloth_checkpoint"):
            patch = lowtide.patch_torch()
        torch.utils.checkpoint.checkpoint(torch.tanh, torch.ones(3, requires_grad=True))
        assert patch.calls == 1
        patch.remove()
        assert torch.utils.checkpoint.checkpoint is unsloth_checkpoint


def test_a_replaced_checkpoint_function_is_named_and_left_alone(framework, monkeypatch):
    """ArcticTraining#373 patches what non-reentrant checkpointing never calls."""

    class OffloadingFunction(torch.utils.checkpoint.CheckpointFunction):
        pass

    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", OffloadingFunction)
    with pytest.warns(UserWarning, match=f"CheckpointFunction was already replaced by {__name__}.*Offloading"):
        patch = lowtide.patch_torch()
    framework.activation_checkpoint(torch.tanh, torch.ones(3, requires_grad=True), use_reentrant=True)
    assert patch.calls == 1
    assert torch.utils.checkpoint.CheckpointFunction is OffloadingFunction
    patch.remove()
    assert torch.utils.checkpoint.CheckpointFunction is OffloadingFunction


def test_where_warnings_are_errors_nothing_is_replaced(framework, monkeypatch):
    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", torch.autograd.Function)
    with pytest.raises(UserWarning, match=r"already replaced by torch\.autograd\.function"):
        lowtide.patch_torch()  # pytest makes errors of warnings
    assert framework.activation_checkpoint is GENUINE["checkpoint"]


def test_a_name_from_before_somebody_elses_patch_is_answered(framework, monkeypatch):
    x = torch.ones(3, requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.utils.checkpoint, "checkpoint", lambda function, *args, **_: function(*args))
        with pytest.warns(UserWarning, match="already replaced"):
            outer = lowtide.patch_torch()
        inner = lowtide.patch_torch()
        framework.activation_checkpoint(torch.tanh, x)
        assert (outer.calls, inner.calls) == (0, 1)
        outer.remove()
        framework.activation_checkpoint(torch.tanh, x)
        assert inner.calls == 2
        inner.remove()
        assert framework.activation_checkpoint is GENUINE["checkpoint"]


def test_a_patch_that_looks_at_the_name_first(framework, monkeypatch):
    """unsloth_zoo compares `checkpoint.__name__` with its own before it patches or unpatches."""
    with lowtide.patch_torch():
        framework.activation_checkpoint(torch.tanh, torch.ones(3, requires_grad=True))
        assert torch.utils.checkpoint.checkpoint.__name__ == "checkpoint"


def test_copies_and_pickles_of_a_model_hold_a_name_not_a_patch(framework):
    model = nn.Linear(2, 2)
    with lowtide.patch_torch() as patch:
        model.run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        model.run(torch.tanh, torch.ones(3, requires_grad=True))
        copied, pickled = copy.deepcopy(model), pickle.dumps(model.run)
    copied.run(torch.tanh, torch.ones(3, requires_grad=True))
    assert patch.calls == 1
    assert pickle.loads(pickled).func is GENUINE["checkpoint"]  # noqa: S301  (its own)


def test_a_patch_over_ours_stays_and_ours_steps_aside(framework, monkeypatch):
    patch = lowtide.patch_torch()
    below = torch.utils.checkpoint.checkpoint
    with monkeypatch.context() as patched:
        patched.setattr(torch.utils.checkpoint, "checkpoint", functools.partial(below))
        torch.utils.checkpoint.checkpoint(torch.tanh, torch.ones(3, requires_grad=True))
        patch.remove()
        torch.utils.checkpoint.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), use_reentrant=False)
        assert patch.calls == 1
    torch.utils.checkpoint.checkpoint = GENUINE["checkpoint"]


def test_a_patch_that_did_nothing_says_so():
    with pytest.warns(UserWarning, match="never called"), lowtide.patch_torch():
        pass


def test_an_error_inside_takes_it_away(framework):
    with pytest.raises(ZeroDivisionError), lowtide.patch_torch():
        framework.activation_checkpoint(lambda _: 1 / 0, torch.ones(3, requires_grad=True))
    assert framework.activation_checkpoint is GENUINE["checkpoint"]


def test_threads(framework):
    failures = []

    def work():
        try:
            for _ in range(20):
                with lowtide.patch_torch():
                    x = torch.ones(3, requires_grad=True)
                    framework.activation_checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
                    torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
        except Exception as error:  # noqa: BLE001  (shown by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert framework.activation_checkpoint is GENUINE["checkpoint"]
