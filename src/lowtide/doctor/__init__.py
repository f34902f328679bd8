"""What is on this machine, and which known traps are set: the data behind `lowtide doctor`."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowtide.doctor.facts import Fact, gather_facts
from lowtide.doctor.hazards import Hazard, Severity, find_hazards

__all__ = ["Diagnosis", "Fact", "Hazard", "Severity", "examine"]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything `lowtide doctor` knows."""

    facts: list[Fact]
    hazards: list[Hazard]

    @property
    def ok(self) -> bool:
        """Whether Lowtide can work here: warnings do not count, errors do."""
        return all(hazard.severity is not Severity.ERROR for hazard in self.hazards)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


def examine() -> Diagnosis:
    """Look at this process and this machine. Nothing is imported, installed, compiled or changed."""
    return Diagnosis(facts=gather_facts(), hazards=find_hazards())
