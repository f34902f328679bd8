"""Selective checkpointing keeps torch's meaning, and a policy that asks for offload gets it."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import simdevice
from lowtide._torch import CHECKPOINT_KEYWORDS
from lowtide.checkpointing import Schedule
from lowtide.errors import OffloadError
from lowtide.stores import HostStore

SIZE = 64
PRODUCT = SIZE * SIZE * 4

needs_offload_policies = pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch 2.10 has no MUST_CPU_OFFLOAD"
)
needs_hooks_setting = pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in CHECKPOINT_KEYWORDS,
    reason="before torch 2.14, what a selective policy keeps is not seen by saved-tensor hooks",
)


def contexts(answer):
    def policy(_context, operator, *_args, **_kwargs):
        return answer if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def products(x, weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def run(engine, device, **options):
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE).to(device).requires_grad_()
    weights = [torch.randn(SIZE, SIZE).to(device) / 8 for _ in range(4)]
    simdevice.reset()
    engine(products, x, weights, **options).square().sum().backward()
    stats = simdevice.stats()
    return x.grad.cpu(), stats


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_policies_do_what_they_do_in_torch(sim, answer):
    theirs, their_stats = run(checkpoint, sim, use_reentrant=False, context_fn=contexts(answer))
    ours, our_stats = run(lowtide.checkpoint, sim, context_fn=contexts(answer))
    assert torch.equal(ours, theirs)
    assert our_stats.flops == their_stats.flops


@needs_offload_policies
def test_torch_recomputes_silently_where_offload_was_asked_for(sim):
    """The fault that this guards against: if torch mends it, our own way can go."""
    _, stats = run(checkpoint, sim, use_reentrant=False, context_fn=contexts(CheckpointPolicy.MUST_CPU_OFFLOAD))
    assert stats.d2h_bytes == 0


@needs_offload_policies
@pytest.mark.parametrize("answer", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
@pytest.mark.parametrize("shared_store", [False, True])
def test_offload_is_honoured(sim, answer, shared_store):
    kept, kept_stats = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
    offload = Schedule(HostStore()) if shared_store else None
    ours, stats = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy[answer]), offload=offload)
    assert torch.equal(ours, kept)
    assert stats.flops == kept_stats.flops, "no product was computed again"
    inputs = 5 if shared_store else 0  # with a store given, x and the four weights are offloaded as well
    assert stats.d2h_bytes == (3 + inputs) * PRODUCT, "all products but the last, which backward needs first"
    assert stats.h2d_bytes == (3 + inputs) * PRODUCT
    assert simdevice.stats().pinned_bytes == 0


@needs_offload_policies
def test_an_offloaded_output_that_is_changed_in_place_is_refused(device):
    def forward(x, weights):
        y = x @ weights[0]
        y += 1
        return y * (x @ weights[1])

    x = torch.randn(SIZE, SIZE).to(device).requires_grad_()
    weights = [torch.randn(SIZE, SIZE).to(device) for _ in range(2)]
    y = lowtide.checkpoint(forward, x, weights, context_fn=contexts(CheckpointPolicy.MUST_CPU_OFFLOAD))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_offload_policies
def test_offload_of_cpu_tensors_is_refused(sim):
    with pytest.raises(OffloadError, match="disk tier"):
        run(lowtide.checkpoint, "cpu", context_fn=contexts(CheckpointPolicy.MUST_CPU_OFFLOAD))


@pytest.mark.parametrize("offload", [False, True])
def test_a_store_makes_torch_warn_of_nothing(sim, offload):
    """Torch 2.14 warns of hooks around a selective checkpoint, and those of a store are ours."""
    policy = contexts(CheckpointPolicy.MUST_SAVE)
    kept, _ = run(checkpoint, sim, use_reentrant=False, context_fn=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, _ = run(lowtide.checkpoint, sim, context_fn=policy, offload=HostStore() if offload else None)
    assert torch.equal(ours, kept)


class Scaled:
    """Hooks that keep three times a tensor, and count what they are given."""

    def __init__(self):
        self.packed = self.unpacked = 0

    def pack(self, tensor):
        self.packed += 1
        return tensor * 3

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor / 3

    def __enter__(self):
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.context.__enter__()
        return self

    def __exit__(self, *exception):
        self.context.__exit__(*exception)


class TestHooksAroundTheCall:
    """`respect_saved_tensors_hooks`: the four products of `run` are kept, and hooks around the call may see them."""

    def test_false_leaves_them_out(self, sim):
        kept, _ = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
        with Scaled() as hooks:
            ours, _ = run(
                lowtide.checkpoint,
                sim,
                context_fn=contexts(CheckpointPolicy.MUST_SAVE),
                respect_saved_tensors_hooks=False,
            )
        with Scaled() as without:
            run(lowtide.checkpoint, sim)
        torch.testing.assert_close(ours, kept)
        assert hooks.packed == without.packed, "none of the four products"

    @needs_hooks_setting
    def test_none_keeps_torchs_warning(self, sim):
        with Scaled(), pytest.warns(FutureWarning, match="respect_saved_tensors_hooks"):
            run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))

    @needs_hooks_setting
    def test_our_own_hooks_are_no_reason_to_warn(self, sim):
        """`filterwarnings = error` would raise torch's FutureWarning here."""
        kept, _ = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
        with lowtide.offload():
            ours, _ = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
        assert torch.equal(ours, kept)

    @needs_hooks_setting
    @pytest.mark.parametrize("answer", ["MUST_SAVE", "MUST_CPU_OFFLOAD"])
    def test_true_hands_them_over(self, sim, answer):
        """Also those that a policy wants on the host: where they go is up to the hooks then."""
        policy = contexts(CheckpointPolicy[answer])
        kept, _ = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
        with Scaled() as without:
            run(lowtide.checkpoint, sim, context_fn=policy, respect_saved_tensors_hooks=False)
        with Scaled() as hooks:
            ours, _ = run(lowtide.checkpoint, sim, context_fn=policy, respect_saved_tensors_hooks=True)
        torch.testing.assert_close(ours, kept)
        assert hooks.packed == without.packed + 4
        assert hooks.unpacked == without.unpacked + 4

    @needs_hooks_setting
    def test_true_with_a_store_offloads_what_the_policy_keeps(self, sim):
        policy = contexts(CheckpointPolicy.MUST_SAVE)
        kept, _ = run(lowtide.checkpoint, sim, context_fn=policy)
        ours, stats = run(lowtide.checkpoint, sim, context_fn=policy, respect_saved_tensors_hooks=True, offload="host")
        assert torch.equal(ours, kept)
        assert stats.d2h_bytes == stats.h2d_bytes == (5 + 4) * PRODUCT, "x, the weights and the products"
        assert simdevice.stats().pinned_bytes == 0


def everything(_context, _operator, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE


keep_everything = functools.partial(create_selective_checkpoint_contexts, everything)


class TestLifetime:
    """What a selective policy keeps dies with the graph, not when Python's collector comes."""

    @pytest.mark.parametrize("backward", [False, True])
    def test_nothing_is_left(self, sim, backward):
        x = torch.randn(SIZE, SIZE).to(sim).requires_grad_()
        before = simdevice.stats().live_bytes
        for _ in range(3):
            y = lowtide.checkpoint(lambda x: x.cos().exp().sin() + 1.0, x, context_fn=keep_everything)
            if backward:
                y.sum().backward()
                x.grad = None
            del y
        assert simdevice.stats().live_bytes == before

    def test_the_peak_is_torchs(self, sim):
        peaks = []
        for engine in (checkpoint, lowtide.checkpoint):
            x = torch.randn(SIZE, SIZE).to(sim).requires_grad_()
            simdevice.reset()
            for _ in range(4):
                y = x
                for _ in range(3):
                    y = engine(lambda x: x.cos().exp().sin(), y, use_reentrant=False, context_fn=keep_everything)
                y.sum().backward()
                x.grad = None
            peaks.append(simdevice.stats().peak_bytes)
            del x, y
        assert peaks[0] == peaks[1]


class TestOwnCopies:
    """The copies of a store are not the region's: no policy sees them."""

    @pytest.mark.parametrize("shared_store", [False, True])
    def test_a_policy_sees_the_regions_operators_alone(self, device, shared_store):
        seen = []

        def policy(_context, operator, *_args, **_kwargs):
            seen.append(str(operator))
            return CheckpointPolicy.PREFER_RECOMPUTE

        x = y = torch.randn(SIZE, SIZE).to(device).requires_grad_()
        offload = Schedule(HostStore()) if shared_store else "host"
        for _ in range(3):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            y = lowtide.checkpoint(torch.exp, y, offload=offload, context_fn=contexts)
        assert seen == 3 * ["aten.exp.default"]
        y.sum().backward()
        assert x.grad is not None

    def test_a_policy_that_keeps_everything_keeps_no_input(self, sim):
        inputs = torch.randn(SIZE, SIZE).to(sim).requires_grad_() * 1
        before = simdevice.stats().live_bytes
        y = lowtide.checkpoint(lambda x: x.sum(), inputs, offload="host", context_fn=keep_everything)
        del inputs
        assert simdevice.stats().live_bytes < before, "the input is in host memory"
        y.backward()

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x * 2).as_strided((SIZE, SIZE), (SIZE, 1), 0).sin().exp(),
            lambda x: (x * 3)[0:SIZE].view(-1).reshape(SIZE, SIZE).sin() * x,
        ],
    )
    def test_gradients_are_torchs(self, device, function):
        found = []
        for engine, options in ((checkpoint, {"use_reentrant": False}), (lowtide.checkpoint, {"offload": "host"})):
            torch.manual_seed(0)
            x = torch.randn(SIZE, SIZE).to(device).requires_grad_()
            engine(function, x, context_fn=keep_everything, **options).sum().backward()
            found.append(x.grad.cpu())
        assert torch.equal(*found)
