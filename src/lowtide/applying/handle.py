"""`apply` and its handle: per instance, idempotent, reversible."""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.applying.guard import Guard
from lowtide.applying.region_forward import RegionForward, RegionRuntime
from lowtide.applying.report import RegionReport, Report
from lowtide.checkpointing import Schedule
from lowtide.checkpointing.saving import OneByOne
from lowtide.errors import InvalidValueError, OffloadError
from lowtide.measure import RegionLedger
from lowtide.policy import Policy
from lowtide.regions import Region, find_regions
from lowtide.stores import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from lowtide.regions import Selector

logger = logging.getLogger(__name__)


def apply(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any] = "recompute+offload",
    *,
    regions: Sequence[Selector] | None = None,
    strict: bool = True,
) -> Applied:
    """Make `model` train under `policy`; the handle reports what happens and undoes it.

    Only instances of `model`'s blocks change. Applying the same policy again returns the same handle; another policy
    takes the place of the first. `regions` names the blocks (globs on module names, class names, classes); without it
    they are found. With `strict=False` a region that turns out to do nothing is a warning, not a `SilentNoOpError`.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"apply needs a torch.nn.Module, got {type(model).__name__}")
    wanted = Policy.parse(policy)
    found = find_regions(model, regions)
    previous = _applied_to(model)
    if len(previous) == 1 and previous[0].is_the_same(wanted, found, strict=strict):
        return previous[0]
    for handle in previous:
        handle.remove()
    _check_device(model, wanted, found)
    return Applied(model, wanted, found, strict=strict)


class Applied:
    """A policy in force on a model. Also a context manager: leaving it removes the policy."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        regions: list[Region],
        *,
        strict: bool,
    ) -> None:
        self.policy = policy
        self.strict = strict
        self.regions = regions
        self._store = HostStore(policy.host_limit) if _offloads(policy, regions) else None
        self._ledgers: list[tuple[RegionLedger, Policy]] = []
        self._forwards: list[RegionForward] = []
        self._flags: list[nn.Module] = []
        self._install(model)

    def is_the_same(self, policy: Policy, regions: list[Region], *, strict: bool) -> bool:
        """Whether applying this again would change nothing."""
        modules = [region.module for region in regions]
        mine = [region.module for region in self.regions]
        return (self.policy, self.strict) == (policy, strict) and modules == mine

    def report(self) -> Report:
        """What happened so far, per region."""
        return Report(
            policy=self.policy.describe(),
            regions=[RegionReport.of(ledger, str(policy)) for ledger, policy in self._ledgers],
            host_bytes=self._store.bytes_used if self._store else 0,
            peak_host_bytes=self._store.peak_bytes if self._store else 0,
            seconds_waited=self._store.seconds_waited if self._store else 0.0,
        )

    def remove(self) -> None:
        """Leave the model as it was. Doing it twice is fine."""
        for forward in self._forwards:
            forward.remove()
        for module in self._flags:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._forwards.clear()
        self._flags.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, model: nn.Module) -> None:
        self._switch_off_own_checkpointing(model)
        guard = Guard(strict=self.strict)
        schedule = Schedule(self._store or HostStore())
        skip = _belongs_to(model)
        conveyor = OneByOne(schedule, skip)
        for region in self.regions:
            policy = _policy_of(self.policy, region)
            ledger = RegionLedger(region.name)
            self._ledgers.append((ledger, policy))
            if policy.is_none:
                continue
            where = schedule if policy.offload else None
            runtime = RegionRuntime(policy, ledger, where, conveyor, guard, skip, owner=self)
            forward = RegionForward(region.module, runtime)
            forward.install()
            self._forwards.append(forward)

    def _switch_off_own_checkpointing(self, model: nn.Module) -> None:
        """Else every block would be recomputed twice."""
        if self.policy.is_none and not self.policy.overrides:
            return
        self._flags = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        for module in self._flags:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if self._flags:
            logger.warning(
                "the model's own gradient checkpointing is switched off while Lowtide's policy %s is in force",
                self.policy.describe(),
            )


def _policy_of(policy: Policy, region: Region) -> Policy:
    chosen = policy.for_region(region.name)
    if chosen.recompute and region.index % chosen.every:
        return Policy()
    return chosen


def _offloads(policy: Policy, regions: list[Region]) -> bool:
    return any(policy.for_region(region.name).offload for region in regions)


def _check_device(model: nn.Module, policy: Policy, regions: list[Region]) -> None:
    """Host offload frees nothing if there is no accelerator to offload from. The model may still be moved to one."""
    if not _offloads(policy, regions) or torch.accelerator.is_available():
        return
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        raise OffloadError(
            f"policy {policy.describe()!r} offloads to the host, and {type(model).__name__} is on the CPU with no "
            "accelerator here: its activations are in host memory already. Use 'recompute', or the disk tier"
        )


def _belongs_to(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """A test for tensors that are a parameter's or a buffer's memory: moving those would free nothing."""
    owners = weakref.ref(model)
    seen: dict[int, set[int]] = {}

    def addresses() -> set[int]:
        module = owners()
        if module is None:
            return set()
        first = next((parameter.data_ptr() for parameter in module.parameters()), 0)
        if first not in seen:  # the model is new, or was moved
            seen.clear()
            own = itertools.chain(module.parameters(), module.buffers())
            seen[first] = {tensor.untyped_storage().data_ptr() for tensor in own}
        return seen[first]

    return lambda tensor: tensor.untyped_storage().data_ptr() in addresses()


def _applied_to(model: nn.Module) -> list[Applied]:
    """The handles that act on the model or on parts of it."""
    owners: list[Applied] = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, RegionForward) and forward.runtime is not None and forward.runtime.owner not in owners:
            owners.append(forward.runtime.owner)
    return owners
