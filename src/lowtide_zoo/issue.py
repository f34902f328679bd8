"""Writes a failure up as an issue for its maintainers: a short script without Lowtide that shows it.

The script builds the tiny model from its configuration and a batch of the same shapes, and needs torch and transformers
alone. It ends with an assertion that fails because of the fault. Values of pixels and sounds are drawn anew, so a fault
that depends on the values of one audit does not come out; `shows` runs a script, and what it does not show is not
written up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide.auditing.grades import Grade
from lowtide.auditing.setups import PLAIN, TRANSFORMERS
from lowtide.errors import CannotAuditError
from lowtide_zoo.classes import configuration_class, model_classes

if TYPE_CHECKING:
    from lowtide.auditing import AuditReport, CheckResult
    from lowtide_zoo.tiny_model import TinyModel

_MOST_NUMBERS = 600
"""The largest tensor of integers that is written out; a larger one is drawn anew."""
_PATIENCE = 300.0
_WIDTH = 110

_GRADIENTS = """\
def gradients(model):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = loss_of(model(**batch))
    if loss.requires_grad:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


"""
_COMPARED = """\
trained = [name for name in plain if plain[name] is not None and plain[name].any()]
lost = [name for name in trained if seen[name] is None or not seen[name].any()]
wrong = [
    name for name in trained
    if name not in lost
    and not torch.allclose(plain[name], seen[name], rtol=1e-3, atol=1e-5 * float(plain[name].abs().max()))
]
print("without a gradient:", lost)
print("with a different gradient:", wrong)
assert not lost and not wrong
"""
_HOOKS = """\
def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


before = hooks(model)
"""

_BODIES = {
    "gradient values": _GRADIENTS
    + "plain = gradients(copy.deepcopy(model))\n{enable}\nseen = gradients(model)\n"
    + _COMPARED,
    "adapters on a frozen base": _GRADIENTS
    + """\
# As with LoRA: only linear weights inside the layers are trained.
for name, parameter in model.named_parameters():
    parameter.requires_grad_(False)
for name, module in model.named_modules():
    if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split(".")):
        module.weight.requires_grad_(True)
plain = gradients(copy.deepcopy(model))
{enable}
seen = gradients(model)
"""
    + _COMPARED,
    "outputs": """\
def loss_after_forward(model):
    torch.manual_seed(0)
    return float(loss_of(model(**batch)))


plain = loss_after_forward(copy.deepcopy(model))
{enable}
seen = loss_after_forward(model)
print(plain, seen)
assert abs(plain - seen) <= 1e-4 * abs(plain)
""",
    "buffers": _GRADIENTS
    + """\
twin = copy.deepcopy(model)
gradients(twin)
{enable}
gradients(model)
plain, seen = dict(twin.named_buffers()), dict(model.named_buffers())
wrong = [name for name in plain if not torch.allclose(plain[name].double(), seen[name].double(), rtol=1e-4)]
print("buffers that differ after one step:", wrong)
assert not wrong
""",
    "recomputed": """\
{enable}
calls = 0
block = dict(model.named_modules())[{block!r}]


def count(*_):
    global calls
    calls += 1


block.register_forward_pre_hook(count)
loss = loss_of(model(**batch))
in_forward = calls
loss.backward()
print("calls of", {block!r}, "in forward:", in_forward, "in backward:", calls - in_forward)
assert calls - in_forward == in_forward
""",
    "memory": """\
def saved_bytes(model):
    saved = {{}}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {{p.untyped_storage().data_ptr() for p in model.parameters()}}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model(**batch))
    return sum(size for place, size in saved.items() if place not in weights)


plain = saved_bytes(copy.deepcopy(model))
{enable}
seen = saved_bytes(model)
print("bytes saved for backward:", plain, "plain,", seen, "with the flag")
assert seen < 0.98 * plain
""",
    "DDP readiness": _GRADIENTS
    + """\
{enable}
times = dict.fromkeys(dict(model.named_parameters()), 0)
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: times.update({{name: times[name] + 1}}))
loss = loss_of(model(**batch))
todo, found = [loss.grad_fn], set()
while todo:  # what DDP does with find_unused_parameters=True
    node = todo.pop()
    if node is not None and node not in found:
        found.add(node)
        todo += [following for following, _ in node.next_functions]
in_graph = {{node.variable for node in found if hasattr(node, "variable")}}
loss.backward()
several = [name for name, count in times.items() if count > 1]
hidden = [name for name, p in model.named_parameters() if p.grad is not None and p not in in_graph]
print("ready several times:", several)
print("ready although DDP sees them as unused:", hidden)
assert not several and not hidden
""",
    "idempotent": _HOOKS
    + """\
{enable}
once = hooks(model)
{enable}
print("hooks before:", before, "switched on once:", once, "twice:", hooks(model))
assert hooks(model) == once
""",
    "reversible": _HOOKS
    + """\
{enable}
model.gradient_checkpointing_disable()
print("hooks before:", before, "after switching on and off:", hooks(model))
assert hooks(model) == before
""",
    "copy and pickle": "pickle.dumps(model)\n{enable}\npickle.dumps(model)\n",
    "runs": _GRADIENTS + "gradients(copy.deepcopy(model))\n{enable}\ngradients(model)\n",
    "parameters reached": _GRADIENTS
    + """\
name = {name!r}
gradient = gradients(model)[name]
print("gradient of", name, "is", gradient)
torch.manual_seed(0)
before = float(loss_of(model(**batch)))
with torch.no_grad():
    parameter = dict(model.named_parameters())[name]
    parameter.add_(0.02 * torch.randn_like(parameter))
torch.manual_seed(0)
after = float(loss_of(model(**batch)))
print("loss before and after a change of it:", before, after)
assert gradient is not None or before == after
""",
}
_BODIES["gradients present"] = _BODIES["experts"] = _BODIES["gradient values"]

_OWN_LOSS = "def loss_of(output):\n    return output.loss.sum()\n"
_ANY_LOSS = '''\
def loss_of(output):
    """Weigh all tensors at random: the model returns no loss of its own."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    for tensor in torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.requires_grad:
            finite = tensor[torch.isfinite(tensor)]
            total = total + (finite * torch.randn(finite.shape, generator=generator)).mean()
    return torch.as_tensor(total)
'''


@dataclasses.dataclass(frozen=True)
class Issue:
    """A failure written up: a title, and a script that shows it."""

    title: str
    script: str
    error: str = "AssertionError"
    """The class of the error with which the script ends."""

    def as_text(self, output: str) -> str:
        """Write the issue in Markdown, with what the script printed."""
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
        return (
            f"### {self.title}\n\nWith {versions}, on a CPU:\n\n```python\n{self.script}```\n\n"
            f"Output:\n\n```text\n{output.strip()}\n```"
        )


def write_issue(tiny_model: TinyModel, report: AuditReport) -> Issue:
    """Write up the worst failure of an audit of transformers' own flag."""
    return _written(tiny_model, _worst(report))


def _written(tiny_model: TinyModel, check: CheckResult) -> Issue:
    mode = check.mode
    if mode != PLAIN and mode not in TRANSFORMERS:
        raise CannotAuditError("--format issue writes up transformers' own flag: leave --engine and --policy out")
    options = TRANSFORMERS.get(mode)
    arguments = "" if options is None else f"gradient_checkpointing_kwargs={options!r}"
    body = _BODIES[check.name].replace("{{", "{").replace("}}", "}") if check.name in _BODIES else ""
    for word, value in {
        "{enable}": f"model.gradient_checkpointing_enable({arguments})",
        "{block!r}": repr(_block(check)),
        "{name!r}": repr(next(iter([*check.evidence.get("cut", ()), *check.evidence.get("untried", ())]), "")),
    }.items():
        body = body.replace(word, value)
    where = "in the plain model" if mode == PLAIN else f"with gradient_checkpointing_enable({arguments})"
    raised = re.match(r"(\w+): ", check.evidence.get("error", ""))
    error = raised[1] if raised else "AssertionError"
    return Issue(
        f"{tiny_model.model_class} {where}: {check.summary}", _imports(body) + _preamble(tiny_model) + body, error
    )


def is_shown(tiny_model: TinyModel, check: CheckResult) -> bool:
    """Return whether a script shows a failure. One that no script is about is not shown."""
    return check.name in _BODIES and shows_here(_written(tiny_model, check))


def shows_here(issue: Issue) -> bool:
    """Run an issue's script in this process, and return whether it ends with the issue's error.

    That takes a moment where `shows` takes many seconds, in a process that has imported transformers.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(issue.script, "fault.py", "exec"), {"__name__": "__main__"})  # noqa: S102  (our own script)
    except Exception as error:  # noqa: BLE001  the script ends with an error, and it is looked at
        return type(error).__name__ == issue.error
    return False


def shows(issue: Issue) -> str | None:
    """Run an issue's script, and return what it printed if it ends with the issue's error; None if it does not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fault.py"
        path.write_text(issue.script)
        done = subprocess.run(  # noqa: S603  (our own script)
            [sys.executable, "-W", "ignore", str(path)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
        )
    ending = re.search(rf"^(?:\w+\.)*{issue.error}\b.*\Z", done.stderr, flags=re.MULTILINE | re.DOTALL)
    return f"{done.stdout.strip()}\n{ending[0]}" if done.returncode and ending else None


def _worst(report: AuditReport) -> CheckResult:
    failures = [check for check in report.failures if check.name in _BODIES]
    if not failures:
        what = ", ".join(check.name for check in report.failures) or "nothing failed"
        raise CannotAuditError(f"there is no failure of {report.model} that a script can show: {what}")
    return max(failures, key=lambda check: list(Grade).index(check.grade or Grade.UNTIDY))


def _block(check: CheckResult) -> str:
    """Return a block that is not recomputed, or too often."""
    missed = check.evidence.get("missed", ())
    for stack in check.evidence.get("stacks", ()):
        if stack["name"] in missed and stack["blocks_not_recomputed"]:
            return str(stack["blocks_not_recomputed"][0])
    return str(next(iter(check.evidence.get("repeated", {})), ""))


def _imports(body: str) -> str:
    standard = "".join(f"import {name}\n" for name in ("copy", "pickle") if f"{name}." in body)
    return f"{standard}\nimport torch\n" if standard else "import torch\n"


def _preamble(tiny_model: TinyModel) -> str:
    """Write the model and the batch."""
    cls = next(cls for cls in model_classes(tiny_model.model_type) if cls.__name__ == tiny_model.model_class)
    model, batch = tiny_model.build(), tiny_model.batch()
    loss = getattr(model(**tiny_model.batch()), "loss", None)
    config = type(tiny_model.config)
    arguments = "".join(f"    {name!r}: {_literal(value)},\n" for name, value in batch.items())
    return f"""\
from {config.__module__} import {config.__name__}
from {cls.__module__} import {cls.__name__}

{_assigned("config", f"{config.__name__}(", _config(model.config, tiny_model.model_type), ")")}
torch.manual_seed(0)
model = {cls.__name__}(config).train()
with torch.no_grad():
    for parameter in model.parameters():  # weights that begin at zero would hide gradients
        if parameter.is_floating_point():
            parameter.add_(0.02 * torch.randn(parameter.shape))
batch = {{
{arguments}}}


{_OWN_LOSS if isinstance(loss, torch.Tensor) and loss.requires_grad else _ANY_LOSS}

"""


def _assigned(name: str, begin: str, fields: dict[str, Any], end: str) -> str:
    text = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    inner = textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"{name} = {begin}\n{inner}\n{end}"


def _config(config: Any, model_type: str) -> dict[str, Any]:
    """Return the fields that differ from the defaults, or all of them if those do not make the same configuration."""
    cls = configuration_class(model_type)
    whole = config.to_dict()
    for fields in (_difference(whole, cls().to_dict()), _difference(whole, {})):
        if _same(cls(**fields).to_dict(), whole):
            return fields
    raise CannotAuditError(f"the configuration of {model_type} cannot be written as keywords")


def _difference(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in fields.items():
        if name in ("transformers_version", "_name_or_path") or (name in defaults and defaults[name] == value):
            continue
        if isinstance(value, dict) and isinstance(defaults.get(name), dict) and "model_type" in value:
            inner = _difference(value, defaults[name])
            found[name] = {"model_type": value["model_type"], **inner}
        elif name != "model_type":
            found[name] = value
    return found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return {key: value for key, value in one.items() if not key.startswith("_")} == {
        key: value for key, value in other.items() if not key.startswith("_")
    }


def _literal(value: Any) -> str:
    """Write a value of a batch as code."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _tensor(value: torch.Tensor) -> str:
    shape = tuple(value.shape)
    if not value.numel():
        return f"torch.empty({shape}, dtype={value.dtype})"
    if bool((value == value.flatten()[0]).all()):
        return f"torch.full({shape}, {value.flatten()[0].item()!r})"
    if not value.is_floating_point():
        if value.numel() <= _MOST_NUMBERS:
            return f"torch.tensor({value.tolist()!r})"
        return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape})"
    low, high = float(value.min()), float(value.max())
    return f"torch.rand({shape}) * {high - low:.3g} + {low:.3g}" if low >= 0 else f"torch.randn({shape})"
