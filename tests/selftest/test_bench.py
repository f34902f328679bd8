"""The sizes of work that suit a device: by what it computes with, and by the memory that is free."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowtide.hardware.accelerators import find_accelerator
from lowtide.hardware.calibration import Measured
from lowtide.selftest import bench as benches
from lowtide.selftest import plans
from lowtide.selftest.bench import open_bench
from lowtide.selftest.models import workload_config
from lowtide.targets.job import DTYPES

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """Make this machine have a card of NVIDIA's, as far as the bench looks."""

    def make(name: str | None, *, capability: tuple[int, int], free: int = 70 * GIB, counts: bool = True) -> None:
        def total() -> int:
            if counts:
                return 0
            raise RuntimeError("Allocator for cuda is not a DeviceAllocator")

        sheet = None if name is None else find_accelerator(name)
        monkeypatch.setattr(benches, "find_device", lambda _: torch.device("cuda"))
        monkeypatch.setattr(benches, "_data_sheet", lambda _: (sheet, "" if sheet else "not in the table"))
        monkeypatch.setattr(benches, "give_back", lambda _: "")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, 80 * GIB))
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: total())

    return make


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "tokens"),
    [
        ("H100", (9, 0), "bf16", 8192),
        ("T4", (7, 5), "fp16", 2048),
        ("V100-32GB", (7, 0), "fp16", 2048),
        (None, (7, 5), "fp16", 2048),
        (None, (8, 6), "bf16", 8192),
    ],
)
def test_a_card_without_flash_attention_gets_work_that_it_can_do(card, name, capability, dtype, tokens):
    card(name, capability=capability)
    with open_bench("cuda") as bench:
        config = workload_config(bench.work)
        assert (bench.work.dtype, bench.work.tokens, bench.half) == (dtype, tokens, dtype)
        assert bench.has_flash == (dtype == "bf16")
        grouped = config.num_key_value_heads < config.num_attention_heads
        assert grouped == bench.has_flash, "attention of grouped heads needs flash, or holds all scores"
        assert bench.work.probe.sequence <= tokens
        assert bench.work.width == DTYPES[dtype].itemsize


def test_the_work_is_chosen_by_what_is_free(card):
    card("H100", capability=(9, 0), free=12 * GIB)
    with open_bench("cuda") as busy:
        assert busy.work.tokens == 4096
    card("H100", capability=(9, 0), free=60 * GIB)
    with open_bench("cuda") as idle:
        assert idle.work.tokens == 8192


def test_a_backend_that_counts_no_bytes_has_no_stages_that_count_them(card):
    card("H100", capability=(9, 0), counts=False)
    with open_bench("cuda") as bench:
        assert not bench.counts_peaks
        assert "does not count" in plans.run(bench).why


def test_a_device_that_is_not_in_the_table_is_planned_without_flash_if_it_has_none(sim):
    rates = Measured(matmul=8e9, attention=4e9, attention_backward=3e9, memory=1e9, link=5e7, link_to_host=5e7)
    with open_bench(sim, quick=True) as bench:
        for has_flash in (False, True):
            unknown = dataclasses.replace(bench, sheet=None, has_flash=has_flash)
            assert plans.sheets(unknown, rates)[1].has_flash == has_flash


def test_tiles_are_a_share_of_the_tokens(sim):
    with open_bench(sim, quick=True) as bench:
        assert bench.work.tile * 4 == bench.work.tokens
        for policy in bench.tiled(plans.POLICIES):
            assert "{" not in policy
            assert "tokens=" not in policy or f"tokens={bench.work.tile}" in policy
        assert any("tile(tokens" in policy for policy in plans.POLICIES), "whole blocks in tiles"
