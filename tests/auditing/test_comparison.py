"""Gradients side by side: None, zero, rounding, and numbers that are none."""

from __future__ import annotations

import pytest
import torch

from lowtide.auditing.comparison import NOISE, as_near, compare, error_beyond_rounding, relative_errors

NAN, INF = float("nan"), float("inf")


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
        ([INF, 1.0], [INF, 1.0], None),
        ([INF, 1.0], [-INF, 1.0], "different"),
        ([INF, 1.0], [NAN, 1.0], "different"),
        ([complex(0, INF), 1.0], [complex(INF, 0), 1.0], "different"),
        ([complex(1, 2), 1.0], [complex(1, 9), 1.0], "different"),
        ([complex(1, 2), 1.0], [complex(1, 2), 1.0], None),
    ],
)
def test_what_is_no_number(reference, candidate, expected):
    def gradients(values):
        return {"weight": None if values is None else torch.tensor(values), "other": torch.ones(2)}

    found = compare(gradients(reference), gradients(candidate), {})
    assert found.suspects == (["weight"] if expected else [])
    assert not expected or "weight" in getattr(found, expected)


def test_a_gradient_that_is_rounding_says_nothing_about_the_noise_of_a_run():
    """As on a GPU, where sums have no order: what is zero by mathematics differs by all of itself."""
    first = {"weight": torch.ones(2), "zero": torch.tensor([2e-8, 0.0])}
    again = {"weight": torch.ones(2) * (1 + 1e-5), "zero": torch.tensor([0.0, 9e-7])}
    assert relative_errors(first, again)["zero"] > 40
    assert error_beyond_rounding(first, again) == pytest.approx(1e-5, rel=0.02)
    assert error_beyond_rounding(first, again | {"zero": torch.tensor([0.0, 2e-6])}) > 40, "that is no rounding"
    assert error_beyond_rounding(first, again | {"weight": None}) == 1


def test_an_error_is_rounding_up_to_the_floor_and_not_beyond_it():
    """The floor of single precision is a millionth of the largest gradient; a difference of just that is rounding."""
    large = torch.tensor([2.0**20])
    floor = NOISE[torch.float32] * 2.0**20
    first = {"weight": large, "small": torch.tensor([0.0, 2.0])}
    at_floor = {"weight": large, "small": torch.tensor([floor, 2.0], dtype=torch.float64)}
    beyond = {"weight": large, "small": torch.tensor([1.01 * floor, 2.0], dtype=torch.float64)}
    assert error_beyond_rounding(first, at_floor) == 0
    assert error_beyond_rounding(first, beyond) == pytest.approx(1.01 * floor / 2)


@pytest.mark.parametrize(
    ("own", "other", "is_rounding"),
    [
        (1e-3, -1e-3, True),
        (1e-3, 2.9e-3, True),
        (1e-3, 3.1e-3, False),
        (1e-7, 1e-3, False),
        (0.5, 0.5, False),  # double precision has drawn other numbers: it says nothing
        (1e-3, None, False),
    ],
)
def test_another_rounding_is_about_as_far_from_the_true_gradient(own, other, is_rounding):
    true = torch.tensor([3.0, 4.0], dtype=torch.float64)
    plain = (true * (1 + own)).float()
    candidate = None if other is None else (true * (1 + other)).float()
    found = as_near({"weight": true}, {"weight": plain}, {"weight": candidate}, ["weight"])
    assert found == ({"weight"} if is_rounding else set())
    assert not as_near({}, {"weight": plain}, {"weight": candidate}, ["weight"]), "nothing to judge by"


def test_a_gradient_that_plain_rounds_to_the_true_one_by_luck_is_judged_by_the_others():
    true = {name: torch.tensor([3.0, 4.0], dtype=torch.float64) for name in "abc"}
    plain = {"a": true["a"].float(), "b": true["b"].float() * (1 + 1e-3), "c": true["c"].float() * (1 - 1e-3)}
    near, far = true["a"].float() * (1 + 2e-3), true["a"].float() * (1 + 4e-3)
    assert as_near(true, plain, {"a": near}, ["a"]) == {"a"}
    assert as_near(true, plain, {"a": far}, ["a"]) == set()


class OnApple(torch.Tensor):
    """A tensor that says it is on Apple's GPU, which has no double precision."""

    @property
    def device(self):
        return torch.device("mps")

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")


def test_gradients_on_a_device_without_double_precision_are_compared_on_the_cpu():
    expected = {"w": torch.ones(3).as_subclass(OnApple)}
    found = {"w": torch.tensor([1.0, 1.0, 1.5]).as_subclass(OnApple)}
    assert relative_errors(expected, found) == {"w": 0.5}
    assert compare(expected, found, {}).different == {"w": 0.5}
