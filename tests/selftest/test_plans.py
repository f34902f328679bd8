"""Plans beside measurements: which differences are judged."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.hardware.calibration import Measured
from lowtide.selftest import plans
from lowtide.selftest.bench import open_bench

RATES = Measured(matmul=8e9, attention=4e9, attention_backward=3e9, memory=1e9, link=5e7, link_to_host=5e7)


def compared(policy: str, planned: float, measured: float) -> plans.Comparison:
    return plans.Comparison(
        policy=policy,
        planned_peak=100,
        peak=100,
        planned_seconds=planned,
        seconds=measured,
        seconds_before_calibration=None,
    )


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([("a", 1.0, 2.0), ("b", 1.5, 3.0)], "pass"),
        ([("a", 1.5, 2.0), ("b", 1.0, 3.0)], "fail"),
        ([("a", 1.03, 2.0), ("b", 1.0, 3.0)], "pass"),
        ([("a", 1.5, 2.0), ("b", 1.0, 2.1)], "inconclusive"),
    ],
)
def test_the_order_of_times_is_judged_where_they_differ(rows, verdict):
    assert plans._order_row([compared(*row) for row in rows]).verdict == verdict


def test_a_row_says_how_far_off_the_plan_was_before_calibration():
    row = plans._row(dataclasses.replace(compared("a", 1.1, 1.0), seconds_before_calibration=0.6))
    assert "(+10%; -40% before calibration)" in row.summary
    assert row.figures["seconds_error_before_calibration"] == pytest.approx(-0.4)
    without = plans._row(compared("a", 1.1, 1.0))
    assert "before calibration" not in without.summary
    assert without.figures["seconds_error_before_calibration"] is None


def test_a_device_without_a_data_sheet_is_planned_with_its_measured_rates(sim):
    with open_bench(sim, quick=True) as bench:
        before, after = plans.sheets(dataclasses.replace(bench, sheet=None), RATES)
        known, calibrated = plans.sheets(bench, RATES)
    assert before is None
    assert after.rates.flops * after.rates.matmul == pytest.approx(RATES.matmul)
    assert after.rates.bandwidth * after.rates.memory == pytest.approx(RATES.memory)
    assert after.link_rate == pytest.approx(RATES.link)
    assert known == bench.sheet
    assert calibrated.efficiencies.link == 0.5
