"""What a region or a tile runs is compiled: in forward, in recompute and in each tile, before or after `apply`."""

from __future__ import annotations

import copy
import pickle

import accelerate.utils
import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
from models.in_backward import InBackward
from models.tiny import IS_4, transformers
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's own look at tensors
    ignore_warnings_of("accelerate", "torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="the models of transformers 4 break graphs themselves"),
]

LAYERS = 3


def llama(dropout: float = 0.0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attention_dropout=dropout,
    )
    return transformers.LlamaForCausalLM(config).train()


def steps(model, called=None, lengths=(24, 24)):
    """The gradients of some training steps, by names without the compiler's wrapper."""
    found = []
    for length in lengths:
        torch.manual_seed(length)
        ids = torch.randint(0, 96, (2, length))
        model.zero_grad()
        (model if called is None else called)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name.replace("_orig_mod.", ""): p.grad.clone() for name, p in model.named_parameters()})
    return found


def error(found, expected):
    pairs = [(one[name], two[name]) for one, two in zip(found, expected, strict=True) for name in two]
    return max(float((one - two).norm() / two.norm().clamp(min=1e-12)) for one, two in pairs)


def in_place(model, **settings):
    for layer in model.model.layers:
        layer.compile(**settings)
    return model


def wrapped(model, **settings):
    model.model.layers = nn.ModuleList(torch.compile(layer, **settings) for layer in model.model.layers)
    return model


def forwards(model, **settings):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, **settings)
    return model


def repeated(model, **settings):
    """As accelerate does it for DeepSpeed, and diffusers for its repeated blocks; heads and norms are compiled, too."""
    accelerate.utils.other.compile_regions_deepspeed(model, **settings)
    return model


class Runs:
    """A backend that notes which of its graphs runs: how many it compiled would not tell who runs them."""

    def __init__(self):
        self.code = []
        self.noted = []

    def __call__(self, graph, _inputs):
        self.code.append(str(graph.code))
        number = len(self.code)

        def run(*args):
            self.noted.append(number)
            return graph(*args)

        return run

    @property
    def graphs(self):
        return len(self.code)

    def taken(self):
        taken, self.noted = self.noted, []
        return taken

    def of_a_step(self, model, what=""):
        """How often graphs run in forward and in backward of one step, those with this in their code."""
        ids = torch.arange(48).reshape(2, 24)
        self.taken()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = self.taken()
        loss.backward()
        return tuple(sum(what in self.code[number - 1] for number in taken) for taken in (forward, self.taken()))


WAYS = {"in place": in_place, "wrapped": wrapped, "forwards": forwards}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("policy", "graphs", "runs", "tolerance"),
    [
        ("recompute", 1, (1, 1), 0.0),  # as without a policy
        # The MLP in three tiles, and what is before and behind it; a recompute stops before what is behind.
        ("recompute+tile(mlp, tokens=16)", 3, (5, 4), 1e-5),
        ("recompute+tile(attention, tokens=12)", 6, (16, 24), 1e-5),
    ],
)
def test_a_compiled_block_runs_compiled(policy, graphs, runs, tolerance, way, when):
    """In forward and in recompute: each graph's runs are counted, for each layer."""
    counter = Runs()
    model = llama()
    expected = steps(model)
    if when == "before":
        WAYS[way](model, backend=counter)
    applied = lowtide.apply(model, policy)
    if when == "after":
        WAYS[way](model, backend=counter)
    assert error(steps(model), expected) <= tolerance
    assert counter.graphs == graphs
    assert counter.of_a_step(model) == tuple(LAYERS * each for each in runs)
    assert [region.recomputes for region in applied.report().regions] == [3] * LAYERS


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_compiled_in_place_may_be_one_graph(when):
    counter = CompileCounterWithBackend("aot_eager")
    model = llama()
    expected = steps(model)
    if when == "before":
        in_place(model, backend=counter, fullgraph=True)
    with lowtide.apply(model, "recompute") as applied:
        if when == "after":
            in_place(model, backend=counter, fullgraph=True)
        assert error(steps(model), expected) <= 1e-6
        assert counter.frame_count == 1
        assert all(region.recomputes == 2 for region in applied.report().regions)
    assert not any({"forward", "compile"} & vars(module).keys() for module in model.modules())
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers), "as torch leaves it"
    assert error(steps(model), expected) <= 1e-6
    assert counter.frame_count == 1


@pytest.mark.parametrize("compile_it", [lambda model, **how: model.compile(**how) or model, torch.compile])
@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(mlp, loss, tokens=16, loss_tokens=16)"])
def test_in_a_compiled_model_each_region_is_compiled(policy, compile_it):
    counter = Runs()
    model = llama()
    expected = steps(model)
    applied = lowtide.apply(model, policy)
    called = compile_it(model, backend=counter)
    torch._dynamo.utils.counters.clear()
    assert error(steps(model, called), expected) <= 1e-5
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    assert breaks == (3 if policy == "recompute" else 10), "at most two for each seam: regions, MLPs, head and norm"
    assert counter.of_a_step(called, "scaled_dot_product_attention") == (LAYERS, LAYERS)
    assert counter.of_a_step(called, "silu") == ((LAYERS, LAYERS) if policy == "recompute" else (9, 9))
    assert [region.recomputes for region in applied.report().regions] == [4] * LAYERS


@pytest.mark.parametrize(
    ("policy", "compile_it", "told"),
    [
        ("recompute", lambda model, **how: model.compile(**how), r"the seam of a Lowtide policy.*layer\.compile"),
        ("recompute", wrapped, r"the seam of a Lowtide policy.*each of the model's layers, in place"),
        ("recompute+tile(mlp, tokens=16)", in_place, r"as tile\(mlp\) does.*such layers without fullgraph=True"),
        ("tile(attention, tokens=12)", in_place, r"work of a Lowtide policy.*compile without fullgraph=True"),
    ],
)
def test_one_graph_across_a_seam_is_refused_with_the_remedy(policy, compile_it, told):
    model = llama()
    lowtide.apply(model, policy)
    compile_it(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told):
        steps(model)


def test_other_lengths_are_compiled_once_more_and_no_more():
    counter = CompileCounterWithBackend("eager")
    model = llama()
    first, others = (24, 32, 23), (40, 48, 56, 31, 24)
    expected = steps(model, lengths=first), steps(model, lengths=others)
    lowtide.apply(model, "recompute+tile(mlp, tokens=16)")
    in_place(model, backend=counter)
    assert error(steps(model, lengths=first), expected[0]) <= 1e-5
    graphs = counter.frame_count
    assert graphs <= 3 * 3, "three graphs, of one length, of any, and of the last tile"
    assert error(steps(model, lengths=others), expected[1]) <= 1e-5
    assert counter.frame_count == graphs


@pytest.mark.parametrize("policy", ["tile(attention, tokens=12)", "recompute+tile(attention, tokens=12)"])
def test_other_lengths_are_compiled_once_more_under_tiles_of_attention_too(policy):
    counter = Runs()
    model = in_place(llama(), backend=counter)
    lowtide.apply(model, policy)
    steps(model, lengths=(24, 32))
    graphs = counter.graphs
    assert graphs <= 3 * 6, "six graphs, of one length, of any, and of the last tile"
    steps(model, lengths=(23, 40, 31, 61))
    assert counter.graphs == graphs


@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(mlp, tokens=10)", "tile(attention, tokens=12)"])
def test_an_optimizer_in_backward_steps_the_weights_of_compiled_layers(policy):
    def trained(policy, *, is_compiled):
        torch._dynamo.reset()
        model = llama()
        optimizer = InBackward(model, "clipped")
        if is_compiled:
            in_place(model, backend="aot_eager")
        if policy is not None:
            lowtide.apply(model, policy)
        for _ in range(2):
            optimizer.fired.clear()
            ids = torch.arange(48).reshape(2, 24)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            assert set(optimizer.fired.values()) == {1}
        return {name: weight.detach() for name, weight in model.named_parameters()}

    assert error([trained(policy, is_compiled=True)], [trained(None, is_compiled=False)]) <= 1e-5


def has_attention(counter):
    return any("scaled_dot_product_attention" in str(graph.code) for graph in counter.graphs)


def test_accelerate_compiles_repeated_blocks():
    counter = CompileCounterWithBackend("eager")
    model = llama()
    expected = steps(model)
    lowtide.apply(model, "recompute")
    repeated(model, backend=counter)
    assert error(steps(model), expected) == 0
    assert has_attention(counter)


def test_the_model_that_accelerate_makes_with_compiled_regions_is_compiled_and_has_the_policy():
    counter = CompileCounterWithBackend("eager")
    model = llama()
    expected = steps(model)
    applied = lowtide.apply(model, "recompute+tile(loss, loss_tokens=16)")
    made = accelerate.utils.compile_regions(model, backend=counter)
    assert error(steps(made), expected) <= 1e-5
    assert has_attention(counter)
    report = applied.report()
    assert [region.recomputes for region in report.regions] == [2] * LAYERS
    assert [head.calls for head in report.tiles] == [2]


def compile_repeated_blocks(model, **settings):
    """As diffusers' method of that name: each module of a class that the model names is compiled in place."""
    for part in model.modules():
        if type(part).__name__ == "LlamaDecoderLayer":
            part.compile(**settings)


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_that_are_compiled_by_their_class_are_one_graph(when):
    counter = CompileCounterWithBackend("eager")
    model = llama()
    expected = steps(model)
    if when == "before":
        compile_repeated_blocks(model, backend=counter, fullgraph=True)
    lowtide.apply(model, "recompute")
    if when == "after":
        compile_repeated_blocks(model, backend=counter, fullgraph=True)
    assert error(steps(model), expected) == 0
    assert counter.frame_count == 1


def test_layers_that_are_modules_of_torch_are_compiled_in_a_compiled_model():
    """A compiler leaves frames of torch alone, unless it is led into them."""
    counter = CompileCounterWithBackend("eager")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(LAYERS)))
    applied = lowtide.apply(model, "recompute")
    model.compile(backend=counter)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert any("gelu" in str(graph.code) for graph in counter.graphs)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) <= 2 * LAYERS
    assert [region.recomputes for region in applied.report().regions] == [2] * LAYERS


def test_a_recompute_runs_the_graph_that_its_forward_ran():
    """A graph of one length fits no other, and one of any length fits all: which is taken must not change meanwhile."""
    runs = Runs()
    model = Stack().train()
    lowtide.apply(model, "recompute")
    for layer in model.layers:
        layer.compile(backend=runs)
    outputs = [model(torch.randn(2, n, 32, requires_grad=True)).sum() for n in (24, 32, 24)]
    forward = runs.taken()
    assert set(forward) == {1, 2}, "of one length, and of any"
    for output in outputs:
        output.backward()
    assert runs.taken() == forward


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inductor's", "eager's"])
def test_random_numbers_of_compiled_tiles_are_drawn_again(is_eager):
    """The last tiles are shorter, and run in another graph. With inductor's own random numbers, and with eager's."""
    block = Block().train()
    compiled = torch.compile(block, backend="inductor")

    def gradients(run):
        torch.manual_seed(0)
        block.zero_grad()
        outputs = [run(torch.randn(1, length, 32)).square().sum() for length in (40, 31)]
        for output in outputs:
            output.backward()
        return [parameter.grad.clone() for parameter in block.parameters()]

    def at_once(x):
        return torch.cat([compiled(part) for part in x.tensor_split(-(-x.shape[1] // 16), dim=1)], dim=1)

    with torch._inductor.config.patch(fallback_random=is_eager):
        expected = gradients(at_once)
        for ours, one in zip(gradients(lambda x: lowtide.tile(compiled, x, tokens=16)), expected, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-6, atol=1e-6)


class Block(nn.Module):
    """Draws random numbers behind the last tensor that is saved, so that a recompute may stop early."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        h = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.3, self.training)
        return x + nn.functional.dropout(self.down(h), 0.2, self.training)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("backend", "autocast"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)])
def test_random_numbers_autocast_and_early_stop_are_those_of_the_compiled_model(backend, autocast):
    def gradients(policy):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stack().train()
        if policy is not None:
            lowtide.apply(model, policy)
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(16, 32)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, two in zip(gradients("recompute"), gradients(None), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_copies_of_a_model_that_is_compiled_inside_run_plainly():
    counter = CompileCounterWithBackend("eager")
    model = llama()
    expected = steps(model)
    lowtide.apply(model, "recompute")
    in_place(model, backend=counter)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  (our own bytes)
        assert error(steps(twin), expected) == 0
    assert counter.frame_count == 0
    in_place(twin, backend=counter)
    lowtide.apply(twin, "recompute")
    assert error(steps(twin), expected) == 0
    assert counter.frame_count == 1
    assert error(steps(model), expected) == 0
    assert counter.frame_count == 1


def test_what_a_checkpoint_and_a_tile_call_is_compiled_with_the_function_around_them():
    counter = CompileCounterWithBackend("eager")
    block = Block().eval()
    x = torch.randn(40, 32, requires_grad=True)

    @torch.compile(backend=counter)
    def step(x):
        return lowtide.tile(block, lowtide.checkpoint(block, x.sin()).cos(), tokens=16).square().sum()

    (ours,) = torch.autograd.grad(step(x), x)
    (expected,) = torch.autograd.grad(block(block(x.sin()).cos()).square().sum(), x)
    torch.testing.assert_close(ours, expected)
    code = [str(graph.code) for graph in counter.graphs]
    assert sum("gelu" in graph for graph in code) >= 2, "once checkpointed, once in a tile"
