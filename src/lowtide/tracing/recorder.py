"""`lowtide.trace`: records the training steps inside a context. The model trains as before, to the bit."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import import_dynamo
from lowtide.applying import applied_to
from lowtide.errors import InvalidValueError, NoRegionError
from lowtide.modules import ancestors, named_parameters, plain_name, unwrap_ddp
from lowtide.regions import find_regions
from lowtide.stores import DiskStore, HostStore, TieredStore
from lowtide.tracing.ledger import Move, StorageLedger
from lowtide.tracing.phases import PhaseTracker
from lowtide.tracing.result import Level, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from lowtide.recording import Moment
    from lowtide.regions import Selector
    from lowtide.stores import Store

_BACKWARD = ("backward", "recompute")


class trace:  # noqa: N801  (a context manager, used like a function)
    """Record what the training steps inside it hold in memory, by region and over time.

    It works for any model: plain, under `lowtide.apply`, or with somebody else's checkpointing. `regions` names the
    regions (globs on module names, class names, classes); without it they are those of the policies in force, or else
    those that Lowtide finds. With the `optimizer`, its states and its step are told apart. The result is a `Trace`,
    which can be read while it grows. Nothing stays in the model, even after an error.

        with lowtide.trace(model, optimizer) as seen:
            model(batch).loss.backward()
            optimizer.step()
        Path("trace.html").write_text(seen.to_html())

    Inside it, functions that were compiled with torch.compile run uncompiled.
    """

    __module__ = "lowtide"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        regions: Sequence[Selector] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidValueError(f"trace needs a torch.nn.Module, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._model: nn.Module | None = model
        self._optimizer = optimizer
        self._names = _region_names(model, regions)
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Trace:
        if self._model is None or self._stack is not None:
            raise InvalidValueError("this trace has already been used: make a new one with lowtide.trace(model)")
        import_dynamo()
        with contextlib.ExitStack() as stack:
            recorder = _Recorder(self._model, self._names)
            recorder.claim_existing(self._optimizer)
            recorder.install(self._optimizer, stack)
            self._stack = stack.pop_all()
        return recorder.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = self._optimizer = None
        if self._stack is not None:
            self._stack.close()


class _Recorder:
    """Fills a `Trace` with what the ledger, the phase tracker, the allocator and the stores tell."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        began = time.perf_counter()
        self._clock: Callable[[], float] = lambda: time.perf_counter() - began
        self._model = model
        self._stores = _stores_of(model)
        self._counts_before = _counts_of(model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._ledger = StorageLedger(device, self._clock)
        self._tracker = PhaseTracker(names, self._clock, self._move_on)
        self._allocated = functools.partial(_allocated, device)
        self._files = {id(store): store.usage().disk for store in self._stores if isinstance(store, DiskStore)}
        self.trace = Trace(
            model=type(unwrap_ddp(model)).__name__,
            device=str(device),
            regions=names,
            events=self._ledger.events,
            spans=self._tracker.spans,
            called_again=self._tracker.called_again,
            moves=self._ledger.moves,
        )

    def claim_existing(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count weights, gradients and the optimizer's states from the beginning."""
        for parameter in self._model.parameters():
            self._ledger.claim(parameter.detach(), "weights")
            if parameter.grad is not None:
                self._ledger.claim(parameter.grad.detach(), "gradients")
        for buffer in self._model.buffers():
            self._ledger.claim(buffer, "weights")
        for state in optimizer.state.values() if optimizer is not None else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._ledger.claim(value, "optimizer")
        self.trace.start = max(0, len(self._ledger.events) - 1)
        self._read_levels()

    def install(self, optimizer: torch.optim.Optimizer | None, stack: contextlib.ExitStack) -> None:
        """Install all hooks and the ledger; `stack` removes them."""
        stack.callback(self._ledger.close)
        for _, parameter in named_parameters(self._model):
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._claim_gradient
                )
                stack.callback(handle.remove)
        if optimizer is not None:
            stack.callback(optimizer.register_step_pre_hook(lambda *_: self._set_in_optimizer(is_in=True)).remove)
            stack.callback(optimizer.register_step_post_hook(lambda *_: self._set_in_optimizer(is_in=False)).remove)
        self._tracker.watch(self._model, stack)
        self._ledger.tracker = self._tracker
        stack.enter_context(self._ledger)

    def _set_in_optimizer(self, *, is_in: bool) -> None:
        self._tracker.in_optimizer = is_in
        self._tracker.update()

    def _claim_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._ledger.claim(parameter.grad, "gradients")

    def _move_on(self, moment: Moment) -> None:
        before = self._tracker.moment.phase
        self._ledger.move_on(moment)
        if before == "forward" and moment.phase in _BACKWARD:
            self._read_saved()
        if before in _BACKWARD and moment.phase not in _BACKWARD:
            for parameter in self._model.parameters():  # some engines (FSDP) set gradients themselves
                self._claim_gradient(parameter)
        self._read_levels(moment)

    def _read_saved(self) -> None:
        saved = self._ledger.saved()
        if sum(saved.values()) >= self.trace.saved_bytes:
            self.trace.saved = saved

    def _read_counts(self) -> None:
        """Read what an applied policy counted itself since the trace began."""
        for name, counts in _counts_of(self._model).items():
            before = self._counts_before.get(name, (0, 0))
            self.trace.counted[name] = (counts[0] - before[0], counts[1] - before[1])

    def _read_levels(self, moment: Moment | None = None) -> None:
        """Read what the allocator and the stores count, and what was written to and read from files since last time."""
        if moment is not None and moment.phase not in ("forward", *_BACKWARD):
            self._read_counts()
        stored: dict[str, int] = {}
        now, (phase, region) = self._clock(), moment or self._tracker.moment
        for store in self._stores:
            stored[store.name] = stored.get(store.name, 0) + store.bytes_used
            if isinstance(store, DiskStore):
                self._note_disk_moves(store, now, phase, region)
        self.trace.levels.append(Level(now, phase, region, self._allocated(), stored))

    def _note_disk_moves(self, store: DiskStore, now: float, phase: str, region: str) -> None:
        before, disk = self._files[id(store)], store.usage().disk
        if before is None or disk is None:
            return
        self._files[id(store)] = disk
        changes = {
            "to disk": disk.written_bytes - before.written_bytes,
            "from disk": disk.read_bytes - before.read_bytes,
        }
        for direction, nbytes in changes.items():
            if nbytes:
                self._ledger.moves.append(Move(now, direction, nbytes, phase, region))


def _region_names(model: nn.Module, select: Sequence[Selector] | None) -> list[str]:
    """Name the regions: those that `select` asks for, else those of the policies in force, else those found, if any."""
    core = unwrap_ddp(model)
    handles = applied_to(model)
    if select is None and handles:
        wanted = {id(region.module) for handle in handles for region in handle.regions}
        return [plain_name(name) for name, module in core.named_modules() if id(module) in wanted]
    try:
        found = find_regions(core, select)
    except NoRegionError:
        if select is not None:
            raise
        return []
    scripted = [region.name for region in found if isinstance(region.module, torch.jit.ScriptModule)]
    if scripted and select is not None:
        raise InvalidValueError(
            f"{', '.join(scripted)}: TorchScript modules take no hooks. Name a module around them in regions="
        )
    return [plain_name(region.name) for region in found if region.name not in scripted]


def _counts_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return how often each region was recomputed, and how many tiles in it ran again, by the policies in force."""
    names = {id(module): plain_name(name) for name, module in unwrap_ddp(model).named_modules()}
    found: dict[str, tuple[int, int]] = {}
    for handle in applied_to(model):
        report = handle.report()
        for region, counts in zip(handle.regions, report.regions, strict=True):
            inside = (tiles for tiles in report.tiles if region.name in (tiles.name, *ancestors(tiles.name)))
            found[names[id(region.module)]] = (counts.recomputes, sum(tiles.recomputed_tiles for tiles in inside))
    return found


def _stores_of(model: nn.Module) -> list[HostStore | DiskStore]:
    found: list[Any] = []
    for store in (handle.store for handle in applied_to(model)):
        found += _tiers(store)
    return found


def _tiers(store: Store | None) -> list[Store]:
    if isinstance(store, TieredStore):
        return [store.host, store.disk]
    return [] if store is None else [store]


def _allocated(device: torch.device) -> int | None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.accelerator.memory_allocated(device)
