"""What a graph cuts off is told from what only picks an index, at any number of tokens and in any precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide.auditing.dependence
from lowtide.auditing import Grade, audit
from lowtide.auditing.dependence import find_dependence
from lowtide.auditing.precision import InDouble
from lowtide.auditing.reference import deep_copy
from lowtide.auditing.step import Experiment
from models import engines
from models.engines import WIDTH, Engine, loss

CODES = 32


class Encoded(nn.Module):
    """What an encoder makes of every token goes to a head that trains, without a gradient on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, CODES)
        self.book = nn.Embedding(CODES, WIDTH)
        self.head = nn.Linear(WIDTH, CODES)

    def forward(self, x):
        return self.head(self.hidden(self.encoder(x)))


class Argmax(Encoded):
    def hidden(self, y):
        return self.book(y.argmax(-1))


class NearestCode(Encoded):
    """As the encoder of a VQ-VAE without its straight-through estimator."""

    def hidden(self, y):
        return self.book(torch.cdist(y[:, :WIDTH].detach(), self.book.weight).argmin(-1))


class TopPicks(Encoded):
    def hidden(self, y):
        return self.book(y.topk(4).indices).mean(-2)


class Rounded(Encoded):
    def hidden(self, y):
        return (4 * y[:, :WIDTH]).round()


class Detached(Encoded):
    def hidden(self, y):
        return y[:, :WIDTH].detach()


class ThroughANumber(Encoded):
    def hidden(self, y):
        return y[:, :WIDTH].detach() * y.square().mean().item()


class CutAndPicks(Encoded):
    """Both at once: the graph is cut all the same."""

    def hidden(self, y):
        return self.book(y.argmax(-1)) + y[:, :WIDTH].detach()


class InSingleByName(Encoded):
    """Rounds as transformers' norms and losses do, so that a double model is not double in its middle."""

    def forward(self, x):
        y = self.encoder(x).to(torch.float32).detach()
        return self.head(torch.softmax(y[:, :WIDTH], -1, dtype=torch.float32).type_as(x)).float() + torch.zeros(1)


PICKERS = [Argmax, TopPicks, Rounded]
CUT = [Detached, ThroughANumber, CutAndPicks, InSingleByName]
OF_ENCODER = ["encoder.weight", "encoder.bias"]


def dependence(model: nn.Module, tokens: int, names=OF_ENCODER):
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    return find_dependence(model, Experiment((x,), loss, (), 0, 0.0), names, lambda: deep_copy(model))


def made(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


class OnlySingle:
    """Takes double precision from a model."""

    def __init__(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.refuse)

    def refuse(self, model, args):
        if model.head.weight.dtype is torch.double:
            raise TypeError("single precision only")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [24, 512, 4096])
@pytest.mark.parametrize("kind", PICKERS)
@pytest.mark.parametrize("in_double", [True, False])
def test_what_picks_an_index_has_no_gradient_by_nature(kind, tokens, seed, in_double):
    model = made(kind, seed)
    if not in_double:
        OnlySingle(model)
    found = dependence(model, tokens)
    assert (found.on, found.untried) == ([], [])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [24, 512, 4096])
@pytest.mark.parametrize("kind", CUT)
def test_what_is_cut_off_is_found(kind, tokens, seed):
    assert dependence(made(kind, seed), tokens).on == OF_ENCODER


@pytest.mark.parametrize("tokens", [24, 512, 4096])
@pytest.mark.parametrize("kind", [Detached, ThroughANumber, InSingleByName])
def test_without_double_precision_a_straight_line_tells(kind, tokens):
    model = made(kind, 0)
    OnlySingle(model)
    assert dependence(model, tokens).on == OF_ENCODER


def test_double_precision_is_double_where_code_asks_for_single():
    model, x = made(InSingleByName, 0).double(), torch.randn(8, WIDTH, dtype=torch.double)
    assert model(x).dtype is torch.float32
    with InDouble():
        found = model(x)
    true = model.head(torch.softmax(model.encoder(x)[:, :WIDTH], -1))
    assert torch.equal(found, true)


def test_a_changed_weight_is_put_back():
    model = made(Detached, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dependence(model, 24)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class AmongMany(engines.Net):
    """Parameters that nobody uses, around some that are cut off."""

    def __init__(self, unused: int, cut: int) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.before = nn.ParameterList(torch.randn(2) for _ in range(unused // 2))
        self.cut = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(cut))
        self.tower = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(unused // 2)))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.cut:
            x = x + layer(x).detach()
        return self.head(x)


def of(model: nn.Module):
    report = audit(model, (torch.arange(24) % 32,), configure=Engine(), loss=loss, checks=["parameters reached"])
    return report["parameters reached"]


def test_a_cut_layer_among_hundreds_of_unused_parameters():
    result = of(made(lambda: AmongMany(400, 1), 0))
    assert (result.grade, result.evidence["cut"], result.evidence["untried"]) == (
        Grade.WRONG,
        ["cut.0.weight", "cut.0.bias"],
        [],
    )
    (why,) = result.evidence["unused"]
    assert why == "in before, tower, which forward never calls", "each tower is named once"


def test_what_was_not_tried_is_neither_called_cut_nor_unused(monkeypatch):
    monkeypatch.setattr(lowtide.auditing.dependence, "MOST_TRIALS", 7)
    result = of(made(lambda: AmongMany(0, 20), 0))
    assert result.grade is Grade.WRONG
    assert set(result.evidence) == {"cut", "untried", "count", "unused"}
    assert result.evidence["cut"] == ["cut.0.weight", "cut.0.bias"]
    assert result.evidence["untried"][0] == "cut.1.weight"
    assert result.evidence["count"] == 40
    assert "(38 more were not tried one by one, and the loss depends on some of them)" in result.summary
    monkeypatch.setattr(lowtide.auditing.dependence, "MOST_TRIALS", 2)
    result = of(made(lambda: AmongMany(0, 20), 0))
    assert result.evidence["cut"] == []
    assert result.summary.startswith("some of 40 trainable parameters never get a gradient")


def test_a_loss_that_is_not_finite_tells_nothing():
    model = made(lambda: AmongMany(0, 1), 0)
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    result = of(model)
    assert result.verdict == "inconclusive"
    assert "a loss that is not finite does not tell why" in result.summary


def test_unused_parameters_are_named_with_what_ddp_needs():
    result = of(made(lambda: AmongMany(8, 0), 0))
    assert result.verdict == "pass"
    assert result.summary.endswith("which forward never calls. DDP needs find_unused_parameters=True for them")
