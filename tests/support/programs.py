"""Training programs made of named steps, run plain and under policies, and the verdict: equal, or refused.

A program is a model of named features (`models.featured`) and a list of named steps (`support.steps`). All state of a
run is in `Run`; a step that has nothing to do (a backward without a forward) does nothing. Everything that a program
can see is written down: losses, gradients, parameters, buffers, counters, random generators.

Programs are drawn from a plain random generator, for all features should come up equally often, and the same programs
with every version of every package. A wrong one is made smaller by leaving things out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointError

import lowtide
from models.featured import FEATURES, MODEL_FEATURES, WIDTH, build
from support.steps import CRASHING, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH, TOKENS = 2, 64  # 4096 bytes in float32: worth moving


@dataclasses.dataclass(frozen=True)
class Program:
    """What is trained and how. Without regions, the model is a Llama."""

    regions: tuple[tuple[str, ...], ...]
    steps: tuple[str, ...]
    model: tuple[str, ...] = ()

    @property
    def features(self) -> set[str]:
        return {*self.steps, *self.model, *(name for region in self.regions for name in region)}

    @property
    def dtype(self) -> torch.dtype:
        """Double, where rounding is no defect, but neither with autocast nor for a Llama: its loss is in float32."""
        return torch.float32 if self.in_low_precision or not self.regions else torch.double

    @property
    def in_low_precision(self) -> bool:
        return "autocast forward" in self.steps


def random_program(source: random.Random) -> Program:
    """Two to four regions, most often alike, or a Llama; some steps, and a whole training step at the end."""
    usual, steps = ("forward", "backward", "step"), sorted(STEPS.keys() - set(CRASHING))
    count = source.choice([0, *[2, 3, 4] * 5])
    alike = source.random() < 0.5
    regions = [_some(source, sorted(FEATURES), 2) for _ in range(count)]
    drawn = [source.choice(source.choice([usual, steps])) for _ in range(source.randint(1, 7))]
    if any("gradient inside" in feature for region in regions for feature in region):
        # As with torch's checkpoint, a gradient that is taken inside overwrites what `retain_grad` kept of the input.
        drawn = ["forward" if step == "hidden gradients" else step for step in drawn]
    if "forward kept on the host" in drawn:
        # On a CPU torch's save_on_cpu copies nothing, and switches autograd's check off: the plain program is wrong.
        drawn = ["forward" if step == "input in place" else step for step in drawn]
    model = _some(source, MODEL_FEATURES, 1) if count else ()
    return Program(tuple(regions[:1] * count if alike else regions), (*drawn, *usual), model)


def _some(source: random.Random, names: list[str], most: int) -> tuple[str, ...]:
    return tuple(source.choices(names, k=source.randint(0, most)))


def minimised(program: Program, is_wrong: Callable[[Program], bool]) -> Program:
    """Leave out of a program what can be left out while it is still wrong."""
    smaller = next(filter(is_wrong, _smaller(program)), None)
    return program if smaller is None else minimised(smaller, is_wrong)


def _smaller(program: Program) -> Iterator[Program]:
    for steps in _without_one(program.steps):
        yield dataclasses.replace(program, steps=steps)
    for model in _without_one(program.model):
        yield dataclasses.replace(program, model=model)
    for regions in _without_one(program.regions):
        if regions:  # none would be a Llama
            yield dataclasses.replace(program, regions=regions)
    for number, region in enumerate(program.regions):
        for less in _without_one(region):
            regions = (*program.regions[:number], less, *program.regions[number + 1 :])
            yield dataclasses.replace(program, regions=regions)


def _without_one(things: tuple) -> list[tuple]:
    return [things[:place] + things[place + 1 :] for place in range(len(things))]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A way to run a program: a policy that is applied, or a checkpoint function that calls each region."""

    name: str
    acts: frozenset[str] = frozenset()
    """What happens to regions: recompute, tile, offload."""
    policy: str | None = None
    call: str | None = None
    device: str = "cpu"

    def suits(self, program: Program) -> bool:
        """Whether it does something that can be compared.

        Transformers calls its regions itself, and only its loss can be tiled. In low precision, rounding decides which
        expert a token goes to, and so do tiles. Torch's reentrant checkpoint refuses what its replacement can do.
        """
        if not program.regions:
            return self.call is None
        routes = any(name.startswith("mixture") for name in program.features)
        if self.name == "keep products" and {"mlp: gradient inside", "state by keyword"} <= program.features:
            return False  # a known defect: the recompute ends in an error about sizes
        if self.call == "checkpoint of a closure" and "keywords in place" in program.steps:
            return False  # it is put back, where autograd refuses it
        if (self.call or "").startswith("patch_torch") and any("reentrant inside" in name for name in program.features):
            return False
        return self.name not in ATTENDING and not (program.in_low_precision and routes and "tile" in self.acts)

    def acts_in(self, program: Program) -> frozenset[str]:
        """What happens to regions in a program, which may apply another policy halfway."""
        return self.acts | ({"recompute"} if self.policy and "another policy" in program.steps else set())

    def tolerance(self, program: Program) -> float:
        """How far a value may be off, as a share of the largest one. Only tiles compute in different shapes."""
        if "tile" not in self.acts:
            return 0.0
        if program.in_low_precision:
            return 5e-2
        return 1e-9 if program.dtype is torch.double else 1e-4


def _engine(name: str, *acts: str, **settings: str) -> Engine:
    return Engine(name, frozenset(acts), **settings)


ATTENDING = ("tile", "tile(attention)", "keep attention")
"""Engines that need a model with attention."""

PLAIN = {device: Engine("plain", device=device) for device in ("cpu", "sim")}

ENGINES = [
    _engine("recompute", "recompute", policy="recompute"),
    _engine("every second", "recompute", policy="recompute(every=2)"),
    _engine("keep products", "recompute", policy="recompute(keep=matmul)"),
    _engine("tile(mlp)", "tile", policy="tile(mlp, tokens=16)"),
    _engine("recompute+tile(mlp)", "recompute", "tile", policy="recompute+tile(mlp, tokens=16)"),
    _engine("tile", "tile", policy="tile(tokens=16)"),
    _engine("tile(attention)", "recompute", "tile", policy="recompute+tile(attention, tokens=16)"),
    _engine("keep attention", "recompute", policy="recompute(keep=attention)"),
    _engine("offload to disk", "offload", policy="offload(disk={}, tmpfs)"),
    _engine("recompute+offload to disk", "recompute", "offload", policy="recompute+offload(disk={}, tmpfs)"),
    _engine("checkpoint", "recompute", call="checkpoint"),
    _engine("checkpoint of a closure", "recompute", call="checkpoint of a closure"),
    _engine("checkpoint to disk", "recompute", "offload", call="checkpoint to disk"),
    _engine("patch_torch", "recompute", call="patch_torch"),
    _engine("patch_torch, reentrant", "recompute", call="patch_torch, reentrant"),
    _engine("offload on sim", "offload", policy="offload", device="sim"),
    _engine(
        "host and disk on sim",
        *("recompute", "offload"),
        policy="recompute+offload(host=64KiB, disk={}, tmpfs)",
        device="sim",
    ),
    _engine("recompute+offload on sim", "recompute", "offload", policy="recompute+offload", device="sim"),
    _engine(
        "all on sim", "recompute", "offload", "tile", policy="recompute+offload+tile(mlp, tokens=16)", device="sim"
    ),
]


def _call_of(engine: Engine, directory: str):
    """The function that calls a region, if the model does not."""
    if engine.call == "checkpoint":
        return lowtide.checkpoint
    if engine.call == "checkpoint of a closure":
        return lambda region, x, **kwargs: lowtide.checkpoint(lambda t: region(t, **kwargs), x)
    if engine.call == "checkpoint to disk":
        store = lowtide.DiskStore(directory, tmpfs=True)
        return lambda *args, **kwargs: lowtide.checkpoint(*args, offload=store, **kwargs)
    if engine.call is None:
        return None
    reentrant = engine.call.endswith("reentrant")
    return lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(*args, use_reentrant=reentrant, **kwargs)


# --- A run ----------------------------------------------------------------------------------------------------------


class Run:
    """One run of a program: the model, what waits for a backward, and all that was seen."""

    def __init__(self, program: Program, engine: Engine, directory: str) -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        self.program, self.engine, self.directory = program, engine, directory
        self.model = build(program.regions, program.model, program.dtype).to(engine.device)
        self.model.call = _call_of(engine, directory)
        self.models = []
        self.parameters = {}
        """All that the model ever had: a gradient may come for one that was replaced."""
        self.make_optimizer()
        self.pending = []
        """Losses that wait for a backward, those of one forward together."""
        self.inputs = []
        self.batches = 0
        self.seen = []
        self.applied = None
        self.apply()

    def apply(self):
        if self.engine.policy is not None:
            regions = ["regions.*"] if self.program.regions else None
            self.applied = lowtide.apply(self.model, self.engine.policy.format(self.directory), regions=regions)

    def make_optimizer(self):
        self.models.append(self.model)
        self.parameters |= {id(parameter): parameter for parameter in self.model.parameters()}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def end(self):
        """Take the tensors of graphs out of all modules.

        A graph that is dropped before backward holds the regions it would recompute. A region whose attribute holds the
        graph (an auxiliary loss, the weight of an old weight norm) is then never freed; torch's checkpoint is no other.
        """
        for module in {module for model in self.models for module in model.modules()}:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    delattr(module, name)

    def batch(self, more=0):
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        x = torch.randn(BATCH, TOKENS + more, WIDTH, dtype=self.program.dtype, generator=generator) + 0.3
        x = x.to(self.engine.device)
        return x.requires_grad_() * 1 if "input needs a gradient" in self.program.model else x

    def forward(self, more=0):
        """Run the model on a new batch, which has so many more tokens than others."""
        x = self.batch(more)
        losses = self.model.losses(self.model(x))
        self.see(losses)
        self.inputs.append(x)
        if any(loss.requires_grad for loss in losses):
            self.pending.append([loss for loss in losses if loss.requires_grad])

    def see(self, values):
        self.seen += [value if value is None else value.detach().cpu().clone() for value in values]

    def backward(self, which=-1, context=contextlib.nullcontext):
        if self.pending:
            losses = self.pending.pop(which)
            with context():
                torch.autograd.backward(losses)

    def weight(self):
        """A weight of the first region: the module that holds it, and its name there."""
        held = [
            (module, name)
            for module in self.model.regions[0].modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.dim() > 1
        ]
        return held[-1]

    def state(self) -> dict[str, object]:
        """Everything that was seen, and everything that is left."""
        state = {f"seen {number}": value for number, value in enumerate(self.seen)}
        state |= {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}
        for number, parameter in enumerate(self.parameters.values()):
            state[f"gradient {number}"] = None if parameter.grad is None else parameter.grad.cpu().clone()
        state |= {f"buffer {name}": buffer.cpu().clone() for name, buffer in self.model.named_buffers()}
        state |= {f"attribute {name}": value for name, value in _attributes(self.model)}
        state["torch's random state"] = torch.get_rng_state()
        state["Python's random state"] = random.getstate()
        state["NumPy's random state"] = np.random.get_state()[1].tolist()  # noqa: NPY002
        return state


def _attributes(model):
    """Numbers, lists and tensors in plain attributes."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value.detach().cpu().clone()
            elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
                yield from ((f"{path}.{name}.{i}", item.detach().cpu().clone()) for i, item in enumerate(value))
            elif isinstance(value, list) and any(isinstance(item, torch.nn.Module) for item in value):
                yield f"{path}.{name}", len(value)
            elif not name.startswith("_") and isinstance(value, int | float | list) and name != "features":
                yield f"{path}.{name}", copy.deepcopy(value)


# --- The verdict ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left, or the error that ended it and the step that it ended in."""

    state: dict[str, object] | None = None
    error: BaseException | None = None
    step: str = ""

    def __str__(self) -> str:
        return "no error" if self.error is None else f"{type(self.error).__name__} in {self.step!r}: {self.error}"


def outcome_of(program: Program, engine: Engine, directory: str) -> Outcome:
    """Run a program."""
    step = "start"
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if (engine.call or "").startswith("patch_torch"):
            stack.enter_context(lowtide.patch_torch())
        try:
            run = Run(program, engine, directory)
            stack.callback(run.end)
            for step in program.steps:
                STEPS[step](run)
            return Outcome(run.state())
        except Exception as error:  # noqa: BLE001  (judged below)
            return Outcome(error=error.with_traceback(None), step=step)


def verdict(plain: Outcome, ours: Outcome, tolerance: float) -> str:
    """`equal`, `refused` or `both refuse`; anything else begins with `WRONG`."""
    if plain.error is not None:
        as_plain = type(ours.error) is type(plain.error) or _is_refusal(ours.error)
        return "both refuse" if as_plain else f"WRONG: the plain program has {plain}, ours {ours}"
    if ours.error is not None:
        return "refused" if _is_refusal(ours.error) else f"WRONG: ours has {ours}"
    wrong = [f"{name}: {text}" for name, text in _differences(plain.state, ours.state, tolerance)]
    return "WRONG: " + "; ".join(wrong[:4]) if wrong else "equal"


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error says that Lowtide or torch's own checks found something that would give a wrong gradient."""
    if isinstance(error, lowtide.LowtideError | CheckpointError):
        return True
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def _differences(plain, ours, tolerance):
    if plain.keys() != ours.keys():
        yield "names", str(sorted(plain.keys() ^ ours.keys()))
        return
    norms = [float(value.double().norm()) for value in plain.values() if _is_float(value)]
    scale = max([1.0, *filter(math.isfinite, norms)])
    for name, expected in plain.items():
        value = ours[name]
        if not isinstance(expected, torch.Tensor) or not isinstance(value, torch.Tensor):
            if isinstance(expected, torch.Tensor) or isinstance(value, torch.Tensor) or value != expected:
                yield name, f"{value!r:.60} instead of {expected!r:.60}"
        elif value.shape != expected.shape or value.dtype != expected.dtype:
            yield name, f"{value.dtype} {tuple(value.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        elif not torch.equal(value, expected):
            off = _distance(value, expected) if _is_float(expected) else float("inf")
            if not off <= tolerance * scale:
                yield name, f"off by {off:.2g} of {float(expected.double().norm()):.2g}"


def _is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _distance(one, other):
    """Numbers that are too large for both, or for neither, are no difference."""
    one, other = one.double(), other.double()
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    return float((one.nan_to_num() - other.nan_to_num()).norm())
