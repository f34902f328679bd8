"""The guard alarms when a region does nothing, and only then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.applying import guard, region_runtime
from lowtide.counters import RegionLedger
from lowtide.errors import CacheError, SilentNoOpError
from support import needs_zoo


class Skippable(nn.Module):
    """LayerDrop: a block that sometimes hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.skipped = False

    def forward(self, x):
        return x if self.skipped else x + self.inner(x).tanh()


class TwoOutputs(Skippable):
    """Its first output needs no recompute; the second does."""

    def forward(self, x):
        return x + 1, super().forward(x)


class OnlySums(Skippable):
    """Backward through it needs nothing that was saved."""

    def forward(self, x):
        return x + self.inner.bias


class Stack(nn.Module):
    def __init__(self, block=Skippable, count=3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        outputs = [x]
        for layer in self.layers:
            result = layer(outputs[-1])
            outputs.append(result[-1] if isinstance(result, tuple) else result)
        return outputs


@pytest.fixture
def idle(monkeypatch):
    """An engine that silently does nothing."""
    monkeypatch.setattr(region_runtime, "run_region", lambda forward, args, kwargs, *_, **__: forward(*args, **kwargs))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 32, requires_grad=True)


def test_a_block_that_hands_its_input_on_owes_nothing(x):
    model = Stack()
    model.layers[1].skipped = True
    applied = lowtide.apply(model, "recompute")
    model(x)[-1].sum().backward()
    assert [region.recomputes for region in applied.report().regions] == [1, 0, 1]


def test_a_block_that_saves_nothing_owes_nothing(x):
    applied = lowtide.apply(model := Stack(OnlySums), "recompute")
    model(x)[-1].sum().backward()
    assert [(region.forwards, region.recomputes) for region in applied.report().regions] == [(1, 0)] * 3


def test_a_gradient_taken_at_a_regions_output_does_not_enter_the_region(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    outputs = model(x)
    torch.autograd.grad(outputs[-1].sum(), outputs[-2])
    assert [region.recomputes for region in applied.report().regions] == [0, 0, 1]


@pytest.mark.parametrize("block", [Skippable, TwoOutputs])
def test_an_engine_that_does_nothing_is_named(idle, x, block):
    lowtide.apply(model := Stack(block), "recompute")
    with pytest.raises(SilentNoOpError, match=r"layers\.0.*expected a recompute"):
        model(x)[-1].sum().backward()


def test_it_looks_once(idle, x):
    lowtide.apply(model := Stack(), "recompute", strict=False)
    with pytest.warns(UserWarning, match="expected a recompute"):
        model(x)[-1].sum().backward()
    model(x)[-1].sum().backward()


class ByHand(torch.autograd.Function):
    """Runs a stack without gradients, and differentiates it in its own backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = y + layer.inner(y).tanh()
        torch.autograd.backward(y, gradient)
        return x.grad, None


def test_training_in_evaluation_mode_is_refused(x):
    model = Stack().eval()
    applied = lowtide.apply(model, "recompute")
    with pytest.raises(SilentNoOpError, match=r"evaluation mode.*Call model.train\(\)"):
        model(x)[-1].sum().backward()
    applied.remove()
    applied = lowtide.apply(model, "recompute")
    model.train()(x)[-1].sum().backward()
    model.eval()(x)[-1].sum().backward()  # the first backward was looked at, and was right
    assert {region.recomputes for region in applied.report().regions} == {1}


def test_evaluation_without_a_backward_is_fine(x):
    model = Stack()
    applied = lowtide.apply(model, "recompute; *.1: none")
    model.eval()(x)
    with torch.no_grad():
        model(x)
    model.train()(x)[-1].sum().backward()
    assert [region.recomputes for region in applied.report().regions] == [1, 0, 1]


def test_a_block_that_is_left_out_may_stay_in_evaluation_mode(x):
    model = Stack()
    model.layers[1].eval()
    applied = lowtide.apply(model, "recompute; *.1: none")
    model(x)[-1].sum().backward()
    assert [region.recomputes for region in applied.report().regions] == [1, 0, 1]


def test_a_model_that_differentiates_its_blocks_itself_is_refused(x):
    """Reformer: its layers run without gradients, and again in a backward of its own. No policy acts there."""
    applied = lowtide.apply(model := Stack(), "recompute")
    with pytest.raises(SilentNoOpError, match=r"layers\.0.*ran without gradients in forward"):
        ByHand.apply(x, model.layers).sum().backward()
    assert [region.forwards for region in applied.report().regions] == [0] * 3


def hooks_on(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters())


@pytest.mark.parametrize("finish", ["backward", "remove"])
def test_a_tower_that_runs_without_gradients_owes_nothing(x, finish):
    model = nn.ModuleDict({"tower": Stack(), "text": Stack()})
    applied = lowtide.apply(model, "recompute")
    with torch.no_grad():
        seen = model["tower"](x)[-1]
    assert hooks_on(model) == 3, "one parameter of each block is watched"
    if finish == "backward":
        model["text"](x + seen)[-1].sum().backward()
        assert [region.recomputes for region in applied.report().regions] == [0] * 3 + [1] * 3
    else:
        applied.remove()
    assert hooks_on(model) == 0


@pytest.mark.parametrize("kinds", [("picture", "text"), ("text", "picture"), ("text", "text", "picture")])
def test_a_tower_that_the_first_batches_leave_out_is_watched_on(x, kinds):
    """Batches of texts and pictures in any order: a tower in evaluation mode is found when backward comes by it."""
    model = nn.ModuleDict({"tower": Stack().eval(), "text": Stack()})
    applied = lowtide.apply(model, "recompute")

    def train():
        for kind in kinds:
            y = model["text"](x)[-1]
            (y + model["tower"](x)[-1] if kind == "picture" else y).sum().backward()

    says = r"region 'tower\.layers\.0' ran in evaluation mode"
    late = kinds[0] == "text"  # an error would end a run that has trained for a while
    with pytest.warns(UserWarning, match=says) if late else pytest.raises(SilentNoOpError, match=says):
        train()
    assert applied.report().regions[-1].recomputes == kinds.index("picture") + 1


def test_a_region_that_was_checked_is_watched_no_more(x, monkeypatch):
    model = nn.ModuleDict({"tower": Stack(), "text": Stack()})
    lowtide.apply(model, "recompute")
    model["text"](x)[-1].sum().backward()
    looked_at = []
    monkeypatch.setattr(guard, "_nodes_behind", lambda output, _first: looked_at.append(output) or [])
    model["text"](x)
    assert looked_at == []
    model["tower"](x)
    assert len(looked_at) == 3


class TestInsideAnotherCheckpoint:
    """A trainer that switches the model's own checkpointing on after the policy was applied (TRL does by default)."""

    def step(self, x, policy: str) -> lowtide.Applied:
        model = Stack()
        applied = lowtide.apply(model, policy)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        return applied

    @pytest.mark.parametrize("policy", ["recompute+offload", "offload"])
    def test_offload_that_finds_nothing_says_what_is_around_it(self, x, tmp_path, policy):
        with pytest.raises(SilentNoOpError, match="ran inside another checkpoint, which keeps the inputs itself: swi"):
            self.step(x, f"{policy}(disk={tmp_path}, tmpfs)")

    def test_recompute_twice_is_a_warning(self, x):
        with pytest.warns(UserWarning, match="ran inside another checkpoint, so it is recomputed twice: switch that"):
            applied = self.step(x, "recompute")
        assert [region.recomputes for region in applied.report().regions] == [1] * 3


def test_blocks_that_also_run_without_gradients_are_no_alarm(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    with torch.no_grad():
        reference = model(x)[-1]
    (model(x)[-1] - reference - 1).square().sum().backward()
    assert [region.recomputes for region in applied.report().regions] == [1] * 3


def test_a_reentrant_checkpoint_around_the_blocks_is_told_once(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    with pytest.warns(UserWarning, match=r"'layers\.0' ran inside a backward: a reentrant checkpoint") as told:
        checkpoint(lambda y: model(y)[-1], x, use_reentrant=True).sum().backward()
    assert len(told) == 1
    assert told[0].filename == __file__, "it points at the line that the user wrote"
    assert [(region.forwards, region.recomputes) for region in applied.report().regions] == [(1, 1)] * 3


def test_a_block_that_was_replaced_by_a_copy_is_named(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    model.layers[1] = copy.deepcopy(model.layers[1])
    with pytest.raises(SilentNoOpError, match=r"'layers\.1' was replaced after the policy was applied"):
        model(x)[-1].sum().backward()
    with lowtide.apply(model, "recompute") as again:
        assert again is not applied
        model(x)[-1].sum().backward()
        assert [region.recomputes for region in again.report().regions] == [1] * 3


def test_blocks_that_were_all_replaced_by_copies_are_named(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    model.layers = copy.deepcopy(model.layers)
    with pytest.raises(SilentNoOpError, match=r"'layers\.0', 'layers\.1' and 1 more were replaced"):
        model(x)
    assert [region.forwards for region in applied.report().regions] == [0] * 3


def test_a_block_that_is_replaced_by_a_copy_in_a_later_step_is_told_once(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    model(x)[-1].sum().backward()
    model.layers[2] = copy.deepcopy(model.layers[2])
    with pytest.warns(UserWarning, match=r"'layers\.2' was replaced after the policy was applied") as told:
        model(x)[-1].sum().backward()
    model(x)[-1].sum().backward()
    assert len(told) == 1
    assert [region.recomputes for region in applied.report().regions] == [3, 3, 1]


def test_copies_that_stand_elsewhere_or_come_after_the_policy_are_no_alarm(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    copy.deepcopy(model)(x)[-1].sum().backward()  # a model of its own, as for a moving average
    reference, spare = (copy.deepcopy(model.layers[0]) for _ in range(2))
    reference(x).sum().backward()
    assert [region.forwards for region in applied.report().regions] == [0] * 3, "copies run plainly, without a word"
    applied.remove()
    model.layers[1] = spare
    model(x)[-1].sum().backward()
    assert all(parameter.grad is not None for parameter in model.layers[1].parameters())


@needs_zoo
def test_a_head_that_grew_under_a_tiled_loss_is_named():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    lowtide.apply(model, "recompute+tile(loss, loss_tokens=4)")
    model.resize_token_embeddings(40)
    ids = torch.arange(16)[None]
    with pytest.raises(SilentNoOpError, match=r"'lm_head' was replaced after the policy was applied"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@needs_zoo
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_transformers_flag_that_is_switched_on_after_the_policy_is_told():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    lowtide.apply(model, "recompute")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    ids = torch.arange(16)[None]
    with pytest.warns(UserWarning, match="ran inside a backward: a reentrant checkpoint"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


class FakeCache:
    """Stands for transformers' `DynamicCache`, which is recognised by its name and its `update`."""

    def __init__(self) -> None:
        self.states = {}

    def update(self, states, layer):
        self.states[layer] = torch.cat([*self.states.get(layer, ()), states])[None]
        return self.states[layer][0]

    def get_seq_length(self, layer=0):
        return self.states[layer].shape[1] if layer in self.states else 0


class Attends(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.inner, self.layer_idx = nn.Linear(32, 32), layer_idx

    def forward(self, x, past_key_values=None):
        states = self.inner(x)
        seen = states if past_key_values is None else past_key_values.update(states, self.layer_idx)
        return x + seen.mean(0).tanh()


class PrefixAndExpert(nn.Module):
    """PI0: of the first stack only the cache is used, by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.ModuleList(Attends(i) for i in range(2))
        self.expert = nn.ModuleList(Attends(i) for i in range(2))

    def forward(self, x, cache):
        self.run(self.prefix, x, cache)
        return self.run(self.expert, x.flip(0), cache)

    @staticmethod
    def run(layers, x, cache):
        for layer in layers:
            x = layer(x, past_key_values=cache)
        return x


@pytest.mark.filterwarnings("ignore:lowtide. key-value caches are dropped")
class TestCaches:
    def test_a_stack_of_which_only_the_cache_is_used_is_refused(self, x):
        lowtide.apply(model := PrefixAndExpert(), "recompute")
        with pytest.raises(SilentNoOpError, match=r"'prefix\.0': its key-value cache was dropped.*'expert\.0'"):
            model(x, FakeCache()).sum().backward()

    def test_so_is_one_that_is_frozen(self, x):
        model = PrefixAndExpert()
        model.prefix.requires_grad_(False)
        lowtide.apply(model, "recompute")
        with pytest.raises(SilentNoOpError, match="continues from that cache"):
            model(x.detach(), FakeCache()).sum().backward()

    def test_two_stacks_with_places_of_their_own_are_no_alarm(self, x):
        """Dense layers and then mixtures of experts, the first of them frozen."""
        model = PrefixAndExpert()
        for place, layer in enumerate(model.expert):
            layer.layer_idx = 2 + place
        model.prefix.requires_grad_(False)
        applied = lowtide.apply(model, "recompute")
        model(x.detach(), FakeCache()).sum().backward()
        assert [region.recomputes for region in applied.report().regions] == [0, 0, 1, 1]

    @pytest.mark.parametrize("policy", ["recompute", "recompute(every=2)"])
    def test_a_cache_that_nobody_reads_is_dropped(self, x, policy):
        model, cache = PrefixAndExpert(), FakeCache()
        applied = lowtide.apply(model, policy)
        model.run(model.expert, x, cache).sum().backward()
        recomputed = [region.recomputes for region in applied.report().regions[2:]]
        assert recomputed == ([1, 1] if policy == "recompute" else [1, 0])
        assert cache.get_seq_length(0) == 0

    def test_a_cache_with_content_is_refused(self, x):
        """Prefix tuning: what is in the cache is what is trained."""
        model, cache = PrefixAndExpert(), FakeCache()
        cache.update(torch.randn(3, 32, requires_grad=True), 0)
        lowtide.apply(model, "recompute")
        with pytest.raises(CacheError, match=r"'expert\.0' is given a key-value cache with content"):
            model.run(model.expert, x, cache)


class Tower(nn.Module):
    """A tiny tower beside a large stack."""

    def __init__(self, tokens=64) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Skippable() for _ in range(2))
        self.layers = nn.ModuleList(Skippable() for _ in range(2))
        self.tokens = tokens

    def forward(self, x, *, with_layers=True):
        small = x[:2]
        for block in self.tower:
            small = block(small)
        hidden = small.mean(0) + x[: self.tokens]
        for layer in self.layers if with_layers else ():
            hidden = layer(hidden)
        return hidden


SMALL_AND_LARGE = {"regions": ["tower.*", "layers.*"]}


class Box:
    """Nobody knows what is in it."""

    def __init__(self, x) -> None:
        self.x = x


class TestSmallRegions:
    @pytest.mark.parametrize("policy", ["recompute+offload", "offload"])
    def test_a_small_tower_beside_a_large_model_is_noted(self, device, caplog, policy):
        applied = lowtide.apply(model := Tower().to(device), policy, **SMALL_AND_LARGE)
        with caplog.at_level("INFO", logger="lowtide"):
            for _ in range(2):
                model(torch.randn(64, 32, device=device)).sum().backward()
        said = [record.getMessage() for record in caplog.records if "nothing to offload" in record.getMessage()]
        assert len(said) == 2, "once for each"
        assert "'tower.0'" in said[0] or "'tower.1'" in said[0]
        assert [region.is_small for region in applied.report().regions] == [True, True, False, False]
        assert "tower.0-1 x2: nothing to offload" in str(applied.report())
        assert "layers.0-1 x2: nothing" not in str(applied.report())

    def test_it_is_an_error_if_nothing_at_all_can_be_offloaded(self, device):
        lowtide.apply(model := Tower(tokens=2).to(device), "recompute+offload", **SMALL_AND_LARGE)
        with pytest.raises(SilentNoOpError, match=r"smaller than 4 KiB.*Use 'recompute'.*to 'layers\.1'"):
            model(torch.randn(64, 32, device=device)).sum().backward()

    def test_a_rule_for_the_small_part_alone_is_an_error(self, device):
        lowtide.apply(model := Tower().to(device), "recompute; tower.*: recompute+offload", **SMALL_AND_LARGE)
        with pytest.raises(SilentNoOpError, match=r"smaller than 4 KiB.*1 more such regions, to 'tower\.1'"):
            model(torch.randn(64, 32, device=device)).sum().backward()

    def test_what_has_not_run_yet_may_be_large(self, device):
        lowtide.apply(model := Tower().to(device), "recompute+offload", **SMALL_AND_LARGE)
        model(torch.randn(64, 32, device=device), with_layers=False).sum().backward()
        model(torch.randn(64, 32, device=device)).sum().backward()

    @pytest.mark.parametrize("hide", [Box, lambda x: x.to(torch.complex64).conj()])
    def test_a_large_input_that_no_store_takes_is_an_error_beside_others(self, device, hide):
        class Hides(Skippable):
            def forward(self, x):
                hidden = x.x if isinstance(x, Box) else x.real
                return super().forward(hidden)

        class Hiding(Tower):
            def __init__(self) -> None:
                super().__init__()
                self.tower = nn.ModuleList([Hides()])

            def forward(self, x):
                x = self.tower[0](hide(x))
                for layer in self.layers:
                    x = layer(x)
                return x

        lowtide.apply(model := Hiding().to(device), "recompute+offload", **SMALL_AND_LARGE)
        why = "hidden in an object of an unknown kind" if isinstance(hide(torch.ones(1)), Box) else "16384 bytes are in"
        with pytest.raises(SilentNoOpError, match=rf"'tower\.0'.*{why}"):
            model(torch.randn(64, 32, device=device, requires_grad=True)).sum().backward()


def test_a_region_that_runs_often_without_gradients_is_hooked_once():
    region = guard.WatchedRegion(lowtide.Policy.parse("recompute"), RegionLedger("layers.0"))
    module, watching = nn.Linear(2, 2), guard.Guard(strict=True)
    for _ in range(3):
        watching.expect_no_gradient(region, module)
    assert len(module.weight._post_accumulate_grad_hooks) == 1
    watching.close()
    assert not module.weight._post_accumulate_grad_hooks, "nothing is left on the parameter"
