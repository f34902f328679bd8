"""`recompute(keep=...)`: outputs of dear operators are kept, all else is computed again, gradients stay the same."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import simdevice
from lowtide.checkpointing.checkpoint import run_region
from lowtide.checkpointing.keeping import Keeping
from lowtide.checkpointing.kept_operators import KeptOperators
from lowtide.counters import RegionLedger
from lowtide.errors import InPlaceError, InvalidValueError, LowtideError, SilentNoOpError

WIDTH, TOKENS, LAYERS = 32, 64, 4
BOUNDARY = 2 * TOKENS * WIDTH * 4
LOG_SUMS = 2 * 2 * TOKENS * 4
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
}


class Attention(nn.Module):
    """Multi-head attention, fused or written out, with what may be in it."""

    def __init__(self, kind: str = "fused", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "fused":
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            scores = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 4, dim=-1, dtype=torch.float32)
            attended = torch.matmul(F.dropout(scores.to(q.dtype), self.dropout), v)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **attention) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**attention)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.drop(self.mlp(x))


def build(device="cpu", **attention):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**attention) for _ in range(LAYERS))).to(device).train()


def batch(device="cpu"):
    torch.manual_seed(1)
    return torch.randn(2, TOKENS, WIDTH).to(device).requires_grad_()


def step(model, x):
    model.zero_grad()
    x.grad = None
    torch.manual_seed(2)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


def assert_same(ours, theirs):
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def attention(self):
        names = {operator.overloadpacket.__name__ for operator in ATTENTION}
        return sum(count for name, count in self.calls.items() if name in names)


def count_step(model, x):
    with Counted() as counted:
        step(model, x)
    return counted


class TestWhatRunsAgain:
    def test_attention_runs_once_and_all_else_twice(self):
        plain = count_step(build(), batch())
        model, x = build(), batch()
        lowtide.apply(model, "recompute(keep=attention)")
        first, later = count_step(model, x), count_step(model, x)
        recomputed, y = build(), batch()
        lowtide.apply(recomputed, "recompute")
        for _ in range(2):
            without = count_step(recomputed, y)
        assert without.attention == 2 * LAYERS
        for kept in (first, later):
            assert kept.attention == LAYERS
            assert kept.calls["addmm"] == without.calls["addmm"] > plain.calls["addmm"]
            assert kept.calls["native_layer_norm"] == 2 * plain.calls["native_layer_norm"]

    def test_products_run_once(self):
        plain = count_step(build(), batch())
        model, x = build(), batch()
        lowtide.apply(model, "recompute(keep=matmul)")
        for counted in (count_step(model, x), count_step(model, x)):
            assert counted.calls["addmm"] == plain.calls["addmm"]
            assert counted.calls["native_layer_norm"] == 2 * plain.calls["native_layer_norm"]
            assert counted.attention == 2 * LAYERS

    def test_of_attention_that_is_written_out_the_last_product_runs_once(self):
        plain = count_step(build(kind="written out"), batch())
        model, x = build(kind="written out"), batch()
        lowtide.apply(model, "recompute(keep=attention)")
        for counted in (count_step(model, x), count_step(model, x)):
            assert counted.calls["bmm"] == plain.calls["bmm"] + LAYERS, "scores again, their product with values not"

    def test_the_form_of_attention_may_change_on_the_way(self):
        model, x = build(), batch()
        lowtide.apply(model, "recompute(keep=attention)")
        step(model, x)
        for block in model:
            block.attention.kind = "written out"
        missed, found = count_step(model, x), count_step(model, x)
        assert missed.calls["bmm"] - found.calls["bmm"] == LAYERS

    def test_one_function_in_both_forms(self):
        """Torch writes attention out if its mask needs a gradient: T5 has both forms in one region."""
        bias = nn.Parameter(torch.zeros(8, 8))

        def forward(x):
            return F.scaled_dot_product_attention(F.scaled_dot_product_attention(x, x, x), x, x, attn_mask=bias).exp()

        for _ in range(3):
            with Counted() as counted:
                x = torch.randn(1, 2, 8, 8, requires_grad=True)
                lowtide.checkpoint(forward, x, keep="attention").sum().backward()
            assert counted.attention == 1
            assert counted.calls["bmm"] == 2 + 1 + 4, "scores and product, scores again, and four in backward"

    def test_only_the_calls_that_matter_are_watched(self):
        """From the second step on, a mode sees what attention's function calls, and nothing else."""
        model, x = build(), batch()
        applied = lowtide.apply(model, "recompute(keep=attention)")
        step(model, x)
        places = [region.keeping.places for region in applied._guard.regions]
        assert [[part() for part in where.parts] for where in places] == [[block.attention] for block in model]
        assert all(list(where.functions) == [F.scaled_dot_product_attention] for where in places)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    def test_flex_attention(self):
        """On a CPU it has no backward, so it is frozen here; it is an operator of another kind."""

        def forward(x, frozen):
            with torch.no_grad():
                attended = flex_attention(frozen, frozen, frozen)
            return (x * attended).sin() * attended

        x, frozen = torch.ones(1, 2, 16, 16, requires_grad=True), torch.randn(1, 2, 16, 16)
        expected = torch.autograd.grad(forward(x, frozen).sum(), x)
        keeping = Keeping(KeptOperators(["attention"]))
        for _ in range(2):
            ledger = RegionLedger("region")
            y = run_region(forward, (x, frozen), {}, ledger, None, keeping=keeping)
            assert_same(torch.autograd.grad(y.sum(), x), expected)
            assert ledger.kept_outputs == ledger.recalled_outputs == 1

    def test_operators_of_any_library(self):
        runs = []

        @torch.library.custom_op("lowtide_tests::dear", mutates_args=())
        def dear(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return x.sin()

        dear.register_autograd(lambda ctx, g: g * ctx.x.cos(), setup_context=_save)
        x = torch.randn(8, 8, requires_grad=True)
        y = lowtide.checkpoint(lambda x: dear(x.exp()).exp(), x, keep=["lowtide_tests::dear"])
        y.sum().backward()
        assert len(runs) == 1
        gradient, x.grad = x.grad, None
        x.exp().sin().exp().sum().backward()
        torch.testing.assert_close(gradient, x.grad)


def _save(ctx, inputs, output):
    ctx.x = inputs[0]


KEEPS = ["attention", "matmul", "attention+matmul", "[aten.native_layer_norm.default]", "[aten.gelu, aten.addmm]"]


class TestGradients:
    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize(
        "attention", [{}, {"kind": "written out"}, {"dropout": 0.2}, {"kind": "written out", "dropout": 0.2}], ids=repr
    )
    def test_are_those_of_the_plain_model(self, attention, keep):
        plain, model, x = build(**attention), build(**attention), batch()
        lowtide.apply(model, f"recompute(keep={keep})")
        for _ in range(3):
            assert_same(step(model, x), step(plain, batch()))

    def test_under_autocast(self):
        plain, model = build(), build()
        lowtide.apply(model, "recompute(keep=attention+matmul)")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                ours, theirs = step(model, batch()), step(plain, batch())
            assert_same(ours, theirs)

    def test_with_a_graph_that_is_kept(self):
        plain, model = build(), build()
        lowtide.apply(model, "recompute(keep=attention)")
        for _ in range(2):
            found = []
            for one in (model, plain):
                x = batch()
                torch.manual_seed(2)
                loss = one(x).square().mean()
                first = torch.autograd.grad(loss, x, retain_graph=True)[0]
                found.append([first, torch.autograd.grad(loss, x)[0]])
            assert_same(*found)
            assert torch.equal(*found[0])

    def test_of_gradients(self):
        """Torch has no second derivative of fused attention, but of products."""
        found = []
        for keep in (None, "matmul"):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
            x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
            for _ in range(2):
                y = lowtide.checkpoint(layers, x, keep=keep) if keep else layers(x)
                (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), x)
            found.append([first.detach(), second])
        assert_same(*found)

    def test_of_two_forwards_before_a_backward(self):
        plain, model = build(), build()
        lowtide.apply(model, "recompute(keep=attention)")
        found = []
        for one in (model, plain):
            x, y = batch(), batch()
            torch.manual_seed(2)
            first, second = one(x).sum(), one(y * 2).square().sum()
            first.backward()
            second.backward()
            found.append([x.grad, y.grad])
        assert_same(*found)

    def test_with_tiles_inside(self):
        model, tiled = build(), build()
        lowtide.apply(tiled, "recompute(keep=attention+matmul)+tile(mlp, tokens=16)")
        lowtide.apply(model, "recompute+tile(mlp, tokens=16)")
        for one in (model, tiled):
            for module in one.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        for _ in range(2):
            assert_same(step(tiled, batch()), step(model, batch()))

    @pytest.mark.filterwarnings("ignore:lowtide. region .* ran inside another checkpoint:UserWarning")
    @pytest.mark.parametrize("inside", [False, True])
    def test_beside_another_checkpoint(self, inside):
        """Around a region, it decides what is kept; inside of one, it computes once more."""
        plain, model = build(), build()
        if inside:
            for one in model:
                attention = one.attention
                one.attention = _Checkpointed(attention)
        lowtide.apply(model, "recompute(keep=attention)")
        run = model if inside else lambda x: checkpoint(model, x, use_reentrant=False)
        found = []
        for forward, one in ((run, model), (plain, plain)):
            x = batch()
            torch.manual_seed(2)
            forward(x).square().mean().backward()
            found.append([x.grad, *(p.grad for p in one.parameters())])
        assert_same(*found)

    def test_after_a_forward_that_failed(self):
        plain, model = build(), build()
        lowtide.apply(model, "recompute(keep=attention)")
        step(model, batch())
        model[1].drop = Failing()
        with pytest.raises(ZeroDivisionError):
            step(model, batch())
        assert "forward" not in vars(model[1].attention)
        model[1].drop = nn.Dropout(0.1)
        assert_same(step(model, batch()), step(plain, batch()))


class _Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Failing(nn.Module):
    def forward(self, x):
        return x / 0 if x is None else 1 / 0


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own look at tensors
@pytest.mark.filterwarnings("ignore:lowtide. region .*expected to keep attention:UserWarning")
@pytest.mark.parametrize("what", ["attention", "mlp", "forward"])
def test_beside_what_is_compiled_in_a_region(what):
    """The compiler looks into our modes, and must find nothing there."""
    torch._dynamo.reset()
    plain, model = build(), build()
    for block in model:
        if what == "forward":
            block.forward = torch.compile(block.forward, backend="aot_eager")
        else:
            getattr(block, what).compile(backend="aot_eager")
    lowtide.apply(model, "recompute(keep=attention+matmul)", strict=False)
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for _ in range(3):
        ours, theirs = step(model, batch()), step(plain, batch())
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


class TestRefused:
    def test_a_kept_output_that_is_changed_in_place_after_the_forward(self):
        def forward(x, weight):
            y = x @ weight
            return y, y.sin()

        x, weight = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
        y, z = lowtide.checkpoint(forward, x, weight, keep="matmul")
        y.detach().add_(1)
        with pytest.raises(
            InPlaceError, match=r"forward.*aten::mm, which keep= keeps, was modified.*leave aten::mm out"
        ):
            z.sum().backward()

    def test_a_recompute_that_calls_an_operator_more_often(self):
        runs = []

        def forward(x):
            runs.append(1)
            with torch.no_grad():
                scale = sum((x @ x).sum() for _ in runs)
            return x.exp() * scale

        x = torch.randn(8, 8, requires_grad=True)
        y = lowtide.checkpoint(forward, x, keep="matmul")
        with pytest.raises(LowtideError, match=r"aten::mm more often than its forward did, which was 1"):
            y.sum().backward()

    @pytest.mark.parametrize(
        ("word", "why"),
        [
            ("aten.no_such_operator", "has no operator"),
            ("aten.mm.no_such_overload", "has no operator"),
            ("aten.view.default", "returns a view"),
            ("aten.add_.Tensor", "writes to its arguments"),
        ],
    )
    def test_an_operator_that_cannot_be_kept(self, word, why):
        with pytest.raises(InvalidValueError, match=f"keep: '{word}' {why}" if "has" not in why else why):
            lowtide.apply(build(), f"recompute(keep=[{word}])")

    def test_a_word_that_is_none(self):
        with pytest.raises(InvalidValueError, match="unknown thing to keep 'atention': did you mean 'attention'"):
            lowtide.checkpoint(torch.sin, torch.ones(2), keep="atention")

    def test_two_ways_to_say_what_is_kept(self):
        with pytest.raises(InvalidValueError, match="keep and context_fn both say"):
            lowtide.checkpoint(torch.sin, torch.ones(2), keep="matmul", context_fn=lambda: (None, None))


class Operator:
    """An operator of a package that is not installed here."""

    def __init__(self, name):
        self._schema, self._name = None, name

    def name(self):
        return self._name


class TestWords:
    @pytest.mark.parametrize(
        "name",
        [
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            "aten::_scaled_dot_product_attention_math_for_mps",
            "aten::_flash_attention_forward",
            "aten::_efficient_attention_forward",
            "flash_attn::_flash_attn_forward",
            "flash_attn::_flash_attn_varlen_forward",
            "flash_attn_3::_flash_attn_forward",
            "flash_attn_3::fwd",
            "_flash_attn_9e27194::varlen_fwd",
            "_flash_attn3_48fe103::fwd",
            "xformers_flash::flash_fwd",
            "xformers::efficient_attention_forward_cutlass",
            "flex_attention",
        ],
    )
    def test_attention_is_every_fused_attention(self, name):
        assert Operator(name) in KeptOperators(["attention"])
        assert Operator(name) not in KeptOperators(["matmul"])

    @pytest.mark.parametrize(
        "name",
        [
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "aten::_flash_attention_backward",
            "flash_attn::_flash_attn_backward",
            "flash_attn_3::bwd",
            "flex_attention_backward",
            "aten::_softmax",
            "aten::mm",
        ],
    )
    def test_attention_is_nothing_else(self, name):
        assert Operator(name) not in KeptOperators(["attention"])

    def test_names_with_and_without_an_overload(self):
        mm = torch.ops.aten.mm
        for word in ("aten.mm", "aten::mm", "aten.mm.default", "aten::mm.default"):
            assert mm.default in KeptOperators([word])
            assert mm.out not in KeptOperators([word])
            assert torch.ops.aten.bmm.default not in KeptOperators([word])


class TestOutputsChangedInPlace:
    """PEFT adds adapters in place: what the forward changes after it was kept is computed again."""

    @pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (2, 3, 4, 4)], ids=len)
    @pytest.mark.parametrize(
        "product", [torch.matmul, F.linear, lambda x, w: F.linear(x, w, w[0])], ids=["matmul", "linear", "bias"]
    )
    def test_gradients_are_those_of_the_plain_model(self, product, shape):
        """Of more than two dimensions, a product's memory is returned under another count of changes."""

        def forward(x, weight):
            y = product(x, weight)
            y += 1
            return (y * product(y, weight)).exp()

        found = []
        for run in (lambda *args: lowtide.checkpoint(forward, *args, keep="matmul"), forward):
            for seed in range(2):
                torch.manual_seed(seed)
                x, weight = (torch.randn(size).div_(4).requires_grad_() for size in (shape, (4, 4)))
                with Counted() as counted:
                    run(x, weight).sum().backward()
            found.append([x.grad, weight.grad, counted.calls["mm"] + counted.calls["addmm"]])
        assert_same(found[0][:2], found[1][:2])
        assert found[0][2] == found[1][2] + 1, "the one that was changed is computed again, the other is not"

    def test_of_attention_that_is_written_out(self):
        def forward(x):
            attended = torch.matmul(torch.softmax(torch.matmul(x, x), -1), x)
            attended += x
            return attended.sin()

        found = []
        for run in (lambda x: lowtide.checkpoint(forward, x, keep="attention"), forward):
            for seed in range(2):
                torch.manual_seed(seed)
                x = torch.randn(2, 4, 4, requires_grad=True)
                run(x).sum().backward()
            found.append([x.grad])
        assert_same(*found)

    def test_if_there_are_no_others_the_guard_says_so(self):
        class Changing(Block):
            def forward(self, x):
                attended = torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)
                attended += 1
                return self.mlp(attended)

        model = nn.Sequential(Changing(), Changing())
        lowtide.apply(model, "recompute(keep=attention)")
        loss = model(torch.randn(2, TOKENS, WIDTH, requires_grad=True)).sum()
        with pytest.raises(SilentNoOpError, match=r"it changes what aten::.* returned in place"):
            loss.backward()


class TestGuard:
    def test_a_model_that_calls_no_such_operator_is_an_error(self):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        lowtide.apply(model, "recompute(keep=attention)")
        with pytest.raises(SilentNoOpError, match=r"region '0': expected to keep attention.*aten::addmm \(1\)"):
            model(torch.randn(4, 8)).sum().backward()

    def test_a_region_without_it_beside_others_is_a_warning(self):
        model = build()
        model[2].attention = nn.Linear(WIDTH, WIDTH)
        lowtide.apply(model, "recompute(keep=attention)", regions=["0", "1", "2", "3"])
        with pytest.warns(UserWarning, match=r"region '2': expected to keep attention.*1 such regions"):
            step(model, batch())


class TestMemory:
    """On the emulated device, whose bytes and clock are exact."""

    def run(self, sim, policy, steps=2):
        model, x = build(sim), batch(sim)
        applied = lowtide.apply(model, policy) if policy else contextlib.nullcontext()
        for _ in range(steps):
            model.zero_grad()
            x.grad = None
            simdevice.reset()
            before = simdevice.stats().live_bytes
            torch.manual_seed(2)
            loss = model(x).square().mean()
            after = simdevice.stats()
            held = after.live_bytes - before
            loss.backward()
            del loss
            stats = simdevice.stats()
        assert simdevice.stats().pinned_bytes == 0
        return held, stats, applied

    def test_kept_outputs_cost_their_bytes_and_no_more(self, sim):
        recompute, _, _ = self.run(sim, "recompute")
        keep, _, _ = self.run(sim, "recompute(keep=attention)")
        assert keep - recompute == LAYERS * (BOUNDARY + LOG_SUMS)

    def test_offloaded_they_leave_with_the_inputs(self, sim):
        inputs, moved_inputs, _ = self.run(sim, "recompute+offload")
        held, stats, _ = self.run(sim, "recompute(keep=attention)+offload")
        assert held - inputs == BOUNDARY + LAYERS * LOG_SUMS, "the last region's stays; small tensors always do"
        assert stats.d2h_bytes - moved_inputs.d2h_bytes == (LAYERS - 1) * BOUNDARY
        assert stats.h2d_bytes == stats.d2h_bytes

    def test_time_is_between_plain_and_recompute(self, sim):
        times = [self.run(sim, policy)[1].time for policy in (None, "recompute(keep=attention)", "recompute")]
        assert times[0] < times[1] < times[2]

    def test_nothing_is_held_after_a_graph_is_gone(self, sim):
        model, x = build(sim), batch(sim)
        lowtide.apply(model, "recompute(keep=attention+matmul)")
        step(model, x)
        gc.collect()
        gc.disable()
        try:
            before = simdevice.stats().live_bytes
            for _ in range(3):
                model(x)
            assert simdevice.stats().live_bytes == before
        finally:
            gc.enable()

    def test_a_model_dies_as_before(self):
        model = build()
        lowtide.apply(model, "recompute(keep=attention)")
        step(model, batch())
        reference = weakref.ref(model[0].attention)
        del model
        assert reference() is None
