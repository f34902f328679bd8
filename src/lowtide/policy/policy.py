"""The policy itself: its settings, which of them go together, and how it is written as a string."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.errors import InvalidValueError
from lowtide.policy.mapping import read_mapping
from lowtide.policy.pattern import check_pattern, matches
from lowtide.policy.text import KEPT, PARTS, PLACES, check_kept, read_text
from lowtide.spelling import unknown
from lowtide.units import format_bytes

_LEAST_LIMIT = 4096
"""The store takes no smaller tensor, so a smaller limit can only be a size without its unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What should happen to a region's activations."""

    __module__ = "lowtide"

    recompute: bool = False
    every: int = 1
    """Recompute every n-th region of a stack, starting with the first; those between are left alone."""
    keep: tuple[str, ...] = ()
    """What is kept instead of recomputed: the outputs of `"attention"`, of `"matmul"`, or of operators by name."""
    offload: str | None = None
    """`"host"`: pinned memory. `"disk"`: a file. None: the device."""
    host_limit: int | None = None
    """The most bytes of pinned memory; past it, tensors go to `disk`, or stay and the report says so."""
    disk: str | None = None
    """The directory of the disk tier; beside `"host"`, it takes what is beyond `host_limit`."""
    disk_limit: int | None = None
    """The most bytes on disk for this process. None: its share of what is free."""
    verify: bool = False
    """Whether everything that is read from disk is compared with a checksum."""
    tmpfs: bool = False
    """Whether `disk` may be a directory in memory."""
    tile: tuple[str, ...] = ()
    """What runs in tiles: `"attention"` (whole blocks), `"mlp"` (mixtures of experts too), `"loss"`."""
    tile_tokens: int | None = None
    """Tokens of an MLP's tile. None: from bytes."""
    tile_shards: int | None = None
    """The number of an MLP's tiles, instead of their size."""
    loss_tokens: int | None = None
    """Tokens of the loss's tile. None: from bytes."""
    overrides: tuple[tuple[str, Policy], ...] = ()
    """Pairs of a glob on the region's module name and the policy for it; the last that matches wins."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.every < 1:
            raise InvalidValueError(f"every must be 1 or more, got {self.every}")
        if self.every > 1 and not self.recompute:
            raise InvalidValueError("every says which regions are recomputed, so it needs recompute")
        self._check_keep()
        self._check_store()
        self._check_rules()
        self._check_tiles()

    def _check_kinds(self) -> None:
        """Refuse values of the wrong type: the string "false" would count as true, and "2" would fail much later."""
        for name in ("recompute", "verify", "tmpfs"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("every", "host_limit", "disk_limit", "tile_tokens", "tile_shards", "loss_tokens"):
            value = getattr(self, name)
            is_unset = value is None and name != "every"
            if type(value) is not int and not is_unset:
                raise InvalidValueError(f"{name} must be a whole number, got {value!r}")

    def _check_keep(self) -> None:
        if not isinstance(self.keep, tuple) or not all(isinstance(word, str) for word in self.keep):
            raise InvalidValueError(f"keep must be a tuple of names, like ('attention', 'matmul'), got {self.keep!r}")
        if self.keep and not self.recompute:
            raise InvalidValueError("keep says what is not recomputed, so it needs recompute")
        check_kept(self.keep)
        ordered = (*(word for word in KEPT if word in self.keep), *(word for word in self.keep if word not in KEPT))
        object.__setattr__(self, "keep", tuple(dict.fromkeys(ordered)))  # in one order

    def _check_store(self) -> None:
        if self.offload not in (None, *PLACES):
            raise InvalidValueError(unknown(self.offload, PLACES, "place to offload to"))
        if self.host_limit is not None and self.offload != "host":
            raise InvalidValueError("host_limit needs offload to the host")
        self._check_limits()
        if self.disk is None:
            for name in ("disk_limit", "verify", "tmpfs"):
                if getattr(self, name):
                    raise InvalidValueError(f"{name} is a setting of the disk tier, and needs disk=/a/directory")
            return
        if self.offload is None or not self.disk or any(character in self.disk for character in ",;()"):
            raise InvalidValueError(
                f"disk={self.disk!r} needs offload, and a directory whose name has no comma, semicolon or bracket"
            )
        if self.offload == "host" and self.host_limit is None:
            raise InvalidValueError(
                "offload to the host without a limit never reaches the disk: write offload(host=8GiB, disk=...), or "
                "offload(disk=...)"
            )

    def _check_limits(self) -> None:
        for name in ("host_limit", "disk_limit"):
            limit = getattr(self, name) or 0
            if limit < 0:
                raise InvalidValueError(f"{name} must not be negative, got {limit}")
            if 0 < limit < _LEAST_LIMIT:
                raise InvalidValueError(f"{name} is {limit} bytes: write a size with its unit, like 8GiB")

    def _check_rules(self) -> None:
        """Refuse settings in rules that hold for the whole model: it has one store."""
        for pattern, policy in self.overrides:
            check_pattern(pattern)
            if policy.overrides:
                raise InvalidValueError(f"the rule {pattern!r} has rules of its own: put all rules side by side")
            if policy.host_limit is not None:
                raise InvalidValueError("the limit on host memory holds for the whole model: put it before the rules")
            if policy.disk is not None:
                raise InvalidValueError("the disk tier is one for the whole model: put its directory before the rules")
            if "disk" in (policy.offload, self.offload) and policy.offload not in (None, self.offload):
                raise InvalidValueError(
                    f"the rule {pattern!r} offloads to the {policy.offload}, and what stands before the rules does "
                    "not: the model's store is chosen there, like 'recompute+offload(disk=/s); *.0: offload(disk)'"
                )

    def _check_tiles(self) -> None:
        for part in self.tile:
            if part not in PARTS:
                raise InvalidValueError(unknown(part, PARTS, "part to tile"))
        object.__setattr__(self, "tile", tuple(part for part in PARTS if part in self.tile))  # in one order
        if any("loss" in policy.tile for _, policy in self.overrides):
            raise InvalidValueError("a model has one loss: put tile(loss) before the rules")
        if self.tile_tokens is not None and self.tile_shards is not None:
            raise InvalidValueError("tokens and shards both say how an MLP is cut: give one of them")
        for parts, names in ((("mlp", "attention"), ("tile_tokens", "tile_shards")), (("loss",), ("loss_tokens",))):
            for name in names:
                size = getattr(self, name)
                if size is not None and (size < 1 or not set(parts) & set(self.tile)):
                    needed = " or ".join(f"tile({part})" for part in parts)
                    raise InvalidValueError(f"{name} must be 1 or more and needs {needed}, got {size}")

    @classmethod
    def parse(cls, policy: Policy | str | Mapping[str, Any]) -> Policy:
        """Read a policy from any of its forms."""
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, str):
            return cls._from_fields(read_text(policy))
        if isinstance(policy, Mapping):
            return cls._from_fields(read_mapping(policy, [field.name for field in dataclasses.fields(cls)]))
        raise InvalidValueError(f"a policy is a string, a dict or a Policy, not {type(policy).__name__}")

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Policy:
        """Make a policy from fields whose rules may be in any form, too."""
        rules = fields.pop("overrides", ())
        return cls(**fields, overrides=tuple((pattern, cls.parse(rule)) for pattern, rule in rules))

    def for_region(self, *names: str) -> Policy:
        """Return the policy, without rules, for a region of this name; a part of a region goes by both their names."""
        chosen = dataclasses.replace(self, overrides=())
        for pattern, policy in self.overrides:
            if any(matches(pattern, name) for name in names):
                chosen = policy
        return chosen

    @property
    def tiles_what_it_can(self) -> bool:
        """Whether a block whose attention cannot be tiled may run its MLP in tiles instead, as plain `tile` says."""
        return {"attention", "mlp"} <= set(self.tile)

    @property
    def is_none(self) -> bool:
        return not self.recompute and self.offload is None and not self.tile

    def __str__(self) -> str:
        return self._text(str)

    def describe(self) -> str:
        """Return the string form with sizes for people: `8 GiB` instead of a number of bytes."""
        return self._text(format_bytes)

    def _text(self, size: Callable[[int], str]) -> str:
        terms = []
        if self.recompute:
            settings = [] if self.every == 1 else [f"every={self.every}"]
            settings += [f"keep={_kept_text(self.keep)}"] if self.keep else []
            terms.append(f"recompute({', '.join(settings)})" if settings else "recompute")
        if self.offload:
            settings = self._store_settings(size)
            terms.append(f"offload({', '.join(settings)})" if settings else "offload")
        if self.tile:
            sizes = [("tokens", self.tile_tokens), ("shards", self.tile_shards), ("loss_tokens", self.loss_tokens)]
            settings = [*self.tile, *(f"{name}={count}" for name, count in sizes if count is not None)]
            terms.append("tile" if settings == list(PARTS) else f"tile({', '.join(settings)})")
        rules = [f"{pattern}: {policy._text(size)}" for pattern, policy in self.overrides]
        return "; ".join(["+".join(terms) or "none", *rules])

    def _store_settings(self, size: Callable[[int], str]) -> list[str]:
        settings = [] if self.host_limit is None else [f"host={size(self.host_limit)}"]
        if self.disk is not None:
            settings.append(f"disk={self.disk}")
        elif self.offload == "disk":
            settings.append("disk")
        if self.disk_limit is not None:
            settings.append(f"limit={size(self.disk_limit)}")
        return [*settings, *(name for name in ("verify", "tmpfs") if getattr(self, name))]


def _kept_text(keep: tuple[str, ...]) -> str:
    return "+".join(keep) if all(word in KEPT for word in keep) else f"[{', '.join(keep)}]"
