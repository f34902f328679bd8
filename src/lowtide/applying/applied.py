"""`apply_policy` and its handle `Applied`: a policy put on instances, once, and taken off again."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from torch import nn

from lowtide.applying.block_runtime import BlockRuntime
from lowtide.applying.guard import Guard, WatchedRegion
from lowtide.applying.loss_runtime import HeadRuntime, ModelRuntime
from lowtide.applying.region_runtime import ModelMemory, RegionRuntime
from lowtide.applying.report import RegionReport, Report
from lowtide.applying.seam import Seam, seams_of
from lowtide.applying.tile_runtime import TileRuntime
from lowtide.applying.validate import (
    UNSEEN_ATTENTION,
    check_reach,
    checkpoints_itself,
    validate,
    warn_about_own_checkpointing,
)
from lowtide.checkpointing import Schedule
from lowtide.checkpointing.keeping import Keeping
from lowtide.checkpointing.kept_operators import KeptOperators
from lowtide.checkpointing.offload import PerTensorOffloader
from lowtide.counters import RegionLedger, TileLedger
from lowtide.errors import InvalidValueError
from lowtide.policy import Policy
from lowtide.regions import Region
from lowtide.stores import HostStore, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from lowtide.applying.seam import Runtime
    from lowtide.applying.validate import Installation
    from lowtide.regions import Selector


def apply_policy(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any],
    *,
    regions: Sequence[Selector] | None = None,
    strict: bool = True,
    probe: bool = True,
) -> Applied:
    """Put `policy` on `model` and return the handle that takes it off; nothing is changed unless all of it can be.

    `lowtide.apply` calls this once the policy is known. With `probe=False`, tiled modules are not tried out for being
    token-wise: the trial compares numbers, and a simulated step has none.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"apply needs a torch.nn.Module, got {type(model).__name__}")
    installation = validate(model, Policy.parse(policy), regions)
    previous = applied_to(model)
    if len(previous) == 1 and previous[0].matches(installation, strict=strict, probe=probe):
        return previous[0]
    check_reach(model, [region for handle in previous for region in handle.regions])
    if installation.keeps_less:
        warn_about_own_checkpointing(model, installation.policy)
    installation = installation.with_store()  # may be refused, so before anything is changed
    for handle in previous:
        handle.remove()
    return Applied(model, installation, strict=strict, probe=probe)


def applied_to(model: nn.Module) -> list[Applied]:
    """Return the handles that act on the model or on parts of it."""
    seams = (seam for module in model.modules() for seam in seams_of(module))
    return list(dict.fromkeys(seam.handle for seam in seams if isinstance(seam.handle, Applied)))


class _InRegion(NamedTuple):
    """What belongs to a region: what it keeps, and the counts of the tiled modules in it."""

    keeping: Keeping | None
    tiles: list[TileLedger]


class Applied:
    """A policy in force on a model. Also a context manager: leaving it removes the policy.

    The seams keep their handle alive, and the model keeps the seams: whoever does not need the handle may drop it. The
    handle knows modules and seams weakly, and does not keep the model alive.
    """

    __module__ = "lowtide"

    def __init__(self, model: nn.Module, installation: Installation, *, strict: bool, probe: bool = True) -> None:
        self.policy = installation.policy
        self.strict = strict
        self.store = installation.store
        """Where offloaded bytes wait; None if nothing is offloaded."""
        self._probe = probe
        self._regions = [(region.name, weakref.ref(region.module), region.index) for region, _ in installation.regions]
        self._parts = [(name, weakref.ref(module)) for name, module in installation.parts()]
        """Everything that the policy acts on, by name: regions, MLPs, norms and the head."""
        self._model = weakref.ref(model)
        self._ledgers: list[tuple[RegionLedger, Policy]] = []
        self._tiles: list[TileLedger] = []
        self._seams: list[weakref.ref[Seam]] = []
        self._own_checkpointing: list[weakref.ref[nn.Module]] = []
        """The modules whose own checkpointing is switched off meanwhile."""
        self._guard = Guard(strict=strict)
        handle = weakref.WeakMethod(self._find_replaced)
        self._guard.find_replaced = lambda: find() if (find := handle()) is not None else []
        self._install(model, installation)

    @property
    def regions(self) -> list[Region]:
        """The regions of the model; none once the model is gone."""
        alive = ((name, module(), index) for name, module, index in self._regions)
        return [Region(name, module, index) for name, module, index in alive if module is not None]

    def matches(self, installation: Installation, *, strict: bool, probe: bool = True) -> bool:
        """Return whether installing this would change nothing."""
        modules = [module for _, module in installation.parts()]
        same_settings = (self.policy, self.strict, self._probe) == (installation.policy, strict, probe)
        return same_settings and modules == [module() for _, module in self._parts]

    def _find_replaced(self) -> list[str]:
        """Return the names of modules that are no longer in the model, which a wrapper around them does not change."""
        model = self._model()
        inside = set() if model is None else set(model.modules())
        return [name for name, module in self._parts if model is not None and module() not in inside]

    def note_copy(self, module: nn.Module) -> None:
        """Let the guard object if a copy of a region is trained in this model; copies elsewhere run plainly."""
        model = self._model()
        if self._seams and model is not None and any(part is module for part in model.modules()):
            self._guard.object_to_replaced()

    @overload
    def report(self) -> Report: ...
    @overload
    def report(self, format: Literal["text", "json", "html"]) -> str: ...
    def report(self, format: str | None = None) -> Report | str:  # noqa: A002  (as on the command line)
        """Return what happened so far, per region: as data, which prints as text, or in a format for a file.

        `"html"` is a page in the look of the plan's and the audit's; it needs the `html` extra.
        """
        report = self._collect_report()
        if format is None:
            return report
        writers = {"text": report.__str__, "json": report.to_json, "html": report.to_html}
        if format not in writers:
            raise InvalidValueError(
                f"unknown report format {format!r}: use one of {', '.join(writers)}, or no format to get an object"
            )
        return writers[format]()

    def __str__(self) -> str:
        return self._collect_report().summary()

    def remove(self) -> None:
        """Leave the model as it was. Doing it twice is fine."""
        for reference in reversed(self._seams):
            if (seam := reference()) is not None:
                seam.remove()
        for flag in self._own_checkpointing:
            if (module := flag()) is not None:
                module.gradient_checkpointing = True  # type: ignore[assignment]
        self._seams.clear()
        self._own_checkpointing.clear()
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, model: nn.Module, installation: Installation) -> None:
        if installation.keeps_less:
            self._switch_off_own_checkpointing(model)
        # Tiles come before regions: a region recomputes the tiles that are in it, or that it consists of.
        by_region = self._install_tiles(installation)
        self._install_loss(installation)
        self._install_regions(model, installation, by_region)

    def _switch_off_own_checkpointing(self, model: nn.Module) -> None:
        """Switch off transformers' flag: else regions would be recomputed twice, and those left alone once."""
        for module in model.modules():
            if checkpoints_itself(module):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                self._own_checkpointing.append(weakref.ref(module))

    def _install_tiles(self, installation: Installation) -> dict[str, _InRegion]:
        """Tile MLPs, blocks and norms, and return what belongs to each region."""
        by_region: dict[str, _InRegion] = {
            region.name: _InRegion(Keeping(KeptOperators(policy.keep)) if policy.keep else None, [])
            for region, policy in installation.regions
        }
        runtimes: dict[str, list[TileRuntime]] = collections.defaultdict(list)
        for mlp, policy in installation.mlps:
            ledger = self._new_tiles(mlp.name)
            by_region[mlp.region.name].tiles.append(ledger)
            runtimes[mlp.region.name].append(TileRuntime(policy, ledger, probe=self._probe))
            self._install_seam(mlp.module, runtimes[mlp.region.name][-1])
        for region, policy in installation.blocks:
            ledger = self._new_tiles(region.name)
            keeping, tiles = by_region[region.name]
            tiles.append(ledger)
            runtime = BlockRuntime(policy, ledger, runtimes[region.name], keeping, self._guard, probe=self._probe)
            self._install_seam(region.module, runtime)
        for name in installation.left_alone:
            self._new_tiles(name).left_alone = UNSEEN_ATTENTION
        for norm, policy in installation.norms:
            self._install_seam(norm.module, TileRuntime(policy, self._new_tiles(norm.name), probe=self._probe))
        return by_region

    def _new_tiles(self, name: str) -> TileLedger:
        self._tiles.append(TileLedger(name))
        return self._tiles[-1]

    def _install_loss(self, installation: Installation) -> None:
        head = installation.head
        if head is None:
            return
        ledger = self._guard.loss = self._new_tiles(head.name)
        model_runtime = ModelRuntime()
        self._install_seam(head.model, model_runtime)
        self._install_seam(head.module, HeadRuntime(model_runtime, ledger, self.policy.loss_tokens))

    def _install_regions(self, model: nn.Module, installation: Installation, by_region: dict[str, _InRegion]) -> None:
        schedule = Schedule(self.store or HostStore())
        memory = ModelMemory(model)
        offloader = PerTensorOffloader(schedule, memory.holds)
        for region, policy in installation.regions:
            ledger = RegionLedger(region.name)
            self._ledgers.append((ledger, policy))
            if policy.is_none:
                continue
            keeping, tiles = by_region[region.name]
            watched = WatchedRegion(policy, ledger, tuple(tiles), keeping)
            self._guard.regions.append(watched)
            runtime = RegionRuntime(watched, schedule if policy.offload else None, offloader, self._guard, memory)
            self._install_seam(region.module, runtime)

    def _install_seam(self, module: nn.Module, runtime: Runtime) -> None:
        seam = Seam(module, runtime, handle=self)
        seam.install()
        self._seams.append(weakref.ref(seam))

    def _collect_report(self) -> Report:
        usage = self.store.usage() if self.store else Usage()
        return Report(
            policy=self.policy.describe(),
            regions=[RegionReport.of(ledger, str(policy)) for ledger, policy in self._ledgers],
            tiles=[dataclasses.replace(ledger) for ledger in self._tiles],
            **{field.name: getattr(usage, field.name) for field in dataclasses.fields(usage)},
        )
