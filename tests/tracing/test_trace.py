"""What a trace counts is what was there: known sizes, the device's own figures, and no trace of the trace."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError, NoRegionError
from models.traced import INNER, LAYERS, TOKENS, WIDTH, Functional, batch, boundary, gradients, inside, stack, step

NAMES = [str(place) for place in range(LAYERS)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Checkpointed(nn.Module):
    """Somebody else's checkpointing, in both of torch's modes."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stack())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def runs(trace: lowtide.Trace, phase: str) -> list[str]:
    return [span.region for span in trace.spans if span.phase == phase and span.region]


# Who recomputes


def test_a_policy_of_tiles_does_not_hide_somebody_elses_recomputes():
    model = Checkpointed(reentrant=False)
    with lowtide.apply(model, "tile(mlp, tokens=8)"), lowtide.trace(model) as seen:
        model(batch()).square().mean().backward()
    regions = seen.by_region()
    assert [(region.forwards, region.recomputes) for region in regions] == [(1, 1)] * LAYERS
    assert all(region.tile_reruns for region in regions)


# What is saved


@DTYPES
def test_without_a_policy_every_block_saves_what_its_layers_need(dtype: torch.dtype):
    model = stack(dtype=dtype)
    with lowtide.trace(model) as seen:
        step(model, batch(dtype=dtype))
    each = boundary(dtype.itemsize) + inside(dtype.itemsize)
    assert {name: seen.saved[name] for name in NAMES} == dict.fromkeys(NAMES, each)
    assert [region.recomputes for region in seen.by_region()] == [0] * LAYERS
    assert seen.peak_bytes >= sum(p.nbytes for p in model.parameters()) + LAYERS * each


@DTYPES
def test_with_recompute_one_boundary_for_each_layer_is_saved(dtype: torch.dtype):
    model = stack(dtype=dtype)
    with lowtide.apply(model, "recompute"), lowtide.trace(model) as seen:
        step(model, batch(dtype=dtype))
    assert sum(seen.saved[name] for name in NAMES) == LAYERS * TOKENS * WIDTH * dtype.itemsize
    assert seen.saved_bytes - sum(seen.saved[name] for name in NAMES) < 64, "besides, the loss"
    regions = seen.by_region()
    assert [(region.forwards, region.recomputes) for region in regions] == [(1, 1)] * LAYERS
    assert {region.recomputed_bytes for region in regions} == {2 * TOKENS * INNER * dtype.itemsize}


def test_offloaded_bytes_leave_the_device_and_are_in_the_store(sim: str):
    model, x = stack(sim), batch(sim)
    with lowtide.apply(model, "recompute+offload"), lowtide.trace(model) as seen:
        step(model, x)
    assert {name: seen.saved.get(name, 0) for name in NAMES} == {"0": 0, "1": 0, "2": boundary(), "3": boundary()}
    assert seen.moved_bytes("to host") == seen.moved_bytes("to device") == (LAYERS - 1) * boundary()
    assert [m.region for m in seen.moves if m.direction == "to host"] == ["", "0", "1"], "the batch, and two outputs"
    assert max(level.stored["host"] for level in seen.levels) == (LAYERS - 1) * boundary()
    assert seen.levels[-1].stored == {"host": 0}
    restored = sum(e.change for e in seen.events if e.owner.kind == "restored" and e.change > 0)
    handed_over = [e.storage for e in seen.events if e.owner.kind == "restored" and e.change == 0]
    assert restored == 0
    assert len(handed_over) == LAYERS - 1
    assert seen.peak_host_bytes >= (LAYERS - 1) * boundary()


def test_bytes_on_a_disk_are_counted_as_its_files_are(tmp_path):
    model, x = stack(), batch()
    policy = f"recompute+offload(disk={tmp_path})"
    with lowtide.apply(model, policy) as applied, lowtide.trace(model) as seen:
        step(model, x)
        torch.zeros(1)
    disk = applied.report().disk
    assert seen.moved_bytes("to disk") == disk.written_bytes > 0
    assert seen.moved_bytes("from disk") == disk.read_bytes > 0
    assert max(level.stored["disk"] for level in seen.levels) == (LAYERS - 1) * boundary()


def test_torchs_own_offload_is_seen_too(device: str):
    model, x = stack(device), batch(device)
    with lowtide.trace(model) as seen:
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()
    # Inputs of the 8 linear layers, inputs of the 4 GELUs, the weights of all layers but the first, the loss's input.
    weights = (2 * LAYERS - 1) * WIDTH * INNER * 4
    assert seen.moved_bytes("to host") == LAYERS * (boundary() + inside()) + weights + boundary()
    assert not any(name in seen.saved for name in NAMES)


# Every byte is real


def live_blocks(trace: lowtide.Trace, seconds: float) -> int:
    """Bytes on the device by the trace, rounded for each storage as the device's allocator does."""
    sizes: dict[int, int] = {}
    for event in trace.events:
        if event.place == "device" and event.seconds <= seconds:
            sizes[event.storage] = sizes.get(event.storage, 0) + event.change
    return sum(math.ceil(size / 512) * 512 for size in sizes.values())


@pytest.mark.parametrize("policy", ["none", "recompute", "offload", "recompute+offload"])
def test_the_device_counts_the_same_bytes_at_every_turn(sim: str, policy: str):
    others = simdevice.stats().live_bytes
    model, x = stack(sim), batch(sim)
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.apply(model, policy), lowtide.trace(model, optimizer) as seen:
        for _ in range(2):
            step(model, x)
            optimizer.step()
            optimizer.zero_grad()
    met = next(event.seconds for event in seen.events if event.owner.kind == "batch")
    found = [(level.allocated, live_blocks(seen, level.seconds)) for level in seen.levels if level.seconds > met]
    assert len(found) > 2 * 2 * LAYERS
    assert [allocated - live for allocated, live in found] == [others] * len(found)


def test_a_trace_changes_no_byte_and_no_kernel_on_the_device(sim: str):
    def figures(*, traced: bool) -> tuple[int, int, int]:
        model, x = stack(sim), batch(sim)
        with lowtide.apply(model, "recompute+offload"):
            step(model, x)
            model.zero_grad()
            torch.accelerator.synchronize()
            simdevice.reset()
            before = simdevice.stats().live_bytes
            with lowtide.trace(model) if traced else contextlib.nullcontext():
                step(model, x)
            torch.accelerator.synchronize()
            stats = simdevice.stats()
        return stats.peak_bytes - before, stats.kernels, stats.copies

    assert figures(traced=True) == figures(traced=False)


def test_the_optimizers_states_are_told_apart():
    model, x = stack(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, x)
    optimizer.step()
    with lowtide.trace(model, optimizer) as seen:
        step(model, x)
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    first = seen.samples[0].nbytes
    steps = 4 * len(list(model.parameters()))
    assert (first["weights"], first["gradients"], first["optimizer"]) == (weights, weights, 2 * weights + steps)
    assert runs(seen, "optimizer") == []
    phases = [phase for phase, _ in itertools.groupby(s.phase for s in seen.spans if s.phase != "between")]
    assert phases == ["forward", "backward", "optimizer"]


def test_after_running_out_of_memory_a_trace_tells_who_held_it(sim: str):
    simdevice.enable(memory=simdevice.stats().live_bytes + 2**20)
    model, x = stack(sim), batch(sim)
    weights = sum(p.nbytes for p in model.parameters())
    with pytest.raises(torch.OutOfMemoryError), lowtide.trace(model) as seen:
        step(model, x.repeat(2, 1))
    assert weights < seen.peak_bytes < 2**20
    assert seen.peak.moment.phase == "forward"
    assert sum(size for owner, size in seen.peak.owners.items() if owner.kind == "saved") > 0


# When


def test_spans_follow_the_step_and_do_not_overlap():
    model = stack()
    with lowtide.apply(model, "recompute"), lowtide.trace(model) as seen:
        step(model, batch())
    assert runs(seen, "forward") == NAMES
    assert runs(seen, "recompute") == NAMES[::-1]
    assert list(dict.fromkeys(runs(seen, "backward"))) == NAMES[::-1]
    for name in NAMES:
        phases = [span.phase for span in seen.spans if span.region == name]
        assert phases[0] == "forward"
        assert phases[-2:] == ["recompute", "backward"]
    assert all(span.begin < span.end for span in seen.spans)
    assert all(before.end <= after.begin for before, after in itertools.pairwise(seen.spans))


@pytest.mark.parametrize("reentrant", [False, True])
def test_somebody_elses_checkpointing(reentrant: bool):
    model = Checkpointed(reentrant=reentrant)
    with lowtide.trace(model) as seen:
        step(model, batch())
    names = [f"layers.{place}" for place in range(LAYERS)]
    assert runs(seen, "recompute") == names[::-1]
    assert list(dict.fromkeys(runs(seen, "backward"))) == names[::-1]
    assert {name: seen.saved[name] for name in names} == dict.fromkeys(names, boundary())


def test_a_block_without_modules_is_seen_to_be_recomputed():
    model = nn.Sequential(*(Functional() for _ in range(3)))
    with lowtide.apply(model, "recompute", regions=[Functional]), lowtide.trace(model) as seen:
        step(model, batch())
    assert seen.regions == ["0", "1", "2"], "the policy's"
    assert runs(seen, "recompute") == ["2", "1", "0"]
    assert {region.recomputed_bytes for region in seen.by_region()} == {inside()}


def test_a_backward_that_keeps_its_graph_is_no_recomputation():
    model = stack()
    with lowtide.trace(model) as seen:
        loss = model(batch()).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
    assert runs(seen, "recompute") == []


def test_two_forwards_before_a_backward():
    model = stack()
    with lowtide.apply(model, "recompute"), lowtide.trace(model) as seen:
        (model(batch()).square().mean() + model(batch()).square().mean()).backward()
    assert [(region.forwards, region.recomputes) for region in seen.by_region()] == [(2, 2)] * LAYERS
    assert {name: seen.saved[name] for name in NAMES} == dict.fromkeys(NAMES, 2 * boundary())


# Without effect


@pytest.mark.parametrize("policy", ["none", "recompute"])
def test_gradients_are_the_same_bits(policy: str):
    def run(*, traced: bool) -> list[torch.Tensor]:
        model = stack(dropout=0.3)
        with lowtide.apply(model, policy), lowtide.trace(model) if traced else contextlib.nullcontext():
            torch.manual_seed(1)
            step(model, batch())
        return gradients(model)

    assert all(torch.equal(*pair) for pair in zip(run(traced=True), run(traced=False), strict=True))


class Failing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ZeroDivisionError
        y = self.inner(x)
        if self.where == "backward":
            y.register_hook(lambda _: 1 / 0)
        return y


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
def test_nothing_is_left_behind_after_an_error_too(where: str):
    model = nn.Sequential(*stack(), Failing(where))
    optimizer = torch.optim.AdamW(model.parameters())
    finalizers = len(weakref.finalize._registry)
    expected = contextlib.nullcontext() if where == "nowhere" else pytest.raises(ZeroDivisionError)
    with expected, lowtide.trace(model, optimizer) as seen:
        loss = model(batch()).square().mean()
        loss.backward()
    for module in model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks, **module._forward_hooks_always_called}
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    assert len(weakref.finalize._registry) == finalizers
    assert torch._C._len_torch_dispatch_stack() == 0
    recorded = len(seen.events)
    model.zero_grad()
    loss = None
    model[0](batch())
    assert len(seen.events) == recorded > 0
    assert seen.to_dict()["peak_bytes"] == seen.peak_bytes > 0, "it can be read"


def test_a_model_dies_with_its_last_reference(device: str):  # which keeps the collector away
    model = stack()
    known = weakref.ref(model[0])
    with lowtide.trace(model) as seen:
        step(model, batch())
    del model
    assert known() is None
    assert seen.saved_bytes > 0


# What is refused


def test_a_model_without_regions_is_traced_as_a_whole():
    model = nn.Linear(WIDTH, WIDTH)
    with lowtide.trace(model) as seen:
        step(model, batch())
    assert seen.regions == []
    assert list(seen.saved) == [""]
    assert "forwards" not in str(seen)


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(InvalidValueError, match=r"needs a torch.nn.Module, got int"):
        lowtide.trace(1)
    with pytest.raises(InvalidValueError, match=r"torch.optim.Optimizer, got list"):
        lowtide.trace(stack(), [])
    with pytest.raises(NoRegionError, match="Wrong"):
        lowtide.trace(stack(), regions=["Wrong"])
    used = lowtide.trace(stack())
    with used:
        pass
    with pytest.raises(InvalidValueError, match="has already been used"), used:
        pass


# Beside other things


def test_what_is_compiled_runs_as_it_was_written_and_is_seen():
    calls = []

    def backend(graph, _inputs):
        return lambda *args: calls.append(None) or graph(*args)

    compiled = torch.compile(nn.Sequential(*stack()), backend=backend)
    compiled(batch())
    assert len(calls) == 1
    with lowtide.trace(compiled) as seen:
        step(compiled, batch())
    assert len(calls) == 1
    assert seen.regions == NAMES
    assert {name: seen.saved[name] for name in NAMES} == dict.fromkeys(NAMES, boundary() + inside())


def test_forward_alone_saves_nothing_without_gradients():
    model = stack()
    with torch.no_grad(), lowtide.trace(model) as seen:
        model(batch())
    assert seen.saved == {}
    assert runs(seen, "forward") == NAMES
    assert [span for span in seen.spans if span.phase in ("backward", "recompute")] == []


def test_two_traces_see_the_same():
    model = stack()
    with lowtide.trace(model) as outer, lowtide.trace(model) as inner:
        step(model, batch())
    assert outer.saved == inner.saved
    assert outer.peak_bytes == inner.peak_bytes


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_a_part_of_what_is_around_it():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.GELU())) for _ in range(2)))
    with lowtide.trace(model) as seen:
        step(model, batch())
    assert [seen.saved["0"], seen.saved["1"]] == [2 * boundary()] * 2
    with pytest.raises(InvalidValueError, match=r"0\.1, 1\.1: TorchScript modules take no hooks"):
        lowtide.trace(model, regions=["*.1"])
