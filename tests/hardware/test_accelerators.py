"""The table of accelerators: its rows, and which of them a name means."""

from __future__ import annotations

import pytest

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import find_accelerator, load_table, match_accelerator

GIB = 2**30


def test_the_table_of_accelerators_has_what_was_promised():
    names = {row.name for row in load_table()}
    assert names >= {"H100", "H200", "B200", "A100-40GB", "A100-80GB", "L40S", "L4", "RTX 4090", "RTX 5090", "RTX 3090"}
    assert names >= {"RTX 6000 Ada", "T4", "MI300X"}
    for row in load_table():
        assert row.source
        assert row.memory > 10 * GIB
        assert row.half_flops >= row.single_flops
        assert row.bandwidth > row.link


def test_accelerators_are_found_in_any_spelling():
    assert find_accelerator("rtx4090").name == "RTX 4090"
    with pytest.raises(InvalidValueError, match="did you mean 'L40S'"):
        find_accelerator("L40")
    assert match_accelerator("NVIDIA A100-SXM4-80GB", 79 * GIB).name == "A100-80GB"
    assert match_accelerator("NVIDIA GeForce RTX 4090", 23 * GIB).memory == 23 * GIB
    with pytest.raises(InvalidValueError, match="not in Lowtide's table"):
        match_accelerator("Quadro P400", GIB)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_driver_s_name_is_matched_by_its_words(name: str, row: str):
    assert match_accelerator(name, 20 * GIB).name == row


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("NVIDIA L40", 'device="L40S", and the memory of this one with budget='),
        ("NVIDIA GH200 480GB", 'device="H200",'),
        ("NVIDIA GB200", 'device="B200",'),
        ("NVIDIA T400", "device=,"),
        ("NVIDIA L400", "device=,"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "device=,"),
        ("NVIDIA GeForce RTX 4090 D", "device=,"),
        ("NVIDIA GeForce RTX 3090 Ti", "device=,"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "device=,"),
        ("Quadro RTX 6000", "device=,"),
    ],
)
def test_a_card_that_is_not_in_the_table_is_no_other(name: str, remedy: str):
    with pytest.raises(InvalidValueError, match="not in Lowtide's table") as error:
        match_accelerator(name, 20 * GIB)
    assert remedy in str(error.value)
