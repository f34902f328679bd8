"""Every operator that torch has samples for gives on `sim` what it gives on the CPU, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from support.foreign_warnings import ignore_warnings_of, ignoring_warnings_of

SAMPLES = 3

NOT_COMPARED = {
    "sparse.sampled_addmm": "the device has strided tensors only",
    "sparse.mm.reduce": "the device has strided tensors only",
    "to_sparse": "the device has strided tensors only",
    "as_strided.partial_views": "moving the sample to a device drops the memory around its view",
    "to": "the sample names the CPU as its target",
    "tensor_split": "the sample moves an argument that torch wants on the CPU",
    "empty": "uninitialised on purpose",
    "empty_like": "uninitialised on purpose",
    "empty_permuted": "uninitialised on purpose",
    "empty_strided": "uninitialised on purpose",
    "new_empty": "uninitialised on purpose",
    "new_empty_strided": "uninitialised on purpose",
}


def name_of(op) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def on(device: str, value):
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, move, value)


def call(op, sample, device: str):
    inputs = on(device, (sample.input, sample.args, sample.kwargs))
    first, args, kwargs = inputs
    if "device" in kwargs:
        kwargs["device"] = device
    torch.manual_seed(0)
    outputs = [leaf for leaf in tree_leaves(op(first, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    differentiable = [out for out in outputs if out.requires_grad and out.is_floating_point()]
    if differentiable:
        sum(out.sum() for out in differentiable).backward()
    grads = [leaf.grad for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return outputs, grads


def works_on_cpu(op, sample) -> bool:
    try:
        call(op, sample, "cpu")
    except Exception:  # noqa: BLE001  some samples exist to show an error
        return False
    return True


DTYPES = (torch.float32, torch.int64, torch.complex64)
COMPARED = [op for op in op_db if name_of(op) not in NOT_COMPARED and op.supported_dtypes("cpu") & set(DTYPES)]


@ignore_warnings_of("torch")
@pytest.mark.parametrize("op", COMPARED, ids=name_of)
def test_operator_agrees_with_the_cpu(sim, op):
    supported = op.supported_dtypes("cpu")
    dtype = next(dtype for dtype in DTYPES if dtype in supported)
    differentiable = op.supports_autograd and dtype != torch.int64
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))[:SAMPLES]
    for sample in samples:
        if not works_on_cpu(op, sample):
            continue
        expected, expected_grads = call(op, sample, "cpu")
        outputs, grads = call(op, sample, sim)
        assert len(outputs) == len(expected)
        assert [g is None for g in grads] == [g is None for g in expected_grads]
        for ours, cpu in zip(outputs + grads, expected + expected_grads, strict=True):
            if cpu is not None:
                assert ours.device.type == sim
                torch.testing.assert_close(ours.detach().cpu(), cpu.detach(), rtol=0, atol=0, equal_nan=True)


def test_the_sweep_is_wide():
    assert len(COMPARED) > 600


def test_mixing_devices_is_refused_as_on_a_gpu(sim):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=sim) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.embedding(torch.tensor([1, 2]), torch.ones(3, 4, device=sim))
    assert (torch.ones(3, device=sim) * torch.tensor(2.0)).sum().item() == 6, "a scalar on the CPU is fine"
    assert torch.arange(4, device=sim)[torch.tensor([True, False, True, False])].tolist() == [0, 2]


def test_histograms_of_integers_work_as_on_a_gpu(sim):
    counts = torch.histc(torch.tensor([0, 1, 1, 3], device=sim, dtype=torch.int32), bins=4, min=0, max=3)
    assert counts.tolist() == [1, 2, 0, 1]
    assert counts.dtype == torch.int32


def test_nothing_is_copied_over_the_link_by_kernels(sim):
    from lowtide import simdevice

    x = torch.randn(64, 64, device=sim, requires_grad=True)
    simdevice.reset()
    torch.nn.functional.layer_norm(x @ x.t(), (64,)).softmax(-1).square().sum().backward()
    assert simdevice.stats().copies == 0


def test_a_norm_is_one_kernel(sim):
    from lowtide import simdevice

    x = torch.randn(8, 64, device=sim)
    simdevice.reset()
    torch.nn.functional.layer_norm(x, (64,))
    assert simdevice.stats().kernels == 1


def test_printing_copying_and_saving(sim, tmp_path):
    import copy

    layer = torch.nn.Linear(3, 3).to(sim)
    assert "device='sim:0'" in repr(layer.weight)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.weight, layer.weight)
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt")
    assert again["weight"].device.type == sim
    assert torch.equal(again["weight"], layer.weight)
    assert torch.load(tmp_path / "layer.pt", map_location="cpu")["weight"].device.type == "cpu"


def test_a_pinning_data_loader(sim):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    with ignoring_warnings_of("torch"):
        batches = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)]
    assert all(batch.is_pinned() for batch in batches)
    moved = [batch.to(sim, non_blocking=True) for batch in batches]
    assert torch.cat(moved).sum().item() == 28


def test_a_cpu_tensor_is_never_written_by_a_kernel_of_the_device(sim):
    victim, one = torch.arange(6.0), torch.tensor([1], device=sim)
    with pytest.raises(RuntimeError, match="device"):
        victim[one] = 0
    scalar = torch.tensor(7.0)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(torch.ones((), device=sim), 1, out=scalar)
    assert victim.tolist() == [0, 1, 2, 3, 4, 5]
    assert scalar.item() == 7


def test_convolution_and_attention_refuse_mixed_devices(sim):
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.conv1d(torch.ones(1, 2, 4, device=sim), torch.ones(2, 2, 1))
    q = torch.ones(1, 2, 4, 8, device=sim)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.nn.functional.scaled_dot_product_attention(torch.ones(1, 4, 4, 8, device=sim), q, q)


def test_setting_a_tensor_to_nothing_leaves_its_views_alone(sim):
    x = torch.ones(4, device=sim)
    view = x.view(2, 2)
    x.set_()
    assert x.numel() == 0
    assert view.add_(1).sum().item() == 8


def test_view_operators_are_no_kernels(sim):
    from lowtide import simdevice

    x = torch.zeros(4, 2, device=sim)
    simdevice.reset()
    with torch.Stream(device=sim):
        pairs = torch.view_as_complex(x)
        assert torch.view_as_real(pairs).data_ptr() == x.data_ptr()
        assert x.unfold(0, 2, 1).shape == (3, 2, 2)
    assert simdevice.stats().kernels == 0


def test_names_of_operators_outlive_their_library(sim):
    from support import expect_violation

    library = torch.library.Library("lowtide_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    x = torch.ones(8, device=sim)
    y = torch.ops.lowtide_test.twice(x)
    library._destroy()
    with torch.Stream(device=sim):
        y.add_(1)
    assert expect_violation("read-race").other_op == "lowtide_test::twice"
