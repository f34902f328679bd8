"""Logits that are not computed: each step that a model's code may take on them gives what real logits would."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.counters import TileLedger
from lowtide.errors import LogitsNotComputedError
from lowtide.losses.deferred import DeferredLogits
from lowtide.losses.head_loss import head_loss
from lowtide.tiling.tiled_function import TiledFunction

BATCH, LENGTH, WIDTH, CLASSES = 3, 5, 4, 7


class Head(nn.Linear):
    """A head with its deferred and its real logits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES, bias=False)
        self.ledger = TileLedger("head")

    def defer(self, hidden: torch.Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, CLASSES, hidden.dtype, self._loss, self.forward)

    def _loss(self, hidden, request):
        return head_loss(TiledFunction(self.forward, self), hidden, request, self.ledger, 2)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Head()


@pytest.fixture
def hidden():
    return torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


MASK = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3 == 1
BIAS = torch.linspace(-1, 1, CLASSES)

STEPS = {
    "shift": lambda x: x[..., :-1, :],
    "last": lambda x: x[:, -1],
    "slice": lambda x: x[:, 1:4],
    "numbers": lambda x: x[:, torch.tensor([3, 0])],
    "mask": lambda x: x[MASK],
    "mask and all classes": lambda x: x[MASK, :],
    "all classes by their number": lambda x: x[..., :CLASSES],
    "one sequence": lambda x: x[1],
    "view": lambda x: x.view(-1, CLASSES),
    "view by a list": lambda x: x.view([BATCH * LENGTH, CLASSES]),
    "reshape, classes left open": lambda x: x.reshape(BATCH * LENGTH, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten from the end": lambda x: x.flatten(0, -2),
    "flatten nothing": lambda x: x.flatten(1, 1),
    "contiguous": lambda x: x.contiguous(),
    "float": lambda x: x.float(),
    "cast": lambda x: x.to(torch.float64),
    "cast by keyword": lambda x: x.to(dtype=torch.float64),
    "device": lambda x: x.to("cpu"),
    "bias": lambda x: x + BIAS,
    "bias, other side": lambda x: torch.add(x, BIAS),
    "scale": lambda x: 3 * x,
    "scale to nothing": lambda x: 0 * x,
    "scale twice": lambda x: (x * 3) * 0.5,
    "divide": lambda x: x / 4,
    "softcap": lambda x: 5 * (x / 5).tanh(),
    "softcap by torch": lambda x: torch.mul(torch.tanh(torch.div(x, 5.0)), 5.0),
    "bias, then softcap": lambda x: torch.tanh((x + BIAS) * 2) * 3,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_gives_what_real_logits_would(head, hidden, step):
    expected, deferred = step(head(hidden)), step(head.defer(hidden))
    assert isinstance(deferred, DeferredLogits)
    assert deferred.shape == expected.shape
    assert deferred.dtype == expected.dtype
    torch.testing.assert_close(deferred.materialize(), expected)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_so_does_the_loss_after_it(head, hidden, step, reduction):
    expected, deferred = step(head(hidden)), step(head.defer(hidden))
    labels = torch.arange(expected[..., 0].numel()) % CLASSES
    labels[::4] = -1

    def loss(logits):
        flat = logits.reshape(-1, CLASSES)
        return F.cross_entropy(flat, labels, ignore_index=-1, reduction=reduction, label_smoothing=0.1)

    torch.testing.assert_close(loss(deferred), loss(expected).to(loss(deferred).dtype), rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(loss(deferred).sum(), hidden)
    (wanted,) = torch.autograd.grad(loss(expected).sum(), hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_calls_and_tiles_are_counted(head, hidden):
    for calls in (1, 2):
        F.cross_entropy(head.defer(hidden).view(-1, CLASSES), torch.zeros(BATCH * LENGTH, dtype=torch.int64))
        assert (head.ledger.calls, head.ledger.tiles) == (calls, calls * 8), "15 tokens, 2 in a tile"


def test_it_answers_the_questions_that_code_asks_a_tensor(head, hidden):
    deferred, real = head.defer(hidden), head(hidden)
    assert (deferred.ndim, deferred.dim(), len(deferred)) == (real.ndim, real.dim(), len(real))
    assert (deferred.size(), deferred.size(1), deferred.size(-1)) == (real.size(), real.size(1), real.size(-1))
    assert deferred.device == real.device
    assert deferred.requires_grad


REFUSED = {
    "some classes": lambda x: x[..., :3],
    "one class": lambda x: x[..., 0],
    "a class of a token": lambda x: x[0, 0, 0],
    "classes in reverse": lambda x: x[..., torch.arange(CLASSES - 1)],
    "written to": lambda x: x.__setitem__(0, 0.0),
    "classes flattened": lambda x: x.flatten(),
    "classes flattened with tokens": lambda x: x.flatten(1),
    "classes split": lambda x: x.reshape(-1),
    "classes by tokens": lambda x: x.reshape(CLASSES, -1),
    "a number added": lambda x: x + 1,
    "logits added": lambda x: x + torch.zeros(BATCH, LENGTH, CLASSES),
    "two biases": lambda x: x + BIAS + BIAS,
    "a bias after a scale": lambda x: x * 2 + BIAS,
    "a bias after a softcap": lambda x: x.tanh() + BIAS,
    "a tensor as a scale": lambda x: x * torch.ones(1),
    "divided by a tensor": lambda x: x / torch.ones(1),
    "two softcaps": lambda x: x.tanh().tanh(),
    "subtracted": lambda x: x - 1,
    "compared": lambda x: x == 1,
    "asked whether it is true": bool,
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "as a second argument": lambda x: torch.add(BIAS, x),
    "classes in the second dimension": lambda x: F.cross_entropy(x, torch.zeros(BATCH, CLASSES, dtype=torch.int64)),
    "class weights": lambda x: F.cross_entropy(
        x[0], torch.zeros(LENGTH, dtype=torch.int64), weight=torch.ones(CLASSES)
    ),
    "soft targets": lambda x: F.cross_entropy(x[0], torch.ones(LENGTH, CLASSES)),
    "size_average": lambda x: F.cross_entropy(x[0], torch.zeros(LENGTH, dtype=torch.int64), size_average=True),
    "reduce": lambda x: F.cross_entropy(x[0], torch.zeros(LENGTH, dtype=torch.int64), reduce=True),
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_with_the_remedy(head, hidden, step):
    with pytest.raises(LogitsNotComputedError, match=r"Use outputs.loss; or outputs.logits.materialize\(\)"):
        step(head.defer(hidden))
