"""FSDP2 and ZeRO-3 in bytes: shards, buffers on streams, what stays gathered; and settings that change what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import autocast as imported_autocast
from torch import nn
from torch.nn.functional import dropout as imported_dropout

from lowtide.errors import InvalidValueError, PlanError
from lowtide.hardware.accelerators import find_accelerator
from lowtide.recording import Event, Owner, read_peak
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import make_job
from lowtide.targets.target import find_target

WIDTH, LAYERS, ROWS, RANKS = 1024, 4, 8, 4
BLOCK = WIDTH * WIDTH
"""The weights of a block."""
ENDS = 2 * WIDTH * 64


class Blocks(nn.Module):
    """A stack of square products between a narrow start and a narrow end, whose activations are negligible."""

    def __init__(self, dropout: float = 0.0, drop: Any = None) -> None:
        super().__init__()
        self.drop = drop
        self.start = nn.Linear(64, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(dropout)) for _ in range(LAYERS)
        )
        self.end = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x) if self.drop is None else self.drop(layer(x))
        return self.end(x).float().sum(), x


def recorded(policy: str = "none", *, model: nn.Module | None = None, rows: int = ROWS, **settings: Any) -> Any:
    card = find_accelerator(settings.pop("card", "H100"))
    given = {"tokens": None, "images": None, "engine": None, "ranks": None, **settings}
    model = (Blocks() if model is None else model).to(torch.bfloat16)
    target = find_target(model, (torch.zeros(rows, 64, dtype=torch.bfloat16),))
    return Simulator(target, make_job(**given), card)._record(policy, None)


def at_start(recording: Any) -> int:
    """The bytes before the step begins, without cuBLAS' workspaces."""
    return sum(
        event.change
        for event in recording.events[: recording.start]
        if event.place == "device" and event.owner.kind != "workspace"
    )


def on_stream(recording: Any, stream: str) -> list[Event]:
    return [event for event in recording.events if event.stream == stream and event.change > 0]


def test_fsdp2_s_masters_are_its_shards():
    weights = LAYERS * BLOCK + ENDS
    narrow, wide = (recorded(engine="fsdp2", ranks=RANKS, masters=masters) for masters in (False, True))
    assert at_start(narrow) == pytest.approx(weights / RANKS * (2 + 4), rel=0.01), "weights and two states of two bytes"
    assert at_start(wide) == pytest.approx(weights / RANKS * (4 + 8), rel=0.01), "no copy in 16 bits besides"


def test_fsdp2_gathers_and_reduces_on_streams_of_their_own():
    recording = recorded(engine="fsdp2", ranks=RANKS, masters=True)
    gathered = [event.change for event in on_stream(recording, "all_gather")]
    assert gathered.count(2 * BLOCK) == 2 * LAYERS - 1, "each block twice, but for the last"
    reduced = sum(event.change for event in on_stream(recording, "reduce_scatter"))
    assert reduced == pytest.approx(4 * (LAYERS * BLOCK + ENDS) / RANKS, rel=0.01), "gradients in float32"
    inputs = [event.change for event in recording.events if event.owner.kind == "communication" and not event.stream]
    assert inputs.count(4 * BLOCK) == LAYERS, "a block's gradients in the type of the reduction"
    narrow = recorded(engine="fsdp2", ranks=RANKS, masters=True, reduce_dtype="bf16")
    changes = [event.change for event in narrow.events if event.owner.kind == "communication"]
    assert 4 * BLOCK not in changes


def test_what_is_not_resharded_stays_and_is_gathered_once():
    freed, kept = (recorded(engine="fsdp2", ranks=RANKS, reshard=reshard) for reshard in (True, False))
    assert len(on_stream(kept, "all_gather")) == len(on_stream(freed, "all_gather")) - (LAYERS - 1)
    assert 0 < read_peak(kept).nbytes - read_peak(freed).nbytes <= 2 * BLOCK * (LAYERS - 1)


def test_ends_that_are_units_are_gathered_for_themselves():
    recording = recorded(engine="fsdp2", ranks=RANKS, units="ends")
    gathered = [event.change for event in on_stream(recording, "all_gather")]
    assert gathered.count(ENDS) == 3, "the bytes of one of them: the start twice, and the end"


def test_zero3_keeps_a_partition_of_gradients_a_bucket_and_masters():
    weights, bucket = LAYERS * BLOCK + ENDS, 1000
    recording = recorded(engine="zero3", ranks=RANKS, reduce_bucket=bucket)
    assert at_start(recording) == pytest.approx(weights / RANKS * 2 * 5 + 2 * bucket, rel=0.01)


def test_weights_that_autograd_saved_stay_gathered_in_zero3(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.simulation.zero3._REUSE_DISTANCE", 1)
    monkeypatch.setattr("lowtide.simulation.zero3._PREFETCH", 1)
    none, recompute = (
        recorded(policy, engine="zero3", ranks=RANKS, reduce_bucket=1000) for policy in ("none", "recompute")
    )
    communication = [
        sum(size for owner, size in read_peak(step).owners.items() if owner.kind == "communication")
        for step in (none, recompute)
    ]
    assert communication[0] >= 2 * BLOCK * LAYERS
    assert communication[1] < 2 * BLOCK * LAYERS


def _gathers(recording: Any, region: str) -> list[Event]:
    return [event for event in on_stream(recording, "all_gather") if event.owner.region == region]


def test_zero3_gathers_ahead_out_of_one_buffer(monkeypatch: pytest.MonkeyPatch):
    sizes = {}
    for elements in (1, 2 * BLOCK):
        monkeypatch.setattr("lowtide.simulation.zero3._PREFETCH", elements)
        step = recorded(engine="zero3", ranks=RANKS, reduce_bucket=1000)
        sizes[elements] = [event.change for event in on_stream(step, "all_gather")]
    assert sizes[1].count(2 * BLOCK) == LAYERS, "each weight alone needs no other buffer"
    assert sizes[2 * BLOCK].count(2 * BLOCK) == LAYERS
    assert 2 * 2 * BLOCK in sizes[2 * BLOCK], "the buffer that two of them came in"


def test_zero3_stops_gathering_ahead_when_enough_is_live(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.simulation.zero3._LIVE", 1)
    step = recorded(engine="zero3", ranks=RANKS, reduce_bucket=1000)
    begun = [event for event in on_stream(step, "all_gather") if event.owner.region == event.moment.region]
    blocks = [event for event in on_stream(step, "all_gather") if event.owner.region.startswith("layers")]
    assert [event for event in begun if event in blocks] == []
    assert len(blocks) == LAYERS


def test_zero3_joins_the_gradients_of_a_bucket():
    for bucket, joined in ((3 * BLOCK, 2), (1000, 0)):
        step = recorded(engine="zero3", ranks=RANKS, reduce_bucket=bucket)
        copies = [event.change for event in step.events[step.start :] if event.owner.kind == "communication"]
        assert copies.count(2 * (2 * BLOCK + ENDS // 2)) == joined, "two blocks and an end fit into three blocks"


@pytest.mark.parametrize(("policy", "times"), [("none", 1), ("recompute", 2)])
def test_a_recomputed_region_counts_three_times_in_zero3_s_reuse(
    monkeypatch: pytest.MonkeyPatch, policy: str, times: int
):
    monkeypatch.setattr("lowtide.simulation.zero3._REUSE_DISTANCE", 5 * BLOCK // 2)
    monkeypatch.setattr("lowtide.simulation.zero3._PREFETCH", 1)
    step = recorded(policy, engine="zero3", ranks=RANKS, reduce_bucket=1000)
    assert len(_gathers(step, f"layers.{LAYERS - 2}")) == times
    assert len(_gathers(step, f"layers.{LAYERS - 1}")) == 1


@pytest.mark.parametrize(("distance", "times"), [(1, 2), (100 * BLOCK, 1)])
def test_zero3_gathers_embeddings_for_their_backward(monkeypatch: pytest.MonkeyPatch, distance: int, times: int):
    monkeypatch.setattr("lowtide.simulation.zero3._REUSE_DISTANCE", distance)
    monkeypatch.setattr("lowtide.simulation.zero3._PREFETCH", 1)
    assert len(_gathers(recorded(engine="zero3", ranks=RANKS, reduce_bucket=1000), "")) == times


def test_one_rank_of_zero3_gathers_nothing():
    assert not on_stream(recorded(engine="zero3", ranks=1, reduce_bucket=1000), "all_gather")


@pytest.mark.parametrize("engine", [{}, {"engine": "fsdp2", "ranks": RANKS}])
def test_gradients_that_stay_are_there_when_the_step_begins(engine: dict[str, Any]):
    alone, kept = (recorded(keep_gradients=keep, **engine) for keep in (False, True))
    gradients = 2 * (LAYERS * BLOCK + ENDS) / engine.get("ranks", 1)
    assert at_start(kept) - at_start(alone) == pytest.approx(gradients, rel=0.01)


def _imported(x: torch.Tensor) -> torch.Tensor:
    return imported_dropout(x, 0.1)


def _of_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.1, True)


class Scores(nn.Module):
    """Attention in its mathematical form, whose scores are dropped out."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[:, :64].reshape(1, 1, -1, 64)
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(heads, heads, heads, None, self.share)
        return x + out.sum()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Blocks(0.1), id="module"),
        pytest.param(lambda: Blocks(drop=_imported), id="imported"),
        pytest.param(lambda: Blocks(drop=_of_torch), id="torch"),
    ],
)
def test_dropout_keeps_a_byte_of_mask(model: Any):
    rows = 4096
    plain, dropped = (recorded(model=blocks, rows=rows, optimizer="sgd") for blocks in (Blocks(), model()))
    more = read_peak(dropped).nbytes - read_peak(plain).nbytes
    assert more == pytest.approx(rows * WIDTH * LAYERS, rel=0.3)


def test_dropout_inside_attention_keeps_a_byte_of_mask():
    size = 1536
    recording = recorded(model=Blocks(drop=Scores(0.1)), rows=size, optimizer="sgd")
    masks = [event for event in recording.events if event.change == size * size and event.owner.kind == "activations"]
    assert len(masks) == LAYERS


def _halved(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.float16):
        return x * 2


def _halved_by_its_old_name(x: torch.Tensor) -> torch.Tensor:
    with imported_autocast(x.device.type):
        return x * 2


def _switched_off(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False), imported_autocast("cuda", enabled=False):
        return x * 2


@pytest.mark.parametrize("forward", [_halved, _halved_by_its_old_name])
def test_autocast_inside_the_model_is_refused_by_name(forward: Any):
    with pytest.raises(PlanError, match=r"switches on torch\.autocast for '(cuda|meta)'"):
        recorded(model=Blocks(drop=forward))
    assert recorded(model=Blocks(drop=_switched_off)).operations


@pytest.mark.parametrize(("card", "mib"), [("A100-80GB", 8.125), ("H100", 32), ("B200", 32), ("MI300X", 128)])
def test_each_thread_s_products_have_a_workspace(card: str, mib: float):
    recording = recorded(card=card)
    workspaces = [event.change for event in recording.events[: recording.start] if event.owner.kind == "workspace"]
    assert workspaces == [mib * 2**20] * 2
    assert read_peak(recording).owners[Owner("workspace", "")] == sum(workspaces), "they are there all the time"


def test_a_cpu_s_kernels_have_no_workspace():
    recording = recorded(attention="cpu")
    assert not [event for event in recording.events if event.owner.kind == "workspace"]


def test_an_output_that_is_kept_lives_through_backward():
    rows = 65536
    dropped, kept = (
        recorded("recompute", rows=rows, optimizer="sgd", keep_output=keep, engine="single") for keep in (False, True)
    )
    assert read_peak(kept).nbytes - read_peak(dropped).nbytes >= 0.9 * rows * WIDTH * 2


STATES = {"adamw": 4, "adamw8bit": 2, "paged_adamw8bit": 0, "adamw_offloaded": 0, "adafactor": 0, "lion": 2, "sgd": 0}


@pytest.mark.parametrize("optimizer", STATES)
def test_an_optimizer_keeps_its_states(optimizer: str):
    weights = LAYERS * BLOCK + ENDS
    assert at_start(recorded(optimizer=optimizer)) == pytest.approx((2 + STATES[optimizer]) * weights, rel=0.02)


def test_muon_keeps_one_state_for_the_matrices_of_blocks():
    assert at_start(recorded(optimizer="muon")) == pytest.approx(4 * LAYERS * BLOCK + 6 * ENDS, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "fsdp1", "ranks": 2}, "nearest is engine='fsdp2'"),
        ({"reduce_dtype": "fp32"}, "is FSDP2's"),
        ({"engine": "fsdp2", "ranks": 2, "reduce_dtype": "fp8"}, "one of bf16, fp16, fp32"),
        ({"reshard": False}, "reshard_after_forward"),
        ({"units": "ends"}, "is FSDP2's"),
        ({"reduce_bucket": 5}, "engine='zero3'"),
        ({"optimizer": "muon", "engine": "fsdp2", "ranks": 2}, "muon with fsdp2 is not modelled"),
        ({"optimizer": "adafactor", "masters": True}, "adafactor with masters is not modelled"),
        ({"keep_gradients": True, "engine": "zero1", "ranks": 2}, "keep_gradients with zero1 is not modelled"),
        ({"keep_gradients": True, "optimizer_in_backward": True}, "is not modelled"),
        ({"lora_dropout": 0.1}, "are for adapters"),
        ({"lora": 8, "lora_dropout": 1.0}, "less than 1"),
    ],
)
def test_a_setting_without_its_engine_is_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(InvalidValueError, match=reason):
        make_job(**{"tokens": 8, "images": None, "engine": None, "ranks": None, **settings})
