"""Calibration runs on any device with events, and its file changes the seconds of a plan."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide.errors import InvalidValueError
from lowtide.hardware import calibration
from lowtide.hardware.accelerators import Efficiencies, calibrated, find_accelerator

if TYPE_CHECKING:
    from pathlib import Path


SMALL = calibration.Probe(matrix=64, sequence=64, heads=2, copy=4096, repeats=2)


def test_measures_shares_of_the_peak(sim: str, tmp_path: Path):
    slow = dataclasses.replace(find_accelerator("T4"), half_flops=1e15, bandwidth=1e12, link=1e11)
    path = tmp_path / "calibration.json"
    found = calibration.calibrate(path, slow, SMALL)
    for name, share in dataclasses.asdict(found).items():
        assert 0 < share <= 1, name
    assert calibrated(slow, path).efficiencies == found
    torch.accelerator.synchronize()
    assert sim == "sim"


def test_a_broken_file_is_refused(tmp_path: Path):
    path = tmp_path / "c.json"
    path.write_text("{}")
    with pytest.raises(InvalidValueError, match="is not a calibration file"):
        find_accelerator("H100", path)


def test_a_calibration_of_another_card_is_refused(tmp_path: Path):
    path = tmp_path / "h100.json"
    path.write_text(json.dumps({"accelerator": "H100", "efficiencies": dataclasses.asdict(Efficiencies(matmul=0.9))}))
    assert find_accelerator("h100", str(path)).efficiencies.matmul == 0.9
    with pytest.raises(InvalidValueError, match=r"h100\.json was measured on H100, and the plan is for L40S"):
        find_accelerator("L40S", path)


def test_better_kernels_make_shorter_steps():
    card = find_accelerator("H100")
    better = dataclasses.replace(card, efficiencies=Efficiencies(matmul=1.0))
    assert better.rates.matmul > card.rates.matmul
