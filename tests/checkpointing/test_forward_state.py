"""A recompute computes what forward computed, or is refused, whatever the program does to the module in between."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import lowtide
from lowtide._torch import FSDP1_MARK
from lowtide.buffers import SMALL_BYTES


class Region(nn.Module):
    """Reads a weight twice, a buffer, a counter and its mode."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("ema", torch.ones(width))
        self.calls = 0

    def forward(self, x):
        y = torch.tanh(self.down(torch.tanh(self.up(x))) * (1 + self.ema.clone()) * self.frozen.clone())
        return y * 3 if self.training else y


def stack(kind: type[nn.Module] = Region) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3))).double()


class Checkpointed(nn.Module):
    """A stack whose regions go through `lowtide.checkpoint`."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        for region in self.net:
            x = lowtide.checkpoint(region, x)
        return x


def applied(net):
    lowtide.apply(net, "recompute")
    return net


WAYS = {"apply": applied, "checkpoint": Checkpointed}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 8, dtype=torch.double, generator=torch.Generator().manual_seed(seed)) + 1


def gradients_after(way, change, kind: type[nn.Module] = Region) -> list[torch.Tensor]:
    """Return the gradients of one step in which `change(net)` happens between forward and backward."""
    net = stack(kind)
    weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
    loss = way(net)(inputs()).square().sum()
    change(net)
    loss.backward()
    return [weight.grad for weight in weights]


def assert_equal(ours: list, plain: list) -> None:
    assert len(ours) == len(plain) > 0
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def with_sgd(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    for parameter in net.parameters():
        parameter.grad = None


def give_other_data(net):
    net[1].up.weight.data = torch.zeros_like(net[1].up.weight)


def change_frozen_weight(net):
    net[1].frozen.mul_(2)


class Marked(Region):
    """Its weights carry a note of the program, as some optimizers want them to; sharded weights are known by theirs."""

    def __init__(self) -> None:
        super().__init__()
        for weight in self.parameters():
            weight.lr_scale = 0.1


@every_way
@pytest.mark.parametrize("change", [with_sgd, give_other_data, change_frozen_weight])
def test_a_weight_with_attributes_that_changes_is_refused(way, change):
    with pytest.raises(lowtide.errors.InPlaceError, match=r"weight '\w+' of shape .* between forward and backward"):
        gradients_after(way, change, Marked)


@every_way
@pytest.mark.parametrize("mark", ["ds_id", FSDP1_MARK])
def test_a_weight_that_is_gathered_for_each_use_is_left_to_its_owner(way, mark):
    """ZeRO-3 and FSDP1 give a weight other data whenever they gather it."""
    net = stack()
    for weight in net.parameters():
        setattr(weight, mark, 1)
    loss = way(net)(inputs()).square().sum()
    gathered_again = net[1].up.weight.data.clone()
    net[1].up.weight.data = gathered_again
    loss.backward()
    assert_equal([net[1].up.weight.grad], [gradients_after(lambda net: net, nothing)[4]])


@every_way
@pytest.mark.parametrize("change", [with_sgd, give_other_data, change_frozen_weight])
def test_a_weight_that_changes_between_forward_and_backward_is_refused(way, change):
    with pytest.raises(lowtide.errors.InPlaceError, match=r"weight '\w+' of shape .* between forward and backward"):
        gradients_after(way, change)


def test_the_refusal_names_the_region_and_leaves_the_model_as_it_was():
    net = stack()
    lowtide.apply(net, "recompute")
    loss = net(inputs()).square().sum()
    with_sgd(net)
    with pytest.raises(lowtide.errors.InPlaceError, match=r"^region '2': the weight"):
        loss.backward()
    net(inputs()).square().sum().backward()
    plain = stack()
    with_sgd(plain)
    plain(inputs()).square().sum().backward()
    assert_equal([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


@every_way
def test_two_losses_of_one_forward_with_a_step_between_them(way):
    """Alternating updates, as for a GAN or an actor and its critic."""
    net = way(stack())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    out = net(inputs())
    out[:2].square().sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(lowtide.errors.InPlaceError):
        out[2:].square().sum().backward()


def replace_parameter(net):
    net[1].up.weight = nn.Parameter(torch.zeros_like(net[1].up.weight))


def replace_module(net):
    net[1].up = nn.Linear(8, 16, dtype=torch.double)


def evaluate(net):
    net.eval()


def freeze(net):
    net.requires_grad_(False)


def replace_buffer(net):
    net[1].ema = torch.zeros_like(net[1].ema)


def write_to_small_buffer(net):
    net[1].ema.mul_(0)


def write_to_small_buffer_unseen(net):
    net[1].ema.data.mul_(0)


def add_hook(net):
    net[1].up.register_forward_hook(lambda _module, _args, out: out * 3)


def remove_hook(net):
    net[1].hook.remove()


def nothing(net):
    pass


@every_way
@pytest.mark.parametrize(
    "change",
    [replace_parameter, evaluate, freeze, replace_buffer, write_to_small_buffer, nothing],
    ids=lambda f: f.__name__,
)
def test_other_changes_in_between_make_no_difference(way, change):
    assert_equal(gradients_after(way, change), gradients_after(lambda net: net, change))


@every_way
@pytest.mark.parametrize("change", [evaluate, freeze, replace_buffer, replace_parameter])
def test_what_was_changed_in_between_stays_changed(way, change):
    net = stack()
    changed = copy.deepcopy(net)
    change(changed)
    loss = way(net)(inputs()).square().sum()
    change(net)
    loss.backward()
    assert net[1].training is changed[1].training
    assert net[1].up.weight.requires_grad is changed[1].up.weight.requires_grad
    assert torch.equal(net[1].ema, changed[1].ema)
    assert torch.equal(net[1].up.weight, changed[1].up.weight)


class Wide(Region):
    """Has a buffer too large to be put back on suspicion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(SMALL_BYTES // 8 + 8, 1))

    def forward(self, x):
        return super().forward(x * self.table[: len(x)])


@every_way
def test_a_large_buffer_that_changes_in_between_is_refused(way):
    with pytest.raises(lowtide.errors.InPlaceError, match=r"buffer 'table' .* between forward and backward"):
        gradients_after(way, lambda net: net[1].table.mul_(2), Wide)


@every_way
def test_functional_call_computes_with_the_weights_and_buffers_it_was_given(way):
    def gradients(way):
        net = way(stack())
        given = {name: (p.detach() * 1.3).requires_grad_() for name, p in net.named_parameters()}
        buffers = {name: buffer * 2 for name, buffer in net.named_buffers()}
        out = functional_call(net, given | buffers, (inputs(),))
        found = torch.autograd.grad(out.square().sum(), list(given.values()), allow_unused=True)
        assert all(parameter.grad is None for parameter in net.parameters())
        return found

    assert_equal(gradients(way), gradients(lambda net: net))


def step_at_once(parameter):
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.01)


@every_way
def test_an_optimizer_that_steps_while_backward_runs_is_welcome(way):
    """LOMO and torchtune's `optimizer_in_bwd`: each weight is updated as soon as its gradient is there."""

    def weights(way):
        net = way(stack())
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(step_at_once)
        for seed in range(3):
            net(inputs(seed)).square().sum().backward()
            net.zero_grad()
        return list(net.parameters())

    assert_equal(weights(way), weights(lambda net: net))


class WritesUnseen(Region):
    """Statistics through `.data`, as codebooks do it."""

    def forward(self, x):
        self.ema.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x)


class WritesTableUnseen(Wide):
    def forward(self, x):
        self.table.data.mul_(0.9)
        return super().forward(x)


class Counts(Region):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Initializes(Region):
    """Makes an attribute in its first call."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale = float(x.detach().std())
        return super().forward(x) * self.scale


def trained(way, kind: type[nn.Module], steps: int = 5) -> list:
    net = way(stack(kind))
    for seed in range(steps):
        net(inputs(seed)).square().sum().backward()
    buffers = [buffer.clone() for buffer in net.buffers()]
    regions = [module for module in net.modules() if isinstance(module, Region)]
    counters = [torch.tensor(float(region.calls)) for region in regions]
    counters += [torch.tensor(region.history) for region in regions if hasattr(region, "history")]
    counters += [region.mean for region in regions if hasattr(region, "mean")]
    return [p.grad for p in net.parameters()] + buffers + counters


class Flags(Region):
    """Has a mask that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))

    def forward(self, x):
        out = super().forward(x) * torch.where(self.seen, 1.0, 0.5)
        self.seen |= x.detach().mean(0) > 1
        return out


class Averages(Region):
    """Keeps a tensor in an attribute, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8, dtype=torch.double)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) * (1 + self.mean.clone())


class ReplacesAverage(Averages):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return Region.forward(self, x) * (1 + self.mean)


class UsesUp(Region):
    """A list for the first call only, which is gone after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [2.0]

    def forward(self, x):
        factor = vars(self).pop("first", [1.0])[0]
        return super().forward(x * factor)


class AveragesInDict(Region):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"mean": torch.zeros(8, dtype=torch.double)}

    def forward(self, x):
        self.state["mean"] = 0.9 * self.state["mean"] + 0.1 * x.detach().mean(0)
        return super().forward(x) * (1 + self.state["mean"])


class Remembers(Region):
    def __init__(self) -> None:
        super().__init__()
        self.history = []

    def forward(self, x):
        self.history.append(float(x.detach().mean()))
        return super().forward(x) * len(self.history)


class Draws(Region):
    """Draws from three generators that torch's checkpoint does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        drawn = random.random() + np.random.rand()  # noqa: NPY002, S311
        drawn += float(torch.rand((), generator=self.generator))
        return super().forward(x) * drawn


class TakesGradient(Region):
    """Computes a force: a gradient inside its forward, after a buffer has changed."""

    def forward(self, x):
        self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y = super().forward(x)
        (force,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return y + force * self.ema.clone()


class AveragesAndTakesGradient(Averages):
    def forward(self, x):
        y = super().forward(x)
        (force,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return y + force


UNSEEN = [
    UsesUp,
    WritesUnseen,
    WritesTableUnseen,
    Counts,
    Initializes,
    Flags,
    Averages,
    ReplacesAverage,
    AveragesInDict,
]
UNSEEN += [Remembers, Draws, TakesGradient, AveragesAndTakesGradient]


@every_way
@pytest.mark.parametrize("kind", UNSEEN)
def test_what_a_forward_changes_unseen_changes_once(way, kind):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    ours = trained(way, kind)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert_equal(ours, trained(lambda net: net, kind))


def change_attribute(net):
    net[1].factor = 5.0


class Scales(Region):
    """Reads a number before everything else, so all that is recomputed depends on it. Its activation has no number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.act = nn.Tanh()

    def forward(self, x):
        return super().forward(self.act(x * self.factor))


class Hooked(Region):
    def __init__(self) -> None:
        super().__init__()
        self.hook = self.up.register_forward_hook(self.double, with_kwargs=True)

    @staticmethod
    def double(_module, _args, _kwargs, out):
        return out * 2


@every_way
@pytest.mark.parametrize("change", [add_hook, remove_hook])
def test_a_hook_that_comes_or_goes_before_backward_changes_nothing(way, change):
    assert_equal(gradients_after(way, change, Hooked), gradients_after(lambda net: net, nothing, Hooked))


@every_way
def test_an_attribute_that_the_program_changes_before_backward_is_as_in_forward(way):
    """A schedule of dropout's `p`, for example."""
    assert_equal(gradients_after(way, change_attribute, Scales), gradients_after(lambda net: net, nothing, Scales))


class Bare(nn.Module):
    """It has no buffer and changes nothing: as long as all is as it was, a recompute puts nothing back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.Tanh()
        self.factor = 2.0
        self.hook = self.up.register_forward_hook(Hooked.double, with_kwargs=True)

    def forward(self, x):
        x = self.act(x * self.factor * (2 if self.training else 1))
        return self.act(self.down(self.act(self.up(x))))


@every_way
@pytest.mark.parametrize("change", [add_hook, remove_hook, change_attribute, evaluate, freeze, replace_parameter])
def test_a_region_without_buffers_computes_what_it_computed_whatever_was_changed(way, change):
    assert_equal(gradients_after(way, change, Bare), gradients_after(lambda net: net, change, Bare))


@every_way
@pytest.mark.parametrize("change", [with_sgd, give_other_data])
def test_a_region_without_buffers_whose_weight_changes_is_refused(way, change):
    with pytest.raises(lowtide.errors.InPlaceError, match="between forward and backward"):
        gradients_after(way, change, Bare)


def run_both(block, x, *, last):
    return last(block(x))


class PassesModules(nn.Module):
    """Checkpoints a plain function of two modules."""

    def __init__(self, way) -> None:
        super().__init__()
        self.way, self.net, self.last = way, stack(Counts), nn.Linear(8, 8).double()

    def forward(self, x):
        for block in self.net:
            x = self.way(run_both, block, x, last=self.last)
        return x


def test_modules_among_the_arguments_belong_to_the_function():
    def gradients(way):
        net = PassesModules(way)
        given = {name: (p.detach() * 1.3).requires_grad_() for name, p in net.named_parameters()}
        out = functional_call(net, given, (inputs(),))
        found = torch.autograd.grad(out.square().sum(), list(given.values()), allow_unused=True)
        return [*found, *(torch.tensor(block.calls) for block in net.net)]

    assert_equal(gradients(lowtide.checkpoint), gradients(lambda function, *args, **kwargs: function(*args, **kwargs)))


class LeavesLoss(Region):
    def forward(self, x):
        self.auxiliary = x.square().mean()
        return super().forward(x)


class LeavesLossAndBuffer(LeavesLoss):
    """It puts another tensor in its buffer's place, too: what it did to attributes then is put back with that."""

    def forward(self, x):
        self.ema = 0.9 * self.ema + 0.1
        return super().forward(x)


@every_way
@pytest.mark.parametrize("kind", [LeavesLoss, LeavesLossAndBuffer])
def test_what_a_call_leaves_in_an_attribute_is_the_last_calls(way, kind):
    def left(way):
        net = way(stack(kind))
        for _ in range(3):
            (net(inputs(1)).sum() + net(inputs(2)).sum()).backward()
        return [region.auxiliary.detach() for region in net.modules() if isinstance(region, kind)]

    assert_equal(left(way), left(lambda net: net))


def test_two_forwards_before_backward_with_a_counter():
    def both(way):
        net = way(stack(Counts))
        (net(inputs(1)).square().sum() - net(inputs(2)).sum()).backward()
        return [p.grad for p in net.parameters()] + [torch.tensor(region.calls) for region in net]

    assert_equal(both(applied), both(lambda net: net))


class ChangesFrozenWeight(Region):
    def forward(self, x):
        out = super().forward(x)
        self.frozen.data.mul_(0.9)
        return out


class ChangesFrozenWeightInPlace(Region):
    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            self.frozen.mul_(0.9)
        return out


@pytest.mark.parametrize("kind", [ChangesFrozenWeight, ChangesFrozenWeightInPlace])
def test_a_forward_that_changes_a_weight_is_refused(kind):
    with pytest.raises(lowtide.errors.InPlaceError, match=r"the weight 'frozen' of shape \(8,\)"):
        trained(applied, kind)


class Packed(nn.Parameter):
    """A weight of a kind of its own, whose memory is nobody else's business: quantized ones are like that."""


def test_weights_of_other_kinds_may_move():
    net = stack()
    for region in net:
        region.up.weight = Packed(region.up.weight.detach())
    lowtide.apply(net, "recompute")
    loss = net(inputs()).square().sum()
    for region in net:
        region.up.weight.data = region.up.weight.data.clone()
    loss.backward()
    plain = stack()
    plain(inputs()).square().sum().backward()
    assert_equal([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_what_was_made_in_inference_mode_has_no_version_to_look_at():
    net = stack()
    for region in net:
        with torch.inference_mode():
            region.ema, region.frozen = (
                torch.ones(8).double(),
                nn.Parameter(torch.ones(8).double(), requires_grad=False),
            )
    lowtide.apply(net, "recompute")
    net(inputs()).square().sum().backward()
    plain = stack()
    plain(inputs()).square().sum().backward()
    assert_equal([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.12 and before
def test_a_closer_look_is_taken_at_the_first_second_fourth_and_eighth_call():
    """Each look reads all weights once: a cost that must become rare."""
    net = stack(WritesUnseen)
    handle = lowtide.apply(net, "recompute")
    sums = []
    for _ in range(9):
        with torch.profiler.profile() as seen:
            net(inputs())
        sums.append(sum(event.count for event in seen.key_averages() if event.key == "aten::sum"))
    assert handle.report().regions[0].forwards == len(sums)
    own = len(net)  # a mean is a sum, too
    look = own + 2 * len(list(net.parameters()))
    assert sums == [look, look, own, look, own, own, own, look, own]
