"""What the system's files say about accelerators and memory, and what doctor makes of it: with files made here."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide import doctor
from lowtide.machine import Machine, PciDevice, parse_cpus

if TYPE_CHECKING:
    from pathlib import Path

GPU = "0000:65:00.0"
CARD = f"sys/bus/pci/devices/{GPU}"
GOOD = {
    f"{CARD}/current_link_width": "16\n",
    f"{CARD}/max_link_width": "16\n",
    f"{CARD}/current_link_speed": "2.5 GT/s PCIe\n",
    f"{CARD}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{CARD}/numa_node": "1\n",
    "sys/devices/system/node/node1/cpulist": "16-31,48-63\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "proc/meminfo": "MemTotal:       65536000 kB\nMemFree: 1 kB\n",
    "proc/self/cgroup": "0::/jobs/one\n",
    "sys/fs/cgroup/jobs/memory.max": "max\n",
    "sys/fs/cgroup/jobs/one/memory.max": "max\n",
    "proc/sys/kernel/osrelease": "6.8.0-generic\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
}
WSL = {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes a machine with one GPU, on whose node this process runs, and with other files on top."""

    def make(files: dict[str, str] | None = None, *, cpus: set[int] = frozenset(range(16, 32))) -> Machine:
        for name, text in {**GOOD, **(files or {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
        return Machine(tmp_path)

    monkeypatch.setattr(doctor, "accelerator_addresses", lambda: [GPU])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    return make


def hazards(machine: Machine) -> dict[str, doctor.Hazard]:
    return {hazard.title: hazard for hazard in doctor.gpu_machine_hazards(machine)}


def test_files_are_read(machine):
    made = machine()
    assert made.pci_device(GPU) == PciDevice(
        address=GPU,
        width=16,
        most_width=16,
        speed=2.5,
        most_speed=32.0,
        slot_speed=None,
        numa_node=1,
        local_cpus=frozenset([*range(16, 32), *range(48, 64)]),
    )
    assert made.pci_device(GPU).link == "x16 of x16, 2.5 of 32 GT/s"
    assert (made.nvidia_driver, made.huge_pages, made.is_wsl) == ("580.95.05", "madvise", False)
    assert made.memory_limit is None


def test_what_no_file_says_is_not_known(tmp_path):
    nowhere = Machine(tmp_path)
    assert nowhere.pci_device(GPU).width is None
    assert (nowhere.memory_limit, nowhere.nvidia_driver, nowhere.huge_pages) == (None, None, None)


def test_lists_of_processors():
    assert parse_cpus("0-2,7,9-10\n") == {0, 1, 2, 7, 9, 10}
    assert parse_cpus("") == frozenset()


def test_a_good_machine_has_no_hazard(machine):
    assert hazards(machine()) == {}


def test_a_machine_without_a_gpu_is_not_judged(machine, monkeypatch):
    monkeypatch.setattr(doctor, "accelerator_addresses", list)
    assert hazards(machine({f"{CARD}/current_link_width": "4\n"})) == {}


CASES = {
    "width": ({f"{CARD}/current_link_width": "4\n"}, f"the accelerator at {GPU} is linked by PCIe x4 of x16", "slot"),
    "outer group": (
        {"sys/fs/cgroup/jobs/memory.max": f"{8 * 2**30}\n"},
        "this container may use 8 GiB of memory",
        "offload(host=4GiB)",
    ),
    "version 1 of groups": (
        {"proc/self/cgroup": "4:memory:/box\n", "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2**34}\n"},
        "this container may use 16 GiB of memory",
        "offload(host=8GiB)",
    ),
    "huge pages": (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        "transparent huge pages are off",
        "madvise",
    ),
    "old driver": (
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Release\n"},
        "the driver 570.133.20 is too old for CUDA 13.0",
        "580",
    ),
    "WSL2": (WSL, "expandable_segments fails in WSL2 with driver 580.95.05", "615"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hazard_is_found_with_its_remedy(machine, case):
    files, title, remedy = CASES[case]
    found = hazards(machine(files))
    assert list(found) == [title]
    assert remedy in found[title].remedy


@pytest.mark.parametrize(
    ("cpus", "severity"), [({0, 1}, doctor.Severity.WARNING), (set(range(32)), doctor.Severity.NOTE)]
)
def test_a_process_on_another_node(machine, cpus, severity):
    (found,) = hazards(machine(cpus=cpus)).values()
    assert (found.severity, "numactl --cpunodebind=1 --membind=1" in found.remedy) == (severity, True)


def test_segments_that_cannot_grow(machine, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert list(hazards(machine())) == ["the allocator's segments cannot grow"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert hazards(machine()) == {}


def test_little_locked_memory_matters_to_several_ranks(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    made = machine()
    assert hazards(made) == {}
    monkeypatch.setattr(doctor, "accelerator_addresses", lambda: [GPU, GPU])
    assert list(hazards(made)) == ["a process may lock 8 MiB of memory"]


def test_a_card_in_a_slot_of_an_older_generation(machine, tmp_path):
    made = machine()
    bridge = tmp_path / "sys/devices/pci0000:64/0000:64:01.0"
    (bridge / GPU).parent.mkdir(parents=True)
    (tmp_path / CARD).rename(bridge / GPU)
    (tmp_path / CARD).symlink_to(bridge / GPU)
    for speed, count in (("32.0 GT/s PCIe", 0), ("16.0 GT/s PCIe", 1)):
        (bridge / "max_link_speed").write_text(speed)
        found = [hazard for title, hazard in hazards(made).items() if "its slot" in title]
        assert len(found) == count
    assert found[0].title == f"the accelerator at {GPU} can do 32 GT/s, and its slot 16 GT/s"
    assert "lowtide calibrate" in found[0].remedy


def test_in_wsl_the_driver_is_that_of_windows(machine, tmp_path):
    """No file of Linux tells its version: the program that Windows puts there does."""
    made = machine(WSL)
    (tmp_path / "proc/driver/nvidia/version").unlink()
    assert made.nvidia_driver is None
    program = tmp_path / "usr/lib/wsl/lib/nvidia-smi"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 581.42 && echo 581.42\n')
    program.chmod(0o755)
    assert made.nvidia_driver == "581.42"
    assert "expandable_segments fails in WSL2 with driver 581.42" in hazards(made)
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert made.nvidia_driver is None
