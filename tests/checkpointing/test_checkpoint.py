"""`lowtide.checkpoint` gives the plain model's gradients, bit for bit, whatever its inputs look like."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide import _torch, simdevice
from lowtide._torch import CHECKPOINT_KEYWORDS
from lowtide.checkpointing import Schedule
from lowtide.errors import InvalidValueError, OffloadError
from lowtide.stores import HostStore
from models.chains import BOUNDARY, TOKENS, WIDTH, Counted
from support.devices import DEVICE

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor
    note: str = "kept"


class Pair(NamedTuple):
    hidden: torch.Tensor
    scale: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(hidden))))


def positional(block, hidden, run):
    return run(block, hidden)


def keyword(block, hidden, run):
    return run(block, hidden=hidden)


def nested(block, hidden, run):
    return run(lambda inputs: block(inputs["states"][0]) * inputs["scale"], {"states": [hidden], "scale": 0.5})


def in_dataclass(block, hidden, run):
    return run(lambda inputs: block(inputs.hidden), Inputs(hidden))


def in_named_tuple(block, hidden, run):
    return run(lambda pair: block(pair.hidden) * pair.scale, Pair(hidden, 0.5))


def bound(block, hidden, run):
    return run(functools.partial(block, hidden=hidden))


def transposed(block, hidden, run):
    return run(lambda h: block(h.t()), hidden.t())


def expanded(block, hidden, run):
    row = hidden.mean(0, keepdim=True).expand(TOKENS, WIDTH)
    return run(lambda h, r: block(h) + r, hidden, row)


def sliced(block, hidden, run):
    return run(lambda h: block(h[:, :WIDTH]), torch.cat([hidden, hidden], -1)[:, :WIDTH])


FORMS = [positional, keyword, nested, in_dataclass, in_named_tuple, bound, transposed, expanded, sliced]


def step(device, form, run, *, dtype=None, frozen=False):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(device)
    hidden = torch.randn(TOKENS, WIDTH).to(device).requires_grad_(not frozen)
    torch.manual_seed(1)
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        x = hidden if frozen else hidden * 1
        for block in blocks:
            x = form(block, x, run)
        loss = x.float().square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(t.grad.cpu() for t in [hidden, *blocks.parameters()] if t.grad is not None)]


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_recompute_is_bit_identical(fresh_device, device, form):
    assert_same(step(device, form, lowtide.checkpoint), step(device, form, plain))


@pytest.mark.parametrize("form", FORMS)
def test_offload_is_bit_identical_and_really_moves_the_inputs(sim, form):
    """Keyword, nested and bound inputs are a silent no-op elsewhere (DeepSpeed#522, composer#2724)."""
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()))
    expected = step(sim, form, plain)
    simdevice.reset()
    assert_same(step(sim, form, run), expected)
    stats = simdevice.stats()
    assert stats.d2h_bytes >= (LAYERS - 1) * BOUNDARY
    assert stats.h2d_bytes >= (LAYERS - 1) * BOUNDARY
    assert simdevice.stats().pinned_bytes == 0


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"frozen": True}], ids=["autocast", "frozen-input"])
def test_autocast_and_inputs_without_gradient(device, offload, options):
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()) if offload else None)
    assert_same(step(device, keyword, run, **options), step(device, keyword, plain, **options))


def test_use_reentrant_is_answered_with_one_graph():
    """Hooks fire once per parameter, which is what DDP counts; the reentrant engine would also lose a frozen input."""
    block, fired = Block(), []
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    x = torch.randn(TOKENS, WIDTH)
    y = lowtide.checkpoint(block, x, use_reentrant=True)
    lowtide.checkpoint(block, y, use_reentrant=True).sum().backward()
    assert len(fired) == len(list(block.parameters()))


class TestWrongUse:
    def test_host_offload_on_the_cpu_is_refused_and_names_the_disk(self, device):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with pytest.raises(OffloadError, match="disk tier"):
            lowtide.checkpoint(torch.tanh, x, offload="host")

    @pytest.mark.parametrize("word", ["hosst", "gpu", 3])
    def test_an_unknown_store(self, word):
        with pytest.raises(InvalidValueError, match="offload must be"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), offload=word)

    def test_a_negative_limit(self):
        with pytest.raises(InvalidValueError, match="negative"):
            HostStore(limit=-1)

    def test_a_store_cannot_be_pickled(self):
        import pickle

        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(HostStore())

    def test_torchs_own_checks_stay(self):
        with pytest.raises(ValueError, match="determinism_check"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), determinism_check="wrong")


class TestTorchsKeywords:
    def test_early_stop(self):
        layers = nn.Sequential(Counted(), Counted())

        def run(x):
            return layers(x) + x.detach()  # nothing after the last product is needed for backward

        lowtide.checkpoint(run, torch.randn(4, WIDTH, requires_grad=True), early_stop=False).sum().backward()
        assert [layer.seen.calls for layer in layers] == [2, 2]

    def test_debug_names_the_operators_of_a_mismatch(self, debugging):
        calls = []

        def different(x):
            calls.append(1)
            return x.sin() if len(calls) == 1 else x.sin().cos()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="aten"):
            lowtide.checkpoint(
                different, torch.randn(4, 4, requires_grad=True), debug=True, early_stop=False
            ).sum().backward()

    def test_the_determinism_check_sees_another_shape(self):
        calls = []

        def different(x):
            calls.append(1)
            return (x[:2] if len(calls) > 1 else x).exp()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
            lowtide.checkpoint(different, torch.randn(4, 4, requires_grad=True)).sum().backward()

    def test_hooks_that_are_not_respected_are_what_every_torch_knows(self):
        x = torch.randn(4, 4, requires_grad=True)
        lowtide.checkpoint(torch.sin, x, respect_saved_tensors_hooks=False).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())

    def test_hooks_cannot_be_respected_before_torch_2_14(self, monkeypatch):
        module = sys.modules["lowtide.checkpointing.checkpoint"]
        monkeypatch.setattr(module, "CHECKPOINT_KEYWORDS", CHECKPOINT_KEYWORDS - {"respect_saved_tensors_hooks"})
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(InvalidValueError, match=r"respect_saved_tensors_hooks=True needs torch 2\.14 or newer"):
            lowtide.checkpoint(torch.sin, x, respect_saved_tensors_hooks=True)
        with pytest.raises(InvalidValueError, match=r"respect_saved_tensors_hooks=True needs torch 2\.14 or newer"):
            lowtide.checkpoint(respect_saved_tensors_hooks=True)

    def test_a_keyword_that_a_newer_torch_takes_is_refused_and_not_handed_to_the_function(self, monkeypatch):
        x, seen = torch.ones(3, requires_grad=True), []

        def function(x, **keywords):
            seen.append(keywords)
            return x.sin()

        lowtide.checkpoint(function, x, coming=1)
        assert seen == [{"coming": 1}], "a keyword that torch does not know is the function's"
        module = sys.modules["lowtide.checkpointing.checkpoint"]
        monkeypatch.setattr(module, "CHECKPOINT_KEYWORDS", CHECKPOINT_KEYWORDS | {"coming"})
        for refused in (
            lambda: lowtide.checkpoint(function, x, coming=1),
            lambda: lowtide.checkpoint(coming=1),
        ):
            with pytest.raises(InvalidValueError, match=r"coming: this is a setting of torch .*Leave it out"):
                refused()
        assert len(seen) == 1

    def test_all_that_this_torch_takes_is_known(self):
        """Whatever `torch.utils.checkpoint.checkpoint` takes for itself, `lowtide.checkpoint` takes by name, too."""
        assert inspect.signature(lowtide.checkpoint).parameters.keys() >= CHECKPOINT_KEYWORDS

    @pytest.mark.parametrize("offload", [False, True])
    def test_a_torch_whose_generator_takes_tuples(self, device, monkeypatch, offload):
        """The signature of torch's main branch: `fn, args, kwargs, *, ...`."""
        genuine, calls = _torch._generator, []

        def generator(fn, args, kwargs, *, respect_saved_tensors_hooks=None, **options):
            calls.append(options)
            settings = [options.pop(name) for name in SETTINGS]
            assert not options, "nothing else is handed over"
            hooks = {"respect_saved_tensors_hooks": respect_saved_tensors_hooks}
            known = {name: value for name, value in hooks.items() if name in CHECKPOINT_KEYWORDS}
            return genuine(fn, *settings, *args, **known, **kwargs)

        def run():
            return functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()) if offload else None)

        expected = step(device, keyword, run())
        monkeypatch.setattr(_torch, "_generator", generator)
        monkeypatch.setattr(_torch, "_TAKES_TUPLES", True)
        monkeypatch.setattr(_torch, "_HAS_PLAIN_FRAMES", False)
        assert_same(step(device, keyword, run()), expected)
        assert len(calls) == LAYERS


SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


class TestCurried:
    """`checkpoint(**settings)(function)`, as torch has it since 2.14."""

    @pytest.mark.parametrize("form", FORMS)
    def test_gradients(self, form):
        def curried(function, *args, **kwargs):
            return lowtide.checkpoint(use_reentrant=False)(function)(*args, **kwargs)

        assert_same(step("cpu", form, curried), step("cpu", form, plain))

    def test_a_method_and_a_decorator(self):
        class Decorated(Block):
            forward = lowtide.checkpoint(preserve_rng_state=True)(Block.forward)

        @lowtide.checkpoint(use_reentrant=True)
        def squared(x):
            """Multiply by itself."""
            return x * x

        torch.manual_seed(0)
        theirs = Block().eval()
        ours = Decorated().eval()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(TOKENS, WIDTH)
        for block in (ours, theirs):
            squared(block(x)).sum().backward()
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
        assert (squared.__name__, squared.__doc__) == ("squared", "Multiply by itself.")

    def test_offload(self, sim):
        checkpointed = lowtide.checkpoint(offload=HostStore())

        def run(function, *args, **kwargs):
            return checkpointed(function)(*args, **kwargs)

        expected = step(sim, keyword, plain)
        simdevice.reset()
        assert_same(step(sim, keyword, run), expected)
        assert simdevice.stats().d2h_bytes >= (LAYERS - 1) * BOUNDARY
        assert simdevice.stats().pinned_bytes == 0

    def test_settings_are_honoured(self):
        def exponential(x):
            result = x.exp()  # saves its result: an early stop comes here
            ends.append(1)
            return result

        for early_stop, expected in ((True, 1), (False, 2)):
            ends: list[int] = []
            lowtide.checkpoint(early_stop=early_stop)(exponential)(torch.ones(3, requires_grad=True)).sum().backward()
            assert len(ends) == expected
        with pytest.raises(ValueError, match="determinism_check"):
            lowtide.checkpoint(determinism_check="wrong")(torch.tanh)(torch.ones(3, requires_grad=True))
        with pytest.raises(InvalidValueError, match="offload must be"):
            lowtide.checkpoint(offload="hosst")

    @pytest.mark.parametrize(
        ("args", "kwargs", "named"),
        [((None, 1), {}, "1 positional argument:"), ((), {"x": 1, "y": 2}, "x, y:"), ((None, 1), {"x": 1}, "x:")],
    )
    def test_arguments_without_a_function_are_refused(self, args, kwargs, named):
        with pytest.raises(InvalidValueError, match=f"without a function .* {named} pass arguments to the wrapped"):
            lowtide.checkpoint(*args, **kwargs)

    def test_without_gradients_it_is_the_function(self):
        layer = Counted()
        with torch.no_grad():
            result = lowtide.checkpoint(use_reentrant=False)(layer)(torch.ones(4, WIDTH))
        assert not result.requires_grad
        assert layer.seen.calls == 1
