"""Random generators: a state is saved, compared and set again; a seed decides all draws, and nothing leaks out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.randomness import RandomState, preserved_generators, seeded, set_seed


def draws() -> tuple[float, float, float]:
    """One number of each of the CPU's generators."""
    return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002, S311


def drawn_on(device: str) -> list[float]:
    return torch.rand(3, device=device).tolist()


class TestRandomState:
    def test_states_are_equal_until_something_is_drawn(self):
        before = RandomState()
        assert before == RandomState()
        torch.rand(1)
        assert before != RandomState()

    def test_a_draw_on_the_device_counts_as_well(self, device):
        tensor = torch.zeros(1, device=device)
        before = RandomState(tensor)
        assert before == RandomState(tensor)
        torch.rand(1, device=device)
        assert before != RandomState(tensor)
        assert before._cpu.equal(RandomState(tensor)._cpu), "nothing was drawn on the CPU"

    def test_states_of_different_devices_are_not_equal(self, device):
        assert RandomState() != RandomState(torch.zeros(1, device=device))

    def test_nothing_else_is_equal(self):
        assert RandomState() != "a state"
        assert RandomState() != object()

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_it_is_set_inside_and_what_was_there_comes_back(self, sim, device):
        state = RandomState(torch.zeros(1, device=device))
        first, second = drawn_on(device), drawn_on(device)
        with state.restored():
            assert drawn_on(device) == first
            assert drawn_on(device) == second
        with state.restored():
            torch.rand(7, device=device)
        third = drawn_on(device)
        assert third not in (first, second)
        with state.restored():
            assert [drawn_on(device) for _ in range(3)] == [first, second, third], "two more draws did not count"

    def test_the_device_is_found_behind_tensors_of_the_cpu(self, device):
        state = RandomState(torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(1, device=device))
        first = drawn_on(device)
        with state.restored():
            assert drawn_on(device) == first

    def test_a_meta_tensor_has_no_generator(self):
        with RandomState(torch.zeros(1, device="meta")).restored():
            pass


class TestSeeds:
    def test_a_seed_decides_every_draw(self, sim):
        device = torch.device(sim)
        seen = []
        for seed in (3, 3, 4):
            set_seed(seed, [device])
            seen.append((*draws(), *drawn_on(sim)))
        assert seen[0] == seen[1]
        assert not set(seen[0]) & set(seen[2])

    def test_a_device_that_is_not_named_is_left_alone(self, device):
        before = RandomState(torch.zeros(1, device=device))
        set_seed(3, [])
        assert before._states[0].equal(RandomState(torch.zeros(1, device=device))._states[0])

    def test_a_seeded_part_leaves_no_trace(self):
        set_seed(5, [])
        expected = draws()
        set_seed(5, [])
        with seeded(7):
            inside = draws()
        assert draws() == expected
        with seeded(7):
            assert draws() == inside
        assert not set(inside) & set(expected)

    def test_nor_does_one_that_fails(self):
        set_seed(5, [])
        expected = draws()
        set_seed(5, [])
        with pytest.raises(KeyError), seeded(7):
            raise KeyError
        assert draws() == expected


class TestGeneratorsOfAModel:
    def test_they_are_put_back(self, sim):
        model = nn.Linear(2, 2).to(sim)
        set_seed(5, [torch.device(sim)])
        expected = (*draws(), *drawn_on(sim))
        set_seed(5, [torch.device(sim)])
        with preserved_generators(model) as devices:
            draws(), drawn_on(sim)
        assert [device.type for device in devices] == ["sim"]
        assert (*draws(), *drawn_on(sim)) == expected

    def test_a_model_on_the_cpu_has_no_accelerators(self):
        with preserved_generators(nn.Linear(2, 2)) as devices:
            assert devices == []
