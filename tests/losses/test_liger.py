"""Liger's kernel: taken where it is right, refused by name where it is not, and never left to its own backward.

Without liger-kernel and triton the choice alone is tested; with them (`make test-peers`), on triton's interpreter,
also the results.
"""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.losses.liger import liger_sum, use_liger
from lowtide.losses.tile_loss import LossOptions
from models.language_head import CLASSES, WIDTH, assert_close, gradients, problem, whole

HAS_LIGER = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))


def on_cuda(**changes):
    """As much of a tensor on a CUDA device as the choice looks at."""

    class Cuda:
        device = torch.device("cuda")
        dtype = torch.bfloat16
        requires_grad = True

    for name, value in changes.items():
        setattr(Cuda, name, value)
    return Cuda()


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("lowtide.losses.liger.importlib.util.find_spec", lambda _: object())


def test_it_is_taken_on_cuda(installed):
    assert use_liger("auto", on_cuda(), LossOptions(label_smoothing=0.1))
    assert use_liger("liger", on_cuda(), LossOptions())
    assert not use_liger("torch", on_cuda(), LossOptions())


@pytest.mark.parametrize(
    ("hidden", "options", "reason"),
    [
        (on_cuda(device=torch.device("meta")), {}, "on meta"),
        (on_cuda(device=torch.device("cpu")), {}, "on cpu"),
        (on_cuda(dtype=torch.double), {}, "float64"),
        (on_cuda(dtype=torch.float16), {}, "float16"),
        (on_cuda(requires_grad=False), {}, "bias gradient"),
        (on_cuda(), {"logit_scale": 2.0}, "a scale or a softcap"),
        (on_cuda(), {"logit_softcap": 2.0}, "a scale or a softcap"),
    ],
)
def test_where_it_is_not_right_it_is_not_taken(installed, monkeypatch, hidden, options, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not use_liger("auto", hidden, LossOptions(**options))
    with pytest.raises(InvalidValueError, match=reason):
        use_liger("liger", hidden, LossOptions(**options))


def test_triton_s_interpreter_runs_it_on_a_cpu_and_nowhere_else(installed, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_liger("auto", on_cuda(device=torch.device("cpu")), LossOptions())
    assert not use_liger("auto", on_cuda(device=torch.device("meta")), LossOptions())


def test_not_installed(monkeypatch):
    monkeypatch.setattr("lowtide.losses.liger.importlib.util.find_spec", lambda _: None)
    assert not use_liger("auto", on_cuda(), LossOptions())
    with pytest.raises(InvalidValueError, match="not installed"):
        use_liger("liger", on_cuda(), LossOptions())


def test_what_it_cannot_do_is_refused():
    hidden, weight, _, labels = problem(dtype=torch.float32)
    for options in ({"reduction": "none"}, {"tokens": 7}):
        with pytest.raises(InvalidValueError, match="a mean or a sum"):
            lowtide.linear_cross_entropy(hidden, weight, labels, kernel="liger", **options)
    with pytest.raises(InvalidValueError, match="kernel must be"):
        lowtide.linear_cross_entropy(hidden, weight, labels, kernel="cuda")


def test_what_the_kernel_is_given_and_what_becomes_of_its_results(monkeypatch):
    """With a kernel made of torch in the place of Liger's."""

    def forward(_input, weight, target, bias, *, ignore_index, label_smoothing, reduction, accum_dtype):
        assert accum_dtype is torch.float32, "sums in low precision lose small gradients"
        inputs = [_input, weight, bias]
        asked = [tensor.requires_grad for tensor in inputs]
        with torch.enable_grad():
            settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
            loss = whole(_input, weight, target, bias=bias, **settings)
        grads = torch.autograd.grad(loss, [tensor for tensor in inputs if tensor.requires_grad])
        return loss.detach(), "more", *[grads[sum(asked[:i])] if asked[i] else "none" for i in range(3)]

    stand_in = types.SimpleNamespace(fused_linear_cross_entropy_forward=forward)
    monkeypatch.setattr("lowtide.losses.liger.importlib.import_module", lambda _: stand_in)
    hidden, weight, bias, labels = (tensor.detach() for tensor in problem(lead=(9,)))
    labels[::2] = 3
    for needs in ((True, True, True), (True, False, True), (False, True, False)):
        total, found = liger_sum(hidden, weight, bias, labels, LossOptions(3, 0.1), needs)
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        expected = whole(*leaves[:2], labels, bias=leaves[2], ignore_index=3, label_smoothing=0.1, reduction="sum")
        wanted = torch.autograd.grad(expected, leaves)
        assert_close([total], [expected])
        for gradient, correct, need in zip(found, wanted, needs, strict=True):
            assert (gradient is not None) == need
            assert gradient is None or torch.equal(gradient, correct)
    assert not hidden.requires_grad


@pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel and triton are not installed: make test-peers")
class TestResults:
    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
    def test_loss_and_gradients(self, options, with_bias):
        hidden, weight, bias, labels = problem(dtype=torch.float32)
        inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
        options = {**options, "bias": bias if with_bias else None}
        ours = lowtide.linear_cross_entropy(hidden, weight, labels, kernel="liger", **options)
        expected = whole(hidden, weight, labels, **options)
        assert_close([ours], [expected], 1e-5)
        assert_close(gradients(ours, inputs), gradients(expected, inputs), 1e-5)

    def test_a_graph_that_is_kept(self):
        hidden, weight, _, labels = problem(dtype=torch.float32)
        loss = lowtide.linear_cross_entropy(hidden, weight, labels, kernel="liger")
        first = torch.autograd.grad(2 * loss, [hidden, weight], retain_graph=True)
        assert_close(torch.autograd.grad(2 * loss, [hidden, weight]), first)

    def test_all_labels_ignored(self):
        hidden, weight, _, labels = problem(dtype=torch.float32)
        loss = lowtide.linear_cross_entropy(hidden, weight, labels.fill_(-100), kernel="liger")
        assert loss.item() == 0
        assert all(grad.abs().max() == 0 for grad in gradients(loss, [hidden, weight]))

    def test_a_frozen_head(self):
        hidden, weight, _, labels = problem(dtype=torch.float32)
        weight.requires_grad_(False)
        loss = lowtide.linear_cross_entropy(hidden, weight, labels, kernel="liger")
        assert_close(gradients(loss, [hidden]), gradients(whole(hidden, weight, labels), [hidden]), 1e-5)
        assert weight.shape == (CLASSES, WIDTH)
