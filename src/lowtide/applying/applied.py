"""`apply` and its handle: per instance, idempotent, reversible."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from lowtide.applying.guard import Guard
from lowtide.applying.loss_runtime import HeadRuntime, OwnerRuntime
from lowtide.applying.region_runtime import OwnMemory, RegionRuntime
from lowtide.applying.report import RegionReport, Report
from lowtide.applying.seam import Seam
from lowtide.applying.tile_runtime import TileRuntime
from lowtide.applying.validate import (
    check_policy,
    check_reach,
    checkpoints_itself,
    keeps_less,
    offloads,
    tell_of_own_checkpointing,
)
from lowtide.checkpointing import Schedule
from lowtide.checkpointing.offload import PerTensorOffloader
from lowtide.counters import RegionLedger, TileLedger
from lowtide.errors import InvalidValueError
from lowtide.policy import Policy
from lowtide.regions import Region, find_head, find_mlps, find_regions
from lowtide.stores import HostStore, Usage, store_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from lowtide.applying.seam import Runtime
    from lowtide.regions import Selector
    from lowtide.stores import Store


def apply(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any],
    *,
    regions: Sequence[Selector] | None = None,
    strict: bool = True,
) -> Applied:
    """What `lowtide.apply` (`budget.py`) does once the policy is known. Nothing is changed unless all of it can be."""
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"apply needs a torch.nn.Module, got {type(model).__name__}")
    wanted = Policy.parse(policy)
    found = find_regions(model, regions)
    check_policy(model, wanted, found)
    previous = applied_to(model)
    if len(previous) == 1 and previous[0].is_the_same(wanted, found, strict=strict):
        return previous[0]
    check_reach(model, [region for handle in previous for region in handle.regions])
    if keeps_less(wanted, found):
        tell_of_own_checkpointing(model, wanted)
    store = store_for(wanted) if offloads(wanted, found) else None  # may be refused, so before anything is changed
    for handle in previous:
        handle.remove()
    return Applied(model, wanted, found, store, strict=strict)


class Applied:
    """A policy in force on a model. Also a context manager: leaving it removes the policy."""

    __module__ = "lowtide"

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        regions: list[Region],
        store: Store | None,
        *,
        strict: bool,
    ) -> None:
        self.policy = policy
        self.strict = strict
        self.store = store
        """Where offloaded bytes wait; None if nothing is offloaded."""
        self._regions = [(region.name, weakref.ref(region.module), region.index) for region in regions]
        self._ledgers: list[tuple[RegionLedger, Policy]] = []
        self._tiles: list[TileLedger] = []
        self._seams: list[weakref.ref[Seam]] = []  # their modules hold them, and they hold this
        self._flags: list[weakref.ref[nn.Module]] = []
        self._guard = Guard(strict=strict)
        self._install(model, regions)

    @property
    def regions(self) -> list[Region]:
        """The blocks that the policy acts on. The handle does not keep the model alive; without it there are none."""
        alive = ((name, module(), index) for name, module, index in self._regions)
        return [Region(name, module, index) for name, module, index in alive if module is not None]

    def is_the_same(self, policy: Policy, regions: list[Region], *, strict: bool) -> bool:
        """Whether applying this again would change nothing."""
        modules = [region.module for region in regions]
        mine = [region.module for region in self.regions]
        return (self.policy, self.strict) == (policy, strict) and modules == mine

    @overload
    def report(self) -> Report: ...
    @overload
    def report(self, format: Literal["text", "json", "html"]) -> str: ...
    def report(self, format: str | None = None) -> Report | str:  # noqa: A002  (as on the command line)
        """What happened so far, per region: as data, which prints as text, or in a format for a file.

        `"html"` is a page in the look of the plan's and the audit's; it needs the `html` extra.
        """
        report = self._read()
        if format is None:
            return report
        writers = {"text": report.__str__, "json": report.to_json, "html": report.to_html}
        if format not in writers:
            raise InvalidValueError(f"a report is {', '.join(writers)}, or without a format an object; not {format!r}")
        return writers[format]()

    def _read(self) -> Report:
        usage = self.store.usage() if self.store else Usage()
        return Report(
            policy=self.policy.describe(),
            regions=[RegionReport.of(ledger, str(policy)) for ledger, policy in self._ledgers],
            tiles=[dataclasses.replace(ledger) for ledger in self._tiles],
            **{field.name: getattr(usage, field.name) for field in dataclasses.fields(usage)},
        )

    def remove(self) -> None:
        """Leave the model as it was. Doing it twice is fine."""
        for reference in reversed(self._seams):
            if (seam := reference()) is not None:
                seam.remove()
        for flag in self._flags:
            if (module := flag()) is not None:
                module.gradient_checkpointing = True  # type: ignore[assignment]
        self._seams.clear()
        self._flags.clear()
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, model: nn.Module, regions: list[Region]) -> None:
        self._switch_off_own_checkpointing(model, regions)
        guard = self._guard
        tiled = self._tile_mlps(regions)
        self._tile_loss(model, guard)
        schedule = Schedule(self.store or HostStore())
        owned = OwnMemory(model)
        offloader = PerTensorOffloader(schedule, owned.holds)
        for region in regions:
            policy = _policy_of(self.policy, region)
            ledger = RegionLedger(region.name)
            self._ledgers.append((ledger, policy))
            if policy.is_none:
                continue
            where = schedule if policy.offload else None
            runtime = RegionRuntime(policy, ledger, where, offloader, guard, owned, owner=self)
            runtime.tiled = tiled.get(region.name, [])
            self._put(region.module, runtime)

    def _put(self, module: nn.Module, runtime: Runtime) -> None:
        seam = Seam(module, runtime)
        seam.install()
        self._seams.append(weakref.ref(seam))

    def _tile_mlps(self, regions: list[Region]) -> dict[str, list[TileLedger]]:
        """Before the regions' own seams: a region may be an MLP, and recomputes tiles then."""
        found: dict[str, list[TileLedger]] = collections.defaultdict(list)
        for region, name, module in find_mlps(regions):
            policy = self.policy.for_region(region.name, name)
            if "mlp" in policy.tile:
                ledger = TileLedger(name)
                found[region.name].append(ledger)
                self._tiles.append(ledger)
                self._put(module, TileRuntime(policy, ledger, owner=self))
        return found

    def _tile_loss(self, model: nn.Module, guard: Guard) -> None:
        if "loss" not in self.policy.tile:
            return
        name, module, owner = find_head(model)
        guard.loss = TileLedger(name)
        self._tiles.append(guard.loss)
        calls = OwnerRuntime(self)
        self._put(owner, calls)
        self._put(module, HeadRuntime(calls, guard.loss, self.policy.loss_tokens))

    def _switch_off_own_checkpointing(self, model: nn.Module, regions: list[Region]) -> None:
        """Else blocks would be recomputed twice, and those that the policy leaves alone once. Tiles do not mind it."""
        if not keeps_less(self.policy, regions):
            return
        for module in model.modules():
            if checkpoints_itself(module):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                self._flags.append(weakref.ref(module))


def _policy_of(policy: Policy, region: Region) -> Policy:
    chosen = policy.for_region(region.name)
    if chosen.recompute and region.index % chosen.every:
        return Policy()
    return chosen


def applied_to(model: nn.Module) -> list[Applied]:
    """The handles that act on the model or on parts of it."""
    owners: list[Applied] = []
    for module in model.modules():
        seam = module.__dict__.get("forward")
        while isinstance(seam, Seam):
            if seam.runtime is not None and seam.runtime.owner not in owners:
                owners.append(seam.runtime.owner)
            seam = seam.replaced
    return owners
