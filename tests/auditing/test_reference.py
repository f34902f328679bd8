"""The reference's run in double precision, which acquits gradients that are rounding."""

from __future__ import annotations

import torch
from engines import Net, net

from lowtide.auditing.case import Reference
from lowtide.auditing.step import Experiment


class WithAnEmptyParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.empty(0))

    def forward(self, ids):
        return super().forward(ids) + self.empty.sum()


def reference(model) -> Reference:
    def over_rows(logits):
        return logits.log_softmax(0)[0].mean()

    return Reference(model, Experiment(net()[1], over_rows, (), 0, 0.0))


def test_an_empty_parameter_hides_no_other():
    """What is the same for all choices cancels in their softmax."""
    zeros = reference(WithAnEmptyParameter()).zero_by_mathematics
    assert zeros == {"head.bias", "layers.5.down.bias", "empty"}, "what is added to every row"


class SingleOnly(Net):
    runs = 0

    def forward(self, ids):
        type(self).runs += 1
        if self.head.weight.dtype is torch.double:
            raise TypeError("single precision only")
        return super().forward(ids)


def test_a_model_that_cannot_run_in_double_precision_is_tried_once():
    single = reference(SingleOnly())
    assert single.zero_by_mathematics == single.zero_by_mathematics == set()
    assert SingleOnly.runs == 3
