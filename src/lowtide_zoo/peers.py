"""Sets a model up for training as other libraries do, so that the audit can judge them.

| engine | what its users get |
|---|---|
| `trl` | SFTTrainer's flag (not reentrant), and its selective checkpointing, which keeps attention |
| `accelerate` | the FSDP2 plugin's `activation_checkpointing=True`: torch's wrappers around the layers |
| `deepspeed` | transformers' flag with `deepspeed.checkpointing.checkpoint` in the place of torch's |
| `peft-kbit` | LoRA on a base that `prepare_model_for_kbit_training` froze, as for QLoRA, here without quantization |
| `unsloth` | transformers' flag with unsloth_zoo's checkpoint in the place of torch's, and its smart one on a GPU |
| `axolotl` | transformers' flag with axolotl's function that offloads the inputs of layers |

Each calls the library's own code on one process. What a trainer or a launcher adds around it is not judged: sharding,
mixed precision, and kernels that need a GPU. What a library changes for the whole process is put back after its audit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from lowtide.auditing import audit
from lowtide.auditing.baseline import against, read_baseline
from lowtide.auditing.setups import PLAIN
from lowtide.errors import CannotSetUpError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from lowtide.auditing import AuditReport, CheckResult


@dataclasses.dataclass(frozen=True)
class PeerSetup:
    """One way in which a library's users train."""

    mode: str
    configure: Callable[[nn.Module], Any]
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    """Makes the model that is trained, such as one with adapters: the reference has it, too."""
    surroundings: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Holds while the set-up is audited: what the library changes for the whole process, and undoes afterwards."""
    needs_accelerator: bool = False
    """Whether the library moves tensors from a GPU to pinned memory, whatever device the model is on."""


def audit_peer(
    engine: str, model: nn.Module, batch: Any, *, baseline: Path | None = None, **options: Any
) -> AuditReport:
    """Audit a copy of a model under every set-up of an engine, each as a mode of one report."""
    require(engine)
    reports = [_audit(setup, model, batch, options) for setup in peer_setups(engine)]
    checks = [check for number, report in enumerate(reports) for check in report.checks if _is_new(check, number)]
    blocks = {mode: found for report in reports for mode, found in report.blocks.items()}
    merged = dataclasses.replace(reports[0], checks=checks, blocks=blocks)
    return merged if baseline is None else against(merged, read_baseline(baseline))


def _audit(setup: PeerSetup, model: nn.Module, batch: Any, options: dict[str, Any]) -> AuditReport:
    with setup.surroundings():
        try:
            prepared = setup.prepare(copy.deepcopy(model))
        except (ValueError, AttributeError, TypeError) as error:
            raise CannotSetUpError(f"{setup.mode} cannot prepare {type(model).__name__}: {error}") from error
        report = audit(prepared, batch, configure=setup.configure, **options)
    return dataclasses.replace(
        report,
        model=type(model).__name__,
        checks=[c if c.mode == PLAIN else dataclasses.replace(c, mode=setup.mode) for c in report.checks],
        blocks=dict.fromkeys([setup.mode], next(iter(report.blocks.values()), [])),
    )


def _is_new(check: CheckResult, report: int) -> bool:
    """Return whether a check belongs into the merged report: what is said of the plain model is said once."""
    return check.mode != PLAIN or report == 0


def require(engine: str) -> None:
    """Refuse an engine whose library is not installed or cannot run here, before anything is run."""
    package = _PACKAGES.get(engine)
    if package is not None and not is_installed(package):
        raise MissingDependencyError(
            f"--engine {engine} needs {package}, which is not installed: pip install {package}"
        )
    if engine in PEERS and not peer_setups(engine):
        raise CannotSetUpError(f"--engine {engine} needs an accelerator such as a GPU, and there is none here")


def is_installed(package: str) -> bool:
    """Return whether a package is there. It is not imported: some of them change torch as they are."""
    return importlib.util.find_spec(package) is not None


def peer_setups(engine: str) -> list[PeerSetup]:
    """Return the set-ups of an engine that can run here. Its library must be installed."""
    return [setup for setup in _SETUPS[engine] if torch.accelerator.is_available() or not setup.needs_accelerator]


class _Flag:
    """Transformers' flag, switched on; `remove` switches it off as the library's users do."""

    def __init__(self, model: Any, function: Callable[..., Any] | None = None, **keywords: Any) -> None:
        _require_support(model)
        self.model = model
        if function is None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)
        else:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)

    def remove(self) -> None:
        self.model.gradient_checkpointing_disable()


def _require_support(model: Any) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise CannotSetUpError(f"{type(model).__name__} does not support gradient checkpointing")


def _trl_flag(model: nn.Module) -> _Flag:
    _package("trl")  # its trainers call the flag with these keywords
    return _Flag(model, use_reentrant=False)


def _trl_selective(model: nn.Module) -> _Flag:
    _package("trl.models").enable_selective_activation_checkpointing(model)
    return _Flag(model, selective=True)


def _accelerate(model: nn.Module) -> None:
    """Wrap the layers that the model declares. Some declare more than they have, which the plugin refuses by name."""
    fsdp = _package("accelerate.utils.fsdp_utils")
    there = {type(module).__name__ for module in model.modules()}
    layers = [name for name in getattr(model, "_no_split_modules", None) or () if name in there]
    if not layers:
        raise CannotSetUpError(f"{type(model).__name__} declares no layers for accelerate's plugin to wrap")
    plugin = _package("accelerate").FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers,
    )
    fsdp.fsdp2_apply_ac(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), model)


def _deepspeed(model: nn.Module) -> _Flag:
    return _Flag(model, _package("deepspeed").checkpointing.checkpoint)


def _with_adapters(model: nn.Module) -> nn.Module:
    """Freeze a model and add LoRA to its linear layers. B starts at zero, which would hide the gradients of A."""
    peft = _package("peft")
    model.requires_grad_(False)
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return adapted


def _kbit(model: Any) -> None:
    """Call PEFT's function for a quantized base, which is told by an attribute, and let the adapters train again."""
    base = model.get_base_model()
    _require_support(base)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    base.is_loaded_in_8bit = True
    _package("peft").prepare_model_for_kbit_training(base)
    for parameter in trained:
        parameter.requires_grad_(True)


@contextlib.contextmanager
def _unsloth_patches(name: str, *arguments: Any) -> Iterator[None]:
    """Let a function of unsloth_zoo replace torch's and transformers' functions, and put everything back."""
    patched = [importlib.import_module(name) for name in ("torch.utils.checkpoint", "transformers.modeling_utils")]
    held, environment = [dict(vars(module)) for module in patched], dict(os.environ)
    if not torch.cuda.is_available():
        os.environ |= {"UNSLOTH_ZOO_DISABLE_GPU_INIT": "1", "UNSLOTH_DISABLE_DOUBLE_BUFFER": "1"}
    try:
        zoo = _package("unsloth_zoo.gradient_checkpointing")
        with contextlib.redirect_stdout(sys.stderr):  # where it prints that it has patched
            getattr(zoo, f"patch_{name}")(*arguments)
        try:
            yield
        finally:
            getattr(zoo, f"unpatch_{name}")()
    finally:
        for module, names in zip(patched, held, strict=True):
            for added in vars(module).keys() - names.keys():
                delattr(module, added)
            vars(module).update(names)
        os.environ.clear()
        os.environ |= environment


def _unsloth(model: nn.Module) -> _Flag:
    return _Flag(model, use_reentrant=True)


def _axolotl(model: nn.Module) -> _Flag:
    module = _package("axolotl.monkeypatch.gradient_checkpointing")
    return _Flag(model, module.hf_grad_checkpoint_offload_wrapper)


_SMART = ("unsloth_smart_gradient_checkpointing", torch.float32)

_SETUPS = {
    "trl": [PeerSetup("trl", _trl_flag), PeerSetup("trl, selective", _trl_selective)],
    "accelerate": [PeerSetup("accelerate, FSDP2 plugin", _accelerate)],
    "deepspeed": [PeerSetup("deepspeed", _deepspeed)],
    "peft-kbit": [PeerSetup("peft, k-bit", _kbit, _with_adapters)],
    "unsloth": [
        PeerSetup("unsloth", _unsloth, surroundings=functools.partial(_unsloth_patches, "gradient_checkpointing")),
        PeerSetup(
            "unsloth, smart",
            _unsloth,
            surroundings=functools.partial(_unsloth_patches, *_SMART),
            needs_accelerator=True,
        ),
    ],
    "axolotl": [PeerSetup("axolotl, offload", _axolotl, needs_accelerator=True)],
}

_PACKAGES = {engine: engine for engine in _SETUPS} | {"peft-kbit": "peft", "unsloth": "unsloth_zoo"}
"""The package that each engine needs."""

PEERS = tuple(_SETUPS)
"""The names of the engines."""


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingDependencyError(f"--engine needs {package}, which cannot be imported here ({error})") from error
