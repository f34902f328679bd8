"""Training programs made of named steps, run plain and under policies, and the verdict: equal, or refused.

A program is a model of named features (`models.featured`) and a list of named steps. All state of a run is in `Run`; a
step that has nothing to do (a backward without a forward) does nothing. Everything that a program can see is written
down: losses, gradients, parameters, buffers, counters, random generators.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import threading
import warnings

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError

import lowtide
from models.featured import WIDTH, build

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
        """Double, where rounding cannot be taken for a defect. Autocast leaves that alone, and a Llama's loss rounds."""
        return torch.float32 if self.in_low_precision or not self.regions else torch.double

    @property
    def in_low_precision(self) -> bool:
        return "autocast forward" in self.steps


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
        expert a token goes to, and so do tiles.
        """
        if not program.regions:
            return self.call is None
        routes = any(name.startswith("mixture") for name in program.features)
        return self.name != "tile" and not (program.in_low_precision and routes and "tile" in self.acts)

    def tolerance(self, program: Program) -> float:
        """How far a value may be off, as a share of the largest one. Only tiles compute in different shapes."""
        if "tile" not in self.acts:
            return 0.0
        if program.in_low_precision:
            return 5e-2
        return 1e-9 if program.dtype is torch.double else 1e-4


def _engine(name: str, *acts: str, **settings: str) -> Engine:
    return Engine(name, frozenset(acts), **settings)


PLAIN = {device: Engine("plain", device=device) for device in ("cpu", "sim")}

ENGINES = [
    _engine("recompute", "recompute", policy="recompute"),
    _engine("every second", "recompute", policy="recompute(every=2)"),
    _engine("tile(mlp)", "tile", policy="tile(mlp, tokens=16)"),
    _engine("recompute+tile(mlp)", "recompute", "tile", policy="recompute+tile(mlp, tokens=16)"),
    _engine("tile", "tile", policy="tile(tokens=16)"),
    _engine("offload to disk", "offload", policy="offload(disk={}, tmpfs)"),
    _engine("recompute+offload to disk", "recompute", "offload", policy="recompute+offload(disk={}, tmpfs)"),
    _engine("checkpoint", "recompute", call="checkpoint"),
    _engine("checkpoint to disk", "recompute", "offload", call="checkpoint to disk"),
    _engine("patch_torch", "recompute", call="patch_torch"),
    _engine("patch_torch, reentrant", "recompute", call="patch_torch, reentrant"),
    _engine("offload on sim", "offload", policy="offload", device="sim"),
    _engine("recompute+offload on sim", "recompute", "offload", policy="recompute+offload", device="sim"),
    _engine(
        "all on sim", "recompute", "offload", "tile", policy="recompute+offload+tile(mlp, tokens=16)", device="sim"
    ),
]


def _call_of(engine: Engine, directory: str):
    """The function that calls a region, if the model does not."""
    if engine.call == "checkpoint":
        return lowtide.checkpoint
    if engine.call == "checkpoint to disk":
        store = lowtide.DiskStore(directory, tmpfs=True)
        return lambda *args, **kwargs: lowtide.checkpoint(*args, offload=store, **kwargs)
    if engine.call is None:
        return None
    reentrant = engine.call.endswith("reentrant")
    return lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(*args, use_reentrant=reentrant, **kwargs)


# --- A run ----------------------------------------------------------------------------------------------------------


class ExpectedError(Exception):
    """The error that some steps bring about, and catch."""


class Run:
    """One run of a program: the model, what waits for a backward, and all that was seen."""

    def __init__(self, program: Program, engine: Engine, directory: str) -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        self.program, self.engine, self.directory = program, engine, directory
        self.model = build(program.regions, program.model, program.dtype).to(engine.device)
        self.model.call = _call_of(engine, directory)
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
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def batch(self, tokens=TOKENS):
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        x = torch.randn(BATCH, tokens, WIDTH, dtype=self.program.dtype, generator=generator) + 0.3
        x = x.to(self.engine.device)
        return x.requires_grad_() * 1 if "input needs a gradient" in self.program.model else x

    def forward(self, call=None, tokens=TOKENS):
        x = self.batch(tokens)
        losses = self.model.losses((call or self.model)(x))
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
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.detach().cpu().clone()
            state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.cpu().clone()
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
            elif not name.startswith("_") and isinstance(value, int | float | list):
                yield f"{path}.{name}", copy.deepcopy(value)


# --- Steps ----------------------------------------------------------------------------------------------------------


def _optimize(run, *, set_to_none=True):
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=set_to_none)


def _first_loss(run):
    if run.pending and len(run.pending[-1]) > 1:
        run.pending[-1].pop(0).backward(retain_graph=True)


def _gradient_only(run):
    if run.pending:
        wanted = [p for p in run.model.parameters() if p.requires_grad]
        run.see(torch.autograd.grad(sum(run.pending.pop()), wanted, allow_unused=True))


def _gradient_penalty(run):
    if run.pending:
        losses = run.pending.pop()
        wanted = [p for p in run.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(sum(losses), wanted, create_graph=True, allow_unused=True)
        (sum(losses) + sum(grad.square().sum() for grad in grads if grad is not None)).backward()


def _in_a_thread(run):
    errors = []

    def work():
        try:
            run.backward()
        except BaseException as error:  # noqa: BLE001  (raised again by the step)
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _change_weight(run):
    module, name = run.weight()
    with torch.no_grad():
        getattr(module, name).mul_(1.1)


def _replace_data(run):
    module, name = run.weight()
    getattr(module, name).data = getattr(module, name).data * 1.1


def _write_data(run):
    module, name = run.weight()
    getattr(module, name).data.mul_(1.1)


def _replace_weight(run):
    module, name = run.weight()
    weight = getattr(module, name)
    setattr(module, name, nn.Parameter(weight.detach() * 1.1, requires_grad=weight.requires_grad))
    run.make_optimizer()


def _load(run, **settings):
    state = {
        name: value * 0.9 if value.is_floating_point() else value.clone()
        for name, value in run.model.state_dict().items()
    }
    run.model.load_state_dict(state, **settings)
    if settings:
        run.make_optimizer()


def _buffers(run):
    for module in run.model.regions[0].modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                yield module, name, buffer


def _change_buffers(run):
    for _, _, buffer in _buffers(run):
        buffer.mul_(1.1)


def _replace_buffers(run):
    for module, name, buffer in _buffers(run):
        setattr(module, name, buffer * 1.1)


def _change_attribute(run):
    for module in run.model.regions[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        if hasattr(module, "factor"):
            module.factor *= 1.1


def _lifted_hook(run):
    """A hook that is in force during one forward only."""
    handle = run.model.regions[0].mlp.register_forward_hook(lambda _module, _args, out: out * 1.1)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(handle.remove)
        run.forward()


def _functional(run):
    """A forward with other weights; their gradients come at once."""
    others = {
        name: (weight.detach() * 1.2).requires_grad_(weight.requires_grad)
        for name, weight in run.model.named_parameters()
    }
    x = run.batch()
    losses = run.model.losses(functional_call(run.model, others, (x,)))
    run.see(losses)
    wanted = [weight for weight in others.values() if weight.requires_grad]
    run.see(torch.autograd.grad(sum(losses), wanted, allow_unused=True))


def _functional_step(run):
    """A step of MAML: a forward with weights that an inner step made, and one gradient through both."""
    names, weights = zip(*((n, w) for n, w in run.model.named_parameters() if w.requires_grad), strict=True)
    inner = sum(run.model.losses(run.model(run.batch())))
    grads = torch.autograd.grad(inner, weights, create_graph=True, allow_unused=True)
    fast = {n: w if g is None else w - 0.1 * g for n, w, g in zip(names, weights, grads, strict=True)}
    losses = run.model.losses(functional_call(run.model, fast, (run.batch(),)))
    run.see(losses)
    sum(losses).backward()


def _evaluate(run):
    run.model.eval()
    with torch.no_grad():
        run.see([run.model(run.batch())])
    run.model.train()


def _without_gradients(run):
    with torch.no_grad():
        run.see([run.model(run.batch())])


def _raise(*_):
    raise ExpectedError


def _fail_forward(run, module):
    handle = module.register_forward_pre_hook(_raise)
    try:
        run.model(run.batch())
    except ExpectedError:
        run.see([torch.ones(1)])
    finally:
        handle.remove()


def _fail_backward(run):
    """An error in the middle of a backward. What it left in the gradients is thrown away."""
    module, name = run.weight()
    if not getattr(module, name).requires_grad:
        return
    run.forward()
    handle = getattr(module, name).register_hook(_raise)
    try:
        run.backward()
    except ExpectedError:
        run.see([torch.ones(1)])
    finally:
        handle.remove()
    run.optimizer.zero_grad()


def _freeze(run, *, requires_grad):
    run.model.regions[-1].requires_grad_(requires_grad)


def _change_input(run):
    if run.inputs:
        with torch.no_grad():
            run.inputs[-1].add_(1)


def _copy(run):
    """The program goes on with a copy, which runs plainly until a policy is applied to it."""
    call, run.model.call = run.model.call, None
    twin = copy.deepcopy(run.model)
    run.model.call = twin.call = call
    run.model = twin
    run.make_optimizer()


def _cached(run):
    with parametrize.cached():
        run.forward()
        run.backward()


def _autocast(run):
    return torch.autocast(run.engine.device, torch.bfloat16)


def _under_autocast(run):
    with _autocast(run):
        run.forward()


def _remove(run):
    if run.applied is not None:
        run.applied.remove()


STEPS = {
    "forward": Run.forward,
    "longer forward": lambda run: run.forward(tokens=TOKENS + 16),
    "autocast forward": _under_autocast,
    "cached": _cached,
    "functional": _functional,
    "functional step": _functional_step,
    "forward without gradients": _without_gradients,
    "evaluation": _evaluate,
    "evaluation mode": lambda run: run.model.eval(),
    "training mode": lambda run: run.model.train(),
    "forward with a hook": _lifted_hook,
    "backward": Run.backward,
    "backward of the oldest": lambda run: run.backward(0),
    "backward of one loss": _first_loss,
    "backward in a thread": _in_a_thread,
    "backward under no_grad": lambda run: run.backward(context=torch.no_grad),
    "backward under autocast": lambda run: run.backward(context=lambda: _autocast(run)),
    "gradient only": _gradient_only,
    "gradient penalty": _gradient_penalty,
    "step": _optimize,
    "step to zeros": lambda run: _optimize(run, set_to_none=False),
    "weight in place": _change_weight,
    "weight .data replaced": _replace_data,
    "weight .data in place": _write_data,
    "weight replaced": _replace_weight,
    "state loaded": _load,
    "state assigned": lambda run: _load(run, assign=True),
    "buffers in place": _change_buffers,
    "buffers replaced": _replace_buffers,
    "attribute changed": _change_attribute,
    "input in place": _change_input,
    "freeze": lambda run: _freeze(run, requires_grad=False),
    "unfreeze": lambda run: _freeze(run, requires_grad=True),
    "error in a region": lambda run: _fail_forward(run, run.model.regions[-1]),
    "error in an MLP": lambda run: _fail_forward(run, run.model.regions[-1].mlp),
    "error in backward": _fail_backward,
    "copy": _copy,
    "policy removed": _remove,
    "policy applied": Run.apply,
    "random numbers": lambda _: torch.rand(3),
}


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
    scale = max([1.0, *(float(v.double().norm()) for v in plain.values() if _is_float(v) and v.isfinite().all())])
    for name, expected in plain.items():
        value = ours[name]
        if not isinstance(expected, torch.Tensor) or not isinstance(value, torch.Tensor):
            if isinstance(expected, torch.Tensor) or isinstance(value, torch.Tensor) or value != expected:
                yield name, f"{value!r:.60} instead of {expected!r:.60}"
        elif value.shape != expected.shape or value.dtype != expected.dtype:
            yield name, f"{value.dtype} {tuple(value.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        elif not torch.equal(value, expected):
            off = float((value.double() - expected.double()).norm()) if _is_float(expected) else float("inf")
            if not off <= tolerance * scale:
                yield name, f"off by {off:.2g} of {float(expected.double().norm()):.2g}"


def _is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
