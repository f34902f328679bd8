"""`lowtide.plan`: looks at every uniform policy, lets the solver mix them, and simulates the winner whole."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import (
    Accelerator,
    Efficiencies,
    calibrated,
    find_accelerator,
    margins_for,
    this_accelerator,
)
from lowtide.planning.result import INAPPLICABLE, Candidate, Plan, judged
from lowtide.planning.solver import solve
from lowtide.policy import Policy
from lowtide.policy.rules import as_policy, joined
from lowtide.simulation.cache import LANES, CachedSimulator, lane_of
from lowtide.simulation.region_costs import REGION_POLICIES
from lowtide.targets.job import LORA_TARGETS, Job
from lowtide.targets.target import find_target
from lowtide.units import format_bytes, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from lowtide.planning.solver import Choice

    Progress = Callable[[str, int, int], None]
    """Told what is being looked at, how many looks are done, and how many there are."""

_ROUNDS = 5
"""How many of the solver's choices are simulated, at most."""


def plan(
    model: nn.Module | str | Path | Any,
    *,
    tokens: int | str | None = None,
    batch: Any = None,
    policy: Policy | str | Mapping[str, Any] | None = None,
    batch_size: int = 1,
    images: tuple[int, int, int] | str | None = None,
    device: str | Accelerator | None = None,
    ranks: int = 1,
    engine: str | None = None,
    lora: int | None = None,
    lora_targets: Sequence[str] = LORA_TARGETS,
    lora_dtype: str = "fp32",
    base: str = "plain",
    dtype: str | None = None,
    masters: bool = False,
    optimizer: str = "adamw",
    attention: str = "auto",
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    calibration: Path | str | None = None,
    exact: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Will a training step fit, and which policy is the fastest that does? No accelerator is needed.

    `model` is a module, a transformers configuration, the path of a `config.json` or its folder, one of the known names
    (`"Qwen3-8B"`), a name of the Hub (`"org/model"`), a model type, or `"MODULE:FACTORY"`. `tokens` is the length of
    each of `batch_size` sequences. A module that is not transformers' comes with a `batch`, the arguments of its
    forward, which returns the loss; a factory may return both. A module is planned as it is; `dtype` (if it is not
    given, bf16), `lora` and `base` are for models that are built here.

    `device` is an accelerator's name (without it, the one that is here), `budget` the memory to use of it, and
    `host_budget` the host's for each rank (if it is not given, twice the device's). With `policy` only that one is
    simulated. `exact` simulates every layer instead of carrying on from a few.

    One real training step runs through the real engine in a process of its own, on tensors that have shapes and no
    memory; every allocation is counted.
    """
    target = find_target(model, batch)
    job = make_job(
        tokens=tokens,
        batch_size=batch_size,
        images=images,
        dtype=dtype,
        masters=masters,
        lora=lora,
        lora_targets=(lora_targets,) if isinstance(lora_targets, str) else tuple(lora_targets),
        lora_dtype=lora_dtype,
        base=base,
        optimizer=optimizer,
        engine=engine,
        ranks=ranks,
        attention=attention,
    )
    accelerator = wanted_accelerator(device, calibration)
    budgets = accelerator.budgets(budget, host_budget)
    wanted = None if policy is None else _planned_policy(policy)
    with CachedSimulator(target, job, accelerator, enabled=cache) as simulator:
        planner = _Planner(simulator, job, accelerator, *budgets, exact=exact, progress=progress)
        return planner.one(wanted) if wanted is not None else planner.all()


plan.__module__ = "lowtide"


class _Planner:
    """Makes one plan."""

    def __init__(
        self,
        simulator: CachedSimulator,
        job: Job,
        accelerator: Accelerator,
        budget: int,
        host_budget: int,
        *,
        exact: bool,
        progress: Progress | None,
    ) -> None:
        self._studio = simulator
        self._job = job
        self._accelerator = accelerator
        self._budget = budget
        self._host_budget = host_budget
        self._exact = exact
        self._progress = progress or (lambda *_: None)
        self._margins = margins_for(job, accelerator)
        self._done, self._total = 0, 1
        self._inapplicable: dict[str, str] = {}

    def one(self, policy: str) -> Plan:
        """Just this policy."""
        self._tell(policy)
        candidate = self._judge(policy, exact=True)
        return self._plan([candidate], candidate if candidate.fits else None)

    def all(self) -> Plan:
        """Every uniform policy, and the best mixture of them."""
        self._total = (len(REGION_POLICIES) + 1) * len(self._studio.summary.tile_options) + 1
        uniform = self._uniform()
        mixed = list(self._mixtures(uniform))
        candidates = [*uniform, *(candidate for candidate in mixed if candidate.fits)]
        best = self._confirmed(candidates)
        return self._plan(candidates, best)

    def _uniform(self) -> list[Candidate]:
        """Every treatment with every tiling that applies, in as many processes as there are lanes."""
        policies = [
            joined(treatment, tile) for tile in self._studio.summary.tile_options for treatment in REGION_POLICIES
        ]
        lanes = [[policy for policy in policies if lane_of(policy) == lane] for lane in range(LANES)]
        pool = concurrent.futures.ThreadPoolExecutor(LANES)
        try:
            looks = [pool.submit(self._look, names) for names in lanes]
            return [candidate for look in looks for candidate in look.result()]
        except BaseException:
            self._studio.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _mixtures(self, uniform: list[Candidate]) -> Iterator[Candidate]:
        """What the solver makes of each tiling: the one that promises most is simulated first.

        One that turns out to need more than the solver thought is solved again for less; one that does not promise to
        be faster than what is known to fit is not simulated at all.
        """
        fastest = min((c.estimate.seconds for c in uniform if c.fits), default=math.inf)
        loose = max(c.estimate.needed_bytes - c.estimate.peak_bytes for c in uniform)
        budgets = dict.fromkeys(self._mixable(), self._budget - self._margins.total - loose)
        choices: dict[str, Choice | None] = {}
        for tile in budgets:
            self._tell(f"mixing policies{f' with {tile}' if tile else ''}")
            choices[tile] = self._choose(tile, budgets[tile])
        for _ in range(_ROUNDS):
            promising = {tile: choice for tile, choice in choices.items() if choice and choice.seconds < fastest}
            if not promising:
                return
            tile = min(promising, key=lambda tile: promising[tile].seconds)
            candidate = self._judge(str(as_policy(promising[tile].treatments, tile)), exact=True)
            yield candidate
            if candidate.fits:
                choices[tile] = None
                fastest = min(fastest, candidate.estimate.seconds)
            else:
                budgets[tile] -= max(candidate.device_bytes - self._budget, self._budget // 200)
                choices[tile] = self._choose(tile, budgets[tile])

    def _mixable(self) -> list[str]:
        """Tilings with which every treatment applies: the solver needs the costs of all."""
        return [
            tile
            for tile in self._studio.summary.tile_options
            if not any(joined(treatment, tile) in self._inapplicable for treatment in REGION_POLICIES)
        ]

    def _choose(self, tile: str, budget: int) -> Choice | None:
        """The solver's choice; None if there is none, or if it is one treatment for all, which is known already."""
        costs = self._studio.costs(tile)
        choice = solve(costs, budget, self._host_budget, self._accelerator.link_rate)
        return choice if choice and len(set(choice.treatments.values())) > 1 else None

    def _confirmed(self, candidates: list[Candidate]) -> Candidate | None:
        """The fastest that fits, simulated whole; one that turns out too large makes place for the next."""
        for place in sorted(range(len(candidates)), key=lambda place: candidates[place].estimate.seconds):
            candidate = candidates[place]
            if candidate.fits and not candidate.estimate.exact:
                self._tell(f"simulating {candidate.policy} whole")
                candidates[place] = candidate = self._judge(candidate.policy, exact=True)
            if candidate.fits:
                return candidate
        return None

    def _look(self, policies: list[str]) -> list[Candidate]:
        """Those of them that apply to this model; the reasons of the others are kept for a note."""
        found = []
        for policy in policies:
            self._tell(policy)
            try:
                found.append(self._judge(policy, exact=self._exact))
            except INAPPLICABLE as error:
                self._inapplicable[policy] = str(error).splitlines()[0].partition(". ")[0]
        return found

    def _judge(self, policy: str, *, exact: bool) -> Candidate:
        estimate = self._studio.estimate(policy, exact=exact)
        return judged(estimate, self._budget, self._host_budget, self._margins)

    def _tell(self, what: str) -> None:
        self._progress(what, min(self._done, self._total - 1), self._total)
        self._done += 1

    def _plan(self, candidates: list[Candidate], best: Candidate | None) -> Plan:
        return Plan(
            summary=self._studio.summary,
            job=self._job,
            accelerator=self._accelerator,
            margins=self._margins,
            budget=self._budget,
            host_budget=self._host_budget,
            candidates=sorted(candidates, key=lambda candidate: candidate.estimate.seconds),
            best=best,
            notes=self._notes(candidates),
        )

    def _notes(self, candidates: list[Candidate]) -> list[str]:
        notes = []
        if any(candidate.estimate.host_bytes > self._host_budget for candidate in candidates):
            notes.append(
                f"offload may take {format_bytes(self._host_budget)} of host memory per rank: say with host_budget "
                "(--host-budget) what there is"
            )
        if self._inapplicable:
            notes.append(
                f"not applicable here, and left out: {', '.join(self._inapplicable)} "
                f"({next(iter(self._inapplicable.values()))})"
            )
        summary = self._studio.summary
        if len(candidates) > 1 and "tile" not in summary.tile_options:
            notes.append(
                f"not all of {summary.model_class} can be tiled: it has no MLPs as modules of their own, or makes its "
                "loss otherwise than transformers' models do of labels"
            )
        if self._studio.trouble:
            notes.append(self._studio.trouble)
        if too_long := summary.too_long(self._job.tokens):
            notes.append(too_long)
        if self._accelerator.efficiencies == Efficiencies():
            notes.append(
                "seconds are estimated from data sheets: the ranking is the claim. `lowtide calibrate` measures"
            )
        return notes


def _planned_policy(policy: Policy | str | Mapping[str, Any]) -> str:
    parsed = Policy.parse(policy)
    if any("disk" in (chosen.offload or "") for chosen in (parsed, *(rule for _, rule in parsed.overrides))):
        raise InvalidValueError(
            f"{parsed} offloads to the disk, which a plan has no clock for: plan it with offload to the host, which "
            "takes the same memory of the device"
        )
    return str(parsed)


def make_job(
    *,
    tokens: int | str | None,
    images: tuple[int, int, int] | str | None,
    engine: str | None,
    ranks: int,
    **settings: Any,
) -> Job:
    """A job from what people write."""
    return Job(
        tokens=None if tokens is None else parse_tokens(tokens),
        images=parse_images(images),
        engine=engine or ("ddp" if ranks > 1 else "single"),
        ranks=ranks,
        **settings,
    )


def parse_images(images: tuple[int, int, int] | str | None) -> tuple[int, int, int] | None:
    """`"4x1024x1024"`: four pictures of 1024 by 1024 pixels in each sequence."""
    if images is None or not isinstance(images, str):
        return images
    with contextlib.suppress(ValueError):
        count, height, width = (int(part) for part in images.lower().split("x"))
        if min(count, height, width) > 0:
            return count, height, width
    raise InvalidValueError(f"{images!r} are no pictures: write COUNTxHEIGHTxWIDTH, like 4x1024x1024")


def wanted_accelerator(device: str | Accelerator | None, calibration: Path | str | None) -> Accelerator:
    """The one that is named, or the one that is here."""
    if isinstance(device, str):
        return find_accelerator(device, calibration)
    found = this_accelerator() if device is None else device
    return found if calibration is None else calibrated(found, calibration)
