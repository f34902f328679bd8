"""The table of accelerators: its rows, and which of them a name means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import find_accelerator, load_table, match_accelerator, read_accelerator

if TYPE_CHECKING:
    from pathlib import Path

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
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
    ],
)
def test_a_driver_s_name_is_matched_by_its_words(name: str, row: str):
    assert match_accelerator(name, 20 * GIB).name == row


SHEET = {
    "name": "X1",
    "memory": "10GiB",
    "half_tflops": 100,
    "single_tflops": 50,
    "bandwidth_gb": 500,
    "link_gb": 16,
    "network_gb": 16,
}


def test_a_data_sheet_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "sheet.json"
    path.write_text(json.dumps(SHEET))
    card = read_accelerator(path)
    assert (card.name, card.memory, card.half_flops, card.source) == ("X1", 10 * GIB, 100e12, str(path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"link_gb": None}, "'link_gb' is wrong: None"),
        ({"half_tflops": 0}, "'half_tflops' is wrong: 0"),
        ({"half_tflops": True}, "'half_tflops' is wrong: True"),
        ({"has_flash": "no"}, "'has_flash' is wrong: 'no'"),
        ({"tflops": 1}, "unknown 'tflops'"),
    ],
)
def test_a_wrong_data_sheet_is_refused(tmp_path: Path, change: dict[str, Any], reason: str):
    path = tmp_path / "sheet.json"
    path.write_text(json.dumps(SHEET | change))
    with pytest.raises(InvalidValueError, match=reason):
        read_accelerator(path)
    path.write_text("[]")
    with pytest.raises(InvalidValueError, match="must be one JSON object"):
        read_accelerator(path)


def test_an_unknown_accelerator_is_told_of_the_data_sheet():
    with pytest.raises(InvalidValueError, match="--device-file"):
        find_accelerator("X1")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("NVIDIA L40", 'device="L40S", and the memory of this one with budget='),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "device=,"),
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


def test_ranks_on_several_machines_share_the_machines_links():
    card = find_accelerator("A100-80GB")
    assert card.rate_among(8) == card.network_rate
    assert card.rate_among(16) == pytest.approx(8 * 25e9 * card.efficiencies.network)
    assert find_accelerator("L40S").rate_among(16) == find_accelerator("L40S").network_rate, "no machine is known"


def test_a_data_sheet_may_name_what_torch_gives_to_products(tmp_path: Path):
    path = tmp_path / "sheet.json"
    path.write_text(json.dumps(SHEET | {"blas_workspace": "32MiB", "fabric_gb": 12.5}))
    card = read_accelerator(path)
    assert (card.blas_workspace, card.fabric) == (32 * 2**20, 12.5e9)
