"""The simulator against real steps of the same models: torch's profiler on the CPU, the allocator of `sim`, malloc."""

from __future__ import annotations

import itertools

import pytest
import torch

import lowtide
from lowtide import simdevice
from lowtide.hardware.accelerators import Rates
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.step import record
from lowtide.targets.job import Job
from models.planned import FAMILIES, TOKENS, batch_maker, make_model
from models.tied import Tied, tied_batch
from support import needs_transformers_5
from support.real_steps import profiled_peak, real_peak, train

pytestmark = [
    needs_transformers_5,
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),  # torch 2.12 and older say so each time
    pytest.mark.filterwarnings("ignore:lowtide. region .*merger.* expected to keep attention"),  # a merger has none
]

TOLERANCE = 0.005
POLICIES = (
    "none",
    "recompute",
    "recompute+tile(loss, loss_tokens=64)",
    "recompute+tile(mlp, tokens=64)",
)
KEEPING = "recompute(keep=attention)"
BLOCKS = ("recompute+tile(attention, mlp, tokens=64)", "recompute+tile(tokens=64, loss_tokens=64)")
DTYPES = (torch.float32, torch.bfloat16)
OFFLOADED = (
    "recompute+offload",
    "offload",
    "recompute+offload+tile(mlp, loss, tokens=64, loss_tokens=64)",
    "recompute(keep=attention)+offload",
)

EVERYTHING = list(itertools.product(FAMILIES, (*POLICIES, KEEPING), DTYPES, (False, True)))
COVERING = {
    (family, POLICIES[(place + turn) % len(POLICIES)], DTYPES[(place + turn) % 2], bool((place + turn // 2) % 2))
    for place, family in enumerate(FAMILIES)
    for turn in range(3)
} | {(family, KEEPING, DTYPES[(place + 1) % 2], place != FAMILIES.index("t5")) for place, family in enumerate(FAMILIES)}
"""Every family with four policies, both widths and both ways to train."""


def predicted_peak(family: str, policy: str, dtype: torch.dtype, *, lora: bool, rounding: int) -> int:
    """What the simulator says, with the CPU's attention kernel and torch's default optimizer."""
    model = make_model(family, dtype, lora=lora, device="meta")
    clock, attention = Clock(), Attention("cpu")
    ledger = Ledger(clock, Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=rounding)
    job = Job(tokens=TOKENS, optimizer="adamw_foreach")
    with simulated_device(clock, attention):
        recording = record(model, batch_maker(family, dtype), job, Policy.parse(policy), ledger, attention)
    return read_peak(recording).nbytes


@pytest.mark.parametrize(
    ("family", "policy", "dtype", "lora"),
    [pytest.param(*case, marks=() if case in COVERING else pytest.mark.slow) for case in EVERYTHING],
)
def test_predicted_peak_is_that_of_the_profiler(family: str, policy: str, dtype: torch.dtype, lora: bool):
    torch.manual_seed(0)
    model = make_model(family, dtype, lora=lora, device="cpu")
    real = real_peak(model, batch_maker(family, dtype)(model, "cpu"), policy)
    predicted = predicted_peak(family, policy, dtype, lora=lora, rounding=1)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


def blocks_in_tiles():
    """Yield cases: few of them quick."""
    for family, policy, dtype, lora in itertools.product(("llama", "qwen3"), BLOCKS, DTYPES, (False, True)):
        is_quick = family == "llama" and lora and "loss_tokens" in policy
        yield pytest.param(family, policy, dtype, lora, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # switching oneDNN off says so
@pytest.mark.parametrize(("family", "policy", "dtype", "lora"), [*blocks_in_tiles()])
def test_predicted_peak_of_blocks_in_tiles(family: str, policy: str, dtype: torch.dtype, lora: bool):
    """Without oneDNN, whose products in bfloat16 pack the head's weight: those bytes, no plan for a GPU has."""
    with torch.backends.mkldnn.flags(enabled=False):
        test_predicted_peak_is_that_of_the_profiler(family, policy, dtype, lora)


@pytest.mark.parametrize(
    ("family", "policy", "lora"),
    [
        pytest.param(family, policy, lora, marks=() if (place + turn) % 4 == 0 else pytest.mark.slow)
        for place, (family, lora) in enumerate(itertools.product(FAMILIES, (False, True)))
        for turn, policy in enumerate((*POLICIES, *OFFLOADED, KEEPING))
    ],
)
def test_predicted_peak_is_that_of_the_emulated_device(sim: str, family: str, policy: str, lora: bool):
    dtype = torch.float32
    model = make_model(family, dtype, lora=lora, device="cpu").to(sim)
    (model.get_base_model() if lora else model).tie_weights()  # a move to `sim` takes tied weights apart
    model.train()
    batch = batch_maker(family, dtype)(model, sim)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=True)
    with lowtide.apply(model, policy):
        train(model, batch, optimizer)
        torch.accelerator.synchronize()
        simdevice.reset()
        train(model, batch, optimizer)
        torch.accelerator.synchronize()
    real = simdevice.stats().peak_bytes
    del model, batch, optimizer
    predicted = predicted_peak(family, policy, dtype, lora=lora, rounding=512)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_that_autograd_sums_in_place_are_predicted(tied: bool, chunks: int):
    """A weight that is used once per chunk of the loss gets a gradient for each, which autograd adds to the first."""
    model, batch = Tied(tied=tied, chunks=chunks), tied_batch("cpu")

    def step() -> None:
        model.zero_grad()
        model(**batch)[0].backward()

    step()
    model.zero_grad()
    standing = sum(tensor.nbytes for tensor in (*model.parameters(), *batch.values()))
    real = standing + profiled_peak(step)
    with torch.device("meta"):
        blank = Tied(tied=tied, chunks=chunks)
    clock, attention = Clock(), Attention("cpu")
    ledger = Ledger(clock, Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    with simulated_device(clock, attention):
        recording = record(
            blank, lambda _, device: tied_batch(device), Job(optimizer="sgd"), Policy(), ledger, attention
        )
    assert read_peak(recording).nbytes == pytest.approx(real, rel=TOLERANCE)


def test_a_wrong_ledger_would_be_seen():
    """The tolerance bites: without the optimizer's states, or without recompute, the figures are far apart."""
    none = predicted_peak("llama", "none", torch.float32, lora=False, rounding=1)
    recompute = predicted_peak("llama", "recompute", torch.float32, lora=False, rounding=1)
    assert recompute < (1 - 10 * TOLERANCE) * none
    recompute, keeping = (
        predicted_peak("llama", policy, torch.float32, lora=True, rounding=1) for policy in ("recompute", KEEPING)
    )
    assert keeping > (1 + 5 * TOLERANCE) * recompute, "what is kept is counted"
