"""Gradients side by side: None, zero, rounding, and numbers that are none."""

from __future__ import annotations

import pytest
import torch

from lowtide.auditing.comparing import compare

NAN = float("nan")


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ([NAN, NAN], [1.0, 2.0], "different"),
        ([NAN, 0.0], [NAN, 1.0], "different"),
        ([1.0, 2.0], [NAN, NAN], "different"),
        ([NAN, NAN], None, "lost"),
        (None, [NAN, NAN], "gained"),
        (None, [0.0, 0.0], None),
        ([NAN, 1.0], [NAN, 1.0], None),
    ],
)
def test_what_is_no_number(reference, candidate, expected):
    def gradients(values):
        return {"weight": None if values is None else torch.tensor(values), "other": torch.ones(2)}

    found = compare(gradients(reference), gradients(candidate), {})
    assert found.suspects == (["weight"] if expected else [])
    assert not expected or "weight" in getattr(found, expected)
