"""Every check catches the fault that it is there for, and no unrelated check does."""

from __future__ import annotations

import collections
import itertools
import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.auditing import CHECKS, CannotAuditError, Verdict, audit
from lowtide.errors import NoRegionError
from models import engines
from models.engines import Engine, loss, net

FAULTS = [
    (engines.SkipsALayer, {"recomputed"}),
    (engines.DoesNothing, {"recomputed", "memory"}),
    (engines.DropsAGradient, {"gradients present"}),
    (engines.ChangesAGradient, {"gradient values"}),
    (engines.ForgetsTheRandomState, {"random state", "gradient values"}),
    (engines.ChangesTheOutput, {"outputs", "gradient values"}),
    (engines.AccumulatesTwice, {"DDP readiness", "adapters on a frozen base"}),
    (engines.KeepsEverything, {"memory"}),
    (engines.CannotBeUndone, {"reversible"}),
    (engines.HooksAgainAndAgain, {"idempotent"}),
    (engines.CannotBePickled, {"copy and pickle"}),
    (engines.CannotBeUnpickled, {"copy and pickle"}),
    (engines.LosesTheInPlaceCheck, {"in-place changes"}),
    (engines.HoldsWhatItRestored, {"offload"}),
    (engines.Reentrant, {"DDP readiness", "adapters on a frozen base"}),
]


def failed(report) -> set[str]:
    return {check.name for check in report.failures}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (Engine, {}),
        (Engine, {"scaled": True}),
        (engines.RefusesWithoutAWord, {}),
        (engines.Offloads, {}),
        (engines.Offloads, {"scaled": True}),
        (engines.Offloads, {"by_keyword": True}),
    ],
    ids=str,
)
def test_a_right_engine_passes_everything(engine, options):
    model, batch = net(**options)
    report = audit(model, batch, configure=engine(), loss=loss)
    assert report.ok, report
    assert {check.name for check in report.checks} == set(CHECKS)
    assert report["gradient values"].evidence["identical"]
    assert report["offload"].verdict is (Verdict.PASS if engine is engines.Offloads else Verdict.NOT_APPLICABLE)
    passed = {check.name for check in report.checks if check.verdict is Verdict.PASS}
    assert passed >= set(CHECKS) - {"experts", "offload", "buffers", "ranks agree"}


@pytest.mark.parametrize(("engine", "expected"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_engine_is_caught_by_its_check(engine, expected):
    model, batch = net()
    report = audit(model, batch, configure=engine(), loss=loss)
    assert failed(report) == expected, report
    for check in report.failures:
        assert check.remedy
        assert check.summary


def test_statistics_that_are_updated_twice():
    model, batch = net(batch_norm=True)
    report = audit(model, batch, configure=Engine(), loss=loss)
    assert failed(report) == {"buffers"}, report
    assert report["buffers"].evidence["count"] == 3 * 6  # mean, variance and the number of batches


def test_keyword_inputs_that_hooks_miss():
    model, batch = net(by_keyword=True)
    report = audit(model, batch, configure=engines.OffloadsPositionalOnly(), loss=loss, offload=True)
    assert failed(report) == {"offload", "in-place changes"}, "torch keeps keywords where autograd does not look"
    assert report["offload"].evidence["moved_bytes"] == 0
    model, batch = net(scaled=True)
    report = audit(model, batch, configure=engines.OffloadsPositionalOnly(), loss=loss)
    assert report["offload"].verdict is Verdict.INCONCLUSIVE, "half of the bytes"


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [(Engine, "not applicable"), (engines.Offloads, "pass"), (engines.HoldsWhatItRestored, "fail")],
)
def test_blocks_inside_a_block_are_part_of_its_recomputation(engine, verdict):
    """What they pass on to each other is alive while their layer runs again, and nothing that was restored."""
    model, batch = net()
    model.layers = torch.nn.ModuleList(engines.Pairs() for _ in range(6))
    report = audit(model, batch, configure=engine(), loss=loss, checks=["offload"])
    assert report["offload"].verdict == verdict, report
    if engine is not Engine:
        assert report["offload"].evidence["blocks"] == 6


class BuiltWithout(engines.Block):
    """PP-DocLayoutV3's masks: with a ratio of zero, there is no dropout layer to call."""

    dropout_layer: torch.nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.dropout_ratio = 0.0

    def forward(self, x):
        return self.dropout_layer(x) if self.dropout_ratio > 0 else super().forward(x)


def test_a_dropout_that_was_never_built_is_not_switched_on():
    model, batch = net()
    model.layers = torch.nn.ModuleList(BuiltWithout() for _ in range(3))
    report = audit(model, batch, configure=Engine(), loss=loss, dropout=0.1, checks=["random state"])
    assert report["random state"].verdict is Verdict.PASS
    assert report["random state"].evidence["draws"] == 3, "the layers that are there do drop"


@pytest.mark.parametrize(("dropout", "verdict"), [(0.0, "not applicable"), (0.2, "pass")])
def test_attention_draws_with_dropout_only(dropout, verdict):
    model, batch = net()
    model.layers = torch.nn.ModuleList(engines.Attention(dropout) for _ in range(3))
    report = audit(model, batch, configure=Engine(), loss=loss, checks=["random state", "gradient values"])
    assert report["random state"].verdict == verdict, report
    assert report["gradient values"].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("engine", "kept"),
    [(Engine, 0), (engines.KeepsAttention, 3), (engines.KeepsSomeAttention, 2)],
)
def test_attention_that_is_kept_is_not_counted_as_run_again(engine, kept):
    """Torch's selective checkpointing: blocks run again, and their attention does not."""
    model, batch = net()
    model.layers = torch.nn.ModuleList(engines.Attention(0.0) for _ in range(3))
    report = audit(model, batch, configure=engine(), loss=loss)
    assert report["gradient values"].evidence["identical"]
    check = report["recomputed"]
    assert check.verdict is Verdict.PASS
    assert check.evidence["operators"] == {"attention": [3, 3 - kept], "other": [6, 3]}, (
        "the sum at the end is needless"
    )
    assert check.summary.startswith("3 blocks ran again in backward: layers x3")
    assert (f"; {kept} of their 3 calls of attention were kept and ran once" in check.summary) == bool(kept)
    assert not failed(report) - {"copy and pickle"}


@pytest.mark.parametrize(
    ("policy", "attention"),
    [("recompute", [2, 2]), ("recompute(keep=attention)", [2, 0]), ("recompute(keep=attention)+tile(mlp)", [2, 0])],
)
def test_attention_that_lowtide_keeps(policy, attention):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    ids = torch.arange(32).reshape(1, 32)
    batch = {"input_ids": ids, "labels": ids}
    report = audit(model, batch, configure=lambda model: lowtide.apply(model, policy))
    assert report.ok, report
    counts = report["recomputed"].evidence["operators"]
    assert counts["attention"] == attention
    forward, again = counts["other"]
    assert 0.8 * forward < again <= forward
    assert report["gradient values"].evidence["identical"]
    assert report["memory"].verdict is Verdict.PASS


def test_selective_checkpointing_of_trl():
    models = pytest.importorskip("trl.models", reason="needs trl")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    ids = torch.arange(32).reshape(1, 32)

    def selective(model):
        models.enable_selective_activation_checkpointing(model)
        model.gradient_checkpointing_enable({"selective": True})

    report = audit(model, {"input_ids": ids, "labels": ids}, configure=selective, checks=["recomputed", "memory"])
    assert report.ok, report
    assert report["recomputed"].evidence["operators"]["attention"] == [2, 0]
    assert "2 of their 2 calls of attention were kept" in report["recomputed"].summary


def test_offload_that_is_expected_and_does_not_happen():
    model, batch = net()
    assert failed(audit(model, batch, configure=Engine(), loss=loss, offload=True)) == {"offload"}


class Expert(engines.Block):
    """One of one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(engines.WIDTH, engines.WIDTH)])

    def forward(self, x):
        return self.experts[0](super().forward(x))


def test_nothing_is_proved_by_gradients_that_are_all_zero():
    model, batch = net()
    model.layers = torch.nn.ModuleList(Expert() for _ in range(3))
    report = audit(model, batch, configure=Engine(), loss=lambda logits: loss(logits) * 0)
    assert report["gradients present"].verdict is Verdict.INCONCLUSIVE
    assert report["gradient values"].verdict is Verdict.INCONCLUSIVE
    assert report["experts"].verdict is Verdict.INCONCLUSIVE
    assert not report.failures
    assert not report.ok
    assert [check.name for check in report.unproven] == ["gradients present", "gradient values"]
    assert "not proven" in report.conclusion
    assert "remedy: give a batch with labels that are not all ignored" in str(report)


def test_a_loss_that_is_no_number_proves_nothing():
    model, batch = net()
    report = audit(model, batch, configure=Engine(), loss=lambda logits: loss(logits) * float("nan"))
    assert not report.failures, report
    assert not report.ok


def test_a_part_without_the_gradients_is_ok_by_itself():
    model, batch = net()
    report = audit(model, batch, configure=Engine(), loss=lambda logits: loss(logits) * 0, checks=["recomputed"])
    assert report.ok, report


class Masked(engines.Net):
    """Scores of what cannot be chosen are infinite."""

    def forward(self, ids):
        logits = super().forward(ids)
        return {"logits": logits, "scores": logits.index_fill(-1, torch.tensor([0]), float("-inf"))}


def test_an_infinite_output_hides_no_difference():
    options = {"loss": lambda outputs: loss(outputs["logits"]), "checks": ["outputs"]}
    assert audit(Masked(), net()[1], configure=Engine(), **options).ok
    report = audit(Masked(), net()[1], configure=engines.ChangesTheOutput(), **options)
    assert "scores" in report["outputs"].evidence["different"], report


class Expanded(engines.Net):
    """Each layer gets one row in the place of all: memory that cannot be changed in place."""

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x.mean(0, keepdim=True).expand(len(ids), -1))
        return self.head(x)


def test_an_input_that_nobody_can_change_in_place():
    report = audit(Expanded(), net()[1], configure=Engine(), loss=loss, checks=["in-place changes"])
    assert report["in-place changes"].verdict is Verdict.NOT_APPLICABLE, report


def test_a_model_whose_gradients_vary_does_not_act_twice():
    model, batch = net()
    noise = itertools.cycle([1, 1.002])
    report = audit(
        model, batch, configure=Engine(), loss=lambda logits: loss(logits) * next(noise), checks=["idempotent"]
    )
    assert report.ok, report


def test_a_reference_that_is_never_the_same_twice():
    model, batch = net()
    noise = iter(range(1, 1000))
    report = audit(model, batch, configure=Engine(), loss=lambda logits: loss(logits) * next(noise))
    assert report["gradient values"].verdict is Verdict.INCONCLUSIVE
    assert not report.ok


def test_the_model_is_left_as_it_was():
    model, batch = net(batch_norm=True)
    model.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    audit(model, batch, configure=Engine(), loss=loss)
    assert torch.equal(torch.rand(3), expected), "the caller's random state"
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embed.weight.grad is None
    assert all("forward" not in layer.__dict__ and not layer._forward_pre_hooks for layer in model.layers)


def test_a_loss_that_is_cut_off():
    report = audit(engines.Bare(), (torch.randn(4, engines.WIDTH),), configure=engines.Reentrant())
    assert failed(report) == {"gradients present"}, report
    assert "no parameter gets a gradient" in report["gradients present"].summary


class Single(engines.Net):
    """There is but one of it."""

    def __deepcopy__(self, memo):
        raise NotImplementedError("one is enough")


def test_a_model_that_cannot_be_copied():
    torch.manual_seed(0)
    model, (twin, batch) = Single(), net()
    with pytest.raises(CannotAuditError, match=r"cannot be copied.* set the model up yourself"):
        audit(model, batch, configure=Engine(), reference=twin, loss=loss)
    Engine()(model)
    report = audit(model, batch, reference=twin, loss=loss, checks=["recomputed", "gradient values"])
    assert report.ok, report


def test_a_batch_of_a_tokenizer():
    """Transformers' BatchEncoding is a mapping, and no dict."""
    model, (ids,) = net()
    report = audit(model, collections.UserDict(ids=ids), configure=Engine(), loss=loss, checks=["gradient values"])
    assert report.ok, report


class TwoTowers(engines.Net):
    """Pictures go through a tower of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.ModuleList(engines.Block() for _ in range(3))

    def forward(self, ids):
        picture = torch.arange(len(ids) * engines.WIDTH).cos().view(len(ids), -1).to(self.embed.weight)
        for layer in self.tower:
            picture = layer(picture)
        x = self.embed(ids) + picture
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ReentrantTower(Engine):
    """Its input needs no gradient, so that its weights get none."""

    def blocks(self, model):
        return [*model.tower, *model.layers]

    def run(self, function, index, args, kwargs):
        return checkpoint(function, *args, use_reentrant=index < 3, **kwargs)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_adapters_in_a_tower_that_lose_their_gradients(is_frozen):
    """A weight that is frozen has no gradient in the reference: that makes its true gradient no zero."""
    model, batch = TwoTowers(), net()[1]
    model.tower.requires_grad_(not is_frozen)
    name = "adapters on a frozen base"
    report = audit(model, batch, configure=ReentrantTower(), loss=loss, checks=["gradients present", name])
    if is_frozen:
        assert failed(report) == {name}, report
        assert report[name].evidence["count"] == len(report[name].evidence["lost"]) == 6
    else:
        assert failed(report) == {"gradients present"}, "said there, and once"
        assert report[name].evidence["count"] == 12, "without those of the tower"


def test_adapters_that_several_blocks_share():
    """Deformable DETR's heads do."""
    model, batch = net()
    model.layers[1].up.weight = model.layers[0].up.weight
    report = audit(model, batch, configure=Engine(), loss=loss, checks=["adapters on a frozen base"])
    assert report.ok, report
    assert report["adapters on a frozen base"].evidence["count"] == 11


def test_adapters_that_are_wrong_anyway_prove_nothing_about_a_frozen_base():
    model, batch = net()
    report = audit(model, batch, configure=engines.ChangesTheOutput(), loss=loss)
    assert report["adapters on a frozen base"].verdict is Verdict.INCONCLUSIVE, report


class Thaws(Engine):
    """Makes a frozen weight train."""

    def __call__(self, model):
        model.embed.requires_grad_()
        return super().__call__(model)


def test_a_frozen_weight_that_gets_a_gradient():
    model, batch = net()
    model.embed.requires_grad_(False)
    report = audit(model, batch, configure=Thaws(), loss=loss, checks=["gradients present", "gradient values"])
    assert failed(report) == {"gradients present"}, report
    assert report["gradients present"].evidence["gained"] == ["embed.weight"]


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("engine", [Engine, engines.CannotBePickled])
def test_a_class_that_could_never_be_pickled_is_not_blamed_on_the_set_up(is_local, engine):
    class Local(engines.Net):
        pass

    for as_it_is in (True, False):
        model = Local() if is_local else engines.Net()
        options = {} if as_it_is else {"configure": engine()}
        if as_it_is:
            engine()(model)
        (check,) = audit(model, net()[1], loss=loss, checks=["copy and pickle"], **options).checks
        expected = {Engine: "pass", engines.CannotBePickled: "fail"}[engine]
        assert check.verdict == ("not applicable" if is_local else expected), check


def test_a_gradient_that_is_rounding_does_not_make_a_model_noisy():
    """The bias of the last layer cancels in the softmax over rows. Backward differs from run to run, as on a GPU."""
    runs = itertools.count()

    def noisy(logits):
        run = next(runs)
        logits.register_hook(
            lambda gradient: gradient * (1 + 1e-7 * torch.cos(torch.arange(len(gradient)) + run)[:, None])
        )
        return logits.log_softmax(0)[0].mean()

    model, batch = net()
    report = audit(model, batch, configure=Engine(), loss=noisy, checks=["gradient values"])
    assert report.ok, report


def test_a_set_up_that_raises():
    class Raises(Engine):
        def run(self, function, index, args, kwargs):
            raise NotImplementedError("not on Mondays")

    model, batch = net()
    report = audit(model, batch, configure=Raises(), loss=loss)
    assert failed(report) == {"runs"}
    assert "not on Mondays" in report["runs"].summary
    assert report.blocks == {}


def test_the_report_lists_the_blocks_of_every_set_up_that_ran():
    model, batch = net()
    report = audit(model, batch, configure=Engine(), loss=loss, checks=["recomputed"])
    (blocks,) = report.blocks.values()
    assert [block["name"] for block in blocks] == [f"layers.{number}" for number in range(6)]
    assert all(block["forward"] == block["backward"] == 1 for block in blocks)
    assert all(0 < block["bytes"] < block["plain_bytes"] for block in blocks)


def test_a_set_up_that_lowtide_refuses():
    """Its message has the remedy; and to try Lowtide is none."""

    def refuses(model):
        raise NoRegionError("no block was found in Net: name them with regions=")

    model, batch = net()
    report = audit(model, batch, configure=refuses, loss=loss)
    assert failed(report) == {"runs"}
    assert report["runs"].remedy is None
    assert report["runs"].evidence["refusal"] == "no block was found in Net: name them with regions="


def test_a_report_with_infinite_numbers_is_json():
    class Explodes(engines.DropsAGradient):
        change = staticmethod(lambda gradient: gradient * float("inf"))

    model, batch = net()
    report = audit(model, batch, configure=Explodes(), loss=loss, checks=["gradient values"])
    data = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert data["checks"][0]["evidence"]["different"] == {"head.bias": "Infinity"}


class TestBadInput:
    def test_no_parameters(self):
        with pytest.raises(CannotAuditError, match="no parameter that needs a gradient"):
            audit(torch.nn.Tanh(), (torch.ones(3),))

    def test_a_batch_that_does_not_fit(self):
        with pytest.raises(CannotAuditError, match="does the batch fit"):
            audit(net()[0], (torch.ones(3),), configure=Engine(), loss=loss)

    def test_a_loss_without_gradient(self):
        model, batch = net()
        with pytest.raises(CannotAuditError, match="needs no gradient"):
            audit(model, batch, configure=Engine(), loss=lambda logits: logits.detach().sum())

    def test_an_unknown_check(self):
        model, batch = net()
        with pytest.raises(CannotAuditError, match="unknown check 'gradent values'"):
            audit(model, batch, configure=Engine(), loss=loss, checks=["gradent values"])

    def test_an_unknown_mode(self):
        model, batch = net()
        with pytest.raises(CannotAuditError, match="unknown mode"):
            audit(model, batch, modes=["sideways"])

    def test_no_module(self):
        with pytest.raises(CannotAuditError, match=r"needs a torch\.nn\.Module"):
            audit("model", ())
