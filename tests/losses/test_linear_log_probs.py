"""`lowtide.linear_log_probs` gives what `log_softmax` of the whole logits gives, which never exist."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError
from lowtide.losses.tile_loss import LogProbOptions
from lowtide.losses.trl import use_trl
from models.language_head import CLASSES, WIDTH, assert_close, gradients, problem

OPTIONS = [
    {},
    {"temperature": 0.7},
    {"logit_softcap": 3.0},
    {"logit_scale": 0.25, "logit_softcap": 3.0, "temperature": 1.3},
]


def whole(hidden, weight, tokens, *, bias=None, temperature=1.0, logit_softcap=None, logit_scale=None):
    """Log-probabilities and entropies of the whole logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.double else logits.float()
    if logit_scale is not None:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    everything = F.log_softmax(logits / temperature, -1)
    valid = tokens != -100
    chosen = everything.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropies = -(everything.exp() * everything).sum(-1)
    return torch.where(valid, chosen, 0), torch.where(valid, entropies, 0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [1, 7, 51, "auto"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_log_probs_and_gradients(options, tile, with_bias):
    hidden, weight, bias, tokens = problem()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    options = {**options, "bias": bias if with_bias else None}
    ours = lowtide.linear_log_probs(hidden, weight, tokens, tile=tile, **options)
    expected, _ = whole(hidden, weight, tokens, **options)
    assert_close([ours], [expected])
    assert_close(gradients(ours, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("differentiated", ["both", "log_probs", "entropies"])
def test_entropies_and_gradients(options, differentiated):
    hidden, weight, bias, tokens = problem()
    ours = lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, entropy=True, tile=7, **options)
    expected = whole(hidden, weight, tokens, bias=bias, **options)
    assert_close(ours, expected)
    chosen = {"both": (0, 1), "log_probs": (0,), "entropies": (1,)}[differentiated]
    inputs = [hidden, weight, bias]
    assert_close(
        gradients(torch.stack([ours[i] for i in chosen]), inputs),
        gradients(torch.stack([expected[i] for i in chosen]), inputs),
    )


def test_an_entropy_that_is_only_logged_leaves_backward_alone():
    hidden, weight, _, tokens = problem()
    log_probs, entropies = lowtide.linear_log_probs(hidden, weight, tokens, entropy=True, tile=7)
    assert entropies.requires_grad
    alone = lowtide.linear_log_probs(hidden, weight, tokens, tile=7)
    for ours, theirs in zip(gradients(log_probs, [hidden, weight]), gradients(alone, [hidden, weight]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_choice_that_is_impossible():
    """A logit of minus infinity: its log-probability is that, and nobody else's gradient becomes NaN."""
    hidden, weight, bias, tokens = problem()
    tokens = tokens.clamp(min=1)
    bias = bias.detach().clone()
    bias[0] = -math.inf
    ours = lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, entropy=True, tile=7)
    log_probs, _ = whole(hidden, weight, tokens, bias=bias)
    assert_close([ours[0]], [log_probs])
    assert torch.isfinite(ours[1]).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(sum(ours), [hidden, weight]))
    assert lowtide.linear_log_probs(hidden, weight, torch.zeros_like(tokens), bias=bias).eq(-math.inf).all()


def test_ignored_tokens_get_nothing():
    hidden, weight, _, tokens = problem()
    both = lowtide.linear_log_probs(hidden, weight, tokens.fill_(3), ignore_index=3, entropy=True)
    assert all(torch.equal(result, torch.zeros_like(result)) for result in both)
    assert all(not gradient.any() for gradient in gradients(sum(both), [hidden, weight]))


def test_no_tokens_at_all():
    hidden, weight, _, tokens = problem(lead=(0,))
    log_probs, entropies = lowtide.linear_log_probs(hidden, weight, tokens, entropy=True)
    assert log_probs.shape == entropies.shape == (0,)


def test_it_costs_one_product_more_than_whole_logits():
    hidden, weight, _, tokens = problem()

    def flops(compute):
        with FlopCounterMode(display=False) as counter:
            gradients(compute(), [hidden, weight])
        return counter.get_total_flops()

    ours = flops(lambda: torch.stack(lowtide.linear_log_probs(hidden, weight, tokens, tile=7, entropy=True)))
    assert 3 * ours == 4 * flops(lambda: torch.stack(whole(hidden, weight, tokens)))


def test_without_gradients():
    hidden, weight, _, tokens = problem()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        log_probs = lowtide.linear_log_probs(hidden, weight, tokens, tile=7)
    assert log_probs.grad_fn is None
    assert counter.get_total_flops() == 2 * tokens.numel() * WIDTH * CLASSES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """Against double precision: not worse than whole logits by more than a little."""
    exact = problem()
    hidden, weight, bias, tokens = problem(dtype=dtype)
    truth = gradients(torch.stack(whole(*exact[:2], tokens, bias=exact[2])), exact[:3])
    plain = gradients(torch.stack(whole(hidden, weight, tokens, bias=bias)), [hidden, weight, bias])
    results = lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, entropy=True, tile=7)
    assert {result.dtype for result in results} == {torch.float32}
    for a, b, c in zip(gradients(torch.stack(results), [hidden, weight, bias]), plain, truth, strict=True):
        assert a.dtype is dtype
        assert (a - c).norm() <= 1.2 * (b - c).norm() + 1e-3 * c.norm()


def test_autocast():
    hidden, weight, bias, tokens = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, tile=7)
        expected, _ = whole(hidden, weight, tokens, bias=bias)
    inputs = [hidden, weight, bias]
    assert_close([ours], [expected], 1e-3)
    found = gradients(ours, inputs)
    assert_close(found, gradients(expected, inputs), 1e-2)
    assert all(gradient.dtype is torch.float32 for gradient in found)


def test_a_graph_that_is_kept_and_a_second_derivative():
    hidden, weight, _, tokens = problem()
    total = lowtide.linear_log_probs(hidden, weight, tokens, tile=7).sum()
    first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(total, [hidden, weight], retain_graph=True), first))
    with pytest.raises(lowtide.LowtideError, match="linear_log_probs has no second derivative"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_a_policy_gradient_step_of_a_language_model():
    """What GRPO computes: ratios to old log-probabilities, an advantage for each sample, an entropy bonus."""
    hidden, weight, _, tokens = problem()
    advantages = torch.randn(3, 1, dtype=torch.double)

    def loss(log_probs, entropies):
        ratios = (log_probs - log_probs.detach()).exp()
        return -(ratios * advantages).mean() - 0.01 * entropies.mean()

    ours = loss(*lowtide.linear_log_probs(hidden, weight, tokens, temperature=0.9, entropy=True, tile=7))
    expected = loss(*whole(hidden, weight, tokens, temperature=0.9))
    assert_close(gradients(ours, [hidden, weight]), gradients(expected, [hidden, weight]))


@pytest.mark.parametrize("entropy", [False, True])
def test_the_peak_is_a_twentieth_of_the_whole_logits(sim, entropy):
    """In single precision, which is what log_softmax makes of them; as many classes as tokens."""
    count = 4096
    hidden = torch.randn(count, 8, device=sim).bfloat16().requires_grad_()
    weight = torch.randn(count, 8, device=sim).bfloat16().requires_grad_()
    tokens = torch.randint(0, count, (count,), device=sim)
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    results = lowtide.linear_log_probs(hidden, weight, tokens, tile=80, entropy=entropy)
    (sum(results) if entropy else results).sum().backward()
    torch.accelerator.synchronize()
    assert simdevice.stats().peak_bytes - base <= 4 * count * count / 20


class TestTheKernelOfTrl:
    """On a CPU it folds tiles with torch's operators: the same arithmetic as its Triton kernels."""

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_results_and_gradients(self, options):
        pytest.importorskip("trl.kernels.chunked_logprob")
        hidden, weight, bias, tokens = problem(dtype=torch.float32)
        inputs = [hidden, weight, bias]
        ours = lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, entropy=True, kernel="trl", **options)
        expected = whole(hidden, weight, tokens, bias=bias, **options)
        assert_close(ours, expected, 1e-5)
        assert_close(gradients(torch.stack(ours), inputs), gradients(torch.stack(expected), inputs), 1e-5)

    def test_log_probs_alone(self):
        pytest.importorskip("trl.kernels.chunked_logprob")
        hidden, weight, _, tokens = problem(dtype=torch.float32)
        ours = lowtide.linear_log_probs(hidden, weight, tokens, kernel="trl")
        assert_close([ours], [whole(hidden, weight, tokens)[0]], 1e-5)

    def test_it_is_refused_where_it_is_not_exact(self):
        hidden, weight, _, tokens = problem()
        with pytest.raises(InvalidValueError, match=r"single precision, and the hidden states are torch.float64"):
            lowtide.linear_log_probs(hidden, weight, tokens, kernel="trl")

    def test_excluded_classes_are_refused(self):
        """Its entropies would be NaN. With a softcap no logit is infinite, and its results are right."""
        pytest.importorskip("trl.kernels.chunked_logprob")
        hidden, weight, bias, tokens = problem(dtype=torch.float32)
        bias.data[0] = -math.inf
        with pytest.raises(InvalidValueError, match="NaN for logits of minus infinity, which the bias has"):
            lowtide.linear_log_probs(hidden, weight, tokens, bias=bias, kernel="trl")
        options = {"bias": bias, "logit_softcap": 3.0}
        ours = lowtide.linear_log_probs(hidden, weight, tokens, entropy=True, kernel="trl", **options)
        expected = whole(hidden, weight, tokens, **options)
        assert_close(ours, expected, 1e-5)
        inputs = [hidden, weight]
        assert_close(gradients(torch.stack(ours), inputs), gradients(torch.stack(expected), inputs), 1e-5)

    def test_what_is_taken_on_a_gpu(self):
        """A head with a bias may have excluded classes, and to look would make the host wait."""
        pytest.importorskip("trl.kernels.chunked_logprob")
        with FakeTensorMode():
            hidden, bias = (torch.empty(shape, device="cuda") for shape in ((3, 4), (5,)))
        options = LogProbOptions(-100, 1.0, None, None)
        assert use_trl("auto", hidden, None, options)
        assert not use_trl("auto", hidden, bias, options)
        assert not use_trl("auto", hidden.double(), None, options)
        assert not use_trl("auto", torch.empty(3, 4), None, options)

    def test_a_second_derivative_is_refused(self):
        pytest.importorskip("trl.kernels.chunked_logprob")
        hidden, weight, _, tokens = problem(dtype=torch.float32)
        total = sum(lowtide.linear_log_probs(hidden, weight, tokens, entropy=True, kernel="trl")).sum()
        with pytest.raises(lowtide.LowtideError, match="linear_log_probs has no second derivative"):
            torch.autograd.grad(total, hidden, create_graph=True, retain_graph=True)
        assert torch.autograd.grad(total, hidden)[0].isfinite().all()

    @pytest.mark.parametrize(
        ("init", "says"),
        [
            ("", r"this version of trl has no trl.kernels.chunked_logprob: it came with 1.16"),
            ("import something_else", r"trl cannot be imported: No module named 'something_else'"),
        ],
        ids=["older", "broken"],
    )
    def test_another_trl_than_expected(self, init, says, tmp_path, monkeypatch):
        """The reason is told, and `auto` takes torch."""
        (tmp_path / "trl").mkdir()
        (tmp_path / "trl" / "__init__.py").write_text(init)
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "trl"] or ["trl"]:
            monkeypatch.setitem(sys.modules, name, None)
            monkeypatch.delitem(sys.modules, name)
        hidden, weight, _, tokens = problem(dtype=torch.float32)
        with pytest.raises(InvalidValueError, match=says):
            lowtide.linear_log_probs(hidden, weight, tokens, kernel="trl")
        with FakeTensorMode():
            hidden = torch.empty(3, 4, device="cuda")
        assert not use_trl("auto", hidden, None, LogProbOptions(-100, 1.0, None, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": torch.tensor(1.0)}, "temperature must be a number"),
        ({"logit_softcap": -1.0}, "must be positive"),
        ({"tile": 0}, "at least one token"),
        ({"kernel": "liger"}, "kernel must be 'auto', 'torch' or 'trl'"),
        ({"kernel": "trl", "tile": 4}, "has its own tile size"),
        ({"tokens": torch.zeros(3, 16, dtype=torch.int64)}, "tokens .* one entry per token"),
        ({"tokens": torch.zeros(3, 17)}, "tokens must be class numbers"),
        ({"weight": torch.ones(CLASSES, 3, dtype=torch.double)}, "does not fit"),
        ({"weight": torch.ones(CLASSES, WIDTH)}, "the same type"),
    ],
)
def test_refused(change, message):
    hidden, weight, _, tokens = problem()
    with pytest.raises(InvalidValueError, match=message):
        lowtide.linear_log_probs(**{"hidden": hidden, "weight": weight, "tokens": tokens, **change})
