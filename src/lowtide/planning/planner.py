"""`lowtide.plan`: simulates every uniform policy, lets the solver mix them, and confirms the winners exactly."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import margins_for, resolve_accelerator
from lowtide.planning.result import INAPPLICABLE, Candidate, Plan, judge
from lowtide.planning.solver import solve
from lowtide.planning.ways_out import Question, find_ways_out
from lowtide.policy import Policy
from lowtide.policy.rules import as_policy, joined
from lowtide.simulation.cache import PROCESSES, CachedSimulator, process_for
from lowtide.simulation.region_costs import region_policies
from lowtide.targets.job import LORA_TARGETS, REDUCE_BUCKET, make_job
from lowtide.targets.target import find_target
from lowtide.units import format_bytes, parse_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from lowtide.hardware.accelerators import Accelerator, Margins
    from lowtide.planning.solver import Choice
    from lowtide.simulation.estimate import Estimate
    from lowtide.targets.job import Job

    Progress = Callable[[str, int, int], None]
    """Called with what is being simulated, how many simulations are done, and how many there are."""

    OnCandidate = Callable[[Candidate], None]
    """Called with each policy as soon as its figures are known, from any thread."""

HEADROOM = 0.05
"""The share of the budget that recommended policies leave free: a plan misses by a few percent, and runs vary."""

_WITHIN = 1.05
"""A simpler policy is recommended if it takes at most this many times as long as the fastest."""

_ROUNDS = 5
"""The most choices of the solver that are simulated."""


def plan(
    model: nn.Module | str | Path | Any,
    *,
    tokens: int | str | None = None,
    batch: Any = None,
    policy: Policy | str | Mapping[str, Any] | None = None,
    batch_size: int = 1,
    images: tuple[int, int, int] | str | None = None,
    device: str | Accelerator | None = None,
    ranks: int | None = None,
    engine: str | None = None,
    tp: int = 1,
    sp: int = 1,
    cp: int = 1,
    pp: int = 1,
    microbatches: int | None = None,
    lora: int | None = None,
    lora_targets: Sequence[str] = LORA_TARGETS,
    lora_dtype: str = "fp32",
    lora_dropout: float = 0.0,
    base: str = "plain",
    double_quant: bool = False,
    kbit: bool = False,
    dtype: str | None = None,
    masters: bool = False,
    optimizer: str = "adamw",
    optimizer_in_backward: bool = False,
    attention: str = "auto",
    trainer: str | None = None,
    keep_output: bool = False,
    keep_gradients: bool = False,
    expandable_segments: bool = False,
    reduce_dtype: str | None = None,
    units: str = "blocks",
    reshard: bool = True,
    reduce_bucket: int = REDUCE_BUCKET,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    calibration: Path | str | None = None,
    headroom: float | str = HEADROOM,
    exact: bool = False,
    suggest: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
    on_candidate: OnCandidate | None = None,
) -> Plan:
    """Find out whether a training step fits, and which policies are the best that fit. No accelerator is needed.

    `model` is a module, a transformers configuration, the path of a `config.json` or its folder, one of the known names
    (`"Qwen3-8B"`), a name on the Hub (`"org/model"`), a model type, or `"MODULE:FACTORY"`. `tokens` is the length of
    each of `batch_size` sequences. A module that is not from transformers needs a `batch`, the arguments of its
    forward, which returns the loss; a factory may return both. A module is planned as it is; `dtype` (bf16 by default),
    `lora` and `base` are for models that are built here.

    `device` is an accelerator's name (by default, this machine's), `budget` the device memory to use, and `host_budget`
    the host memory for each rank (by default, twice the device's). With `policy`, only that one is simulated. `exact`
    simulates every layer instead of extrapolating from a few.

    `best` of the plan is the simplest policy within 5 % of the `fastest`. Both leave the share `headroom` of the budget
    free (`0.05` or `"5%"`), unless nothing does. With `suggest`, a plan in which nothing fits says what would.

    `trainer="trl"` plans a step of TRL's SFTTrainer, whose own head makes no logits, so that no policy tiles the loss.

    `tp`, `sp`, `cp` and `pp` say how many ranks share one batch, and in which way; `engine` joins the other `ranks`,
    which are all there are. A batch is what such a group of ranks gets, and with `pp` a microbatch.

    One real training step runs through the real engine in a separate process, on tensors that have shapes and no
    memory, and every allocation is counted.
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
        lora_dropout=lora_dropout,
        base=base,
        double_quant=double_quant,
        kbit=kbit,
        optimizer=optimizer,
        optimizer_in_backward=optimizer_in_backward,
        engine=engine,
        ranks=ranks,
        tp=tp,
        sp=sp,
        cp=cp,
        pp=pp,
        microbatches=microbatches,
        attention=attention,
        trainer=trainer,
        keep_output=keep_output,
        keep_gradients=keep_gradients,
        expandable_segments=expandable_segments,
        reduce_dtype=reduce_dtype,
        units=units,
        reshard=reshard,
        reduce_bucket=reduce_bucket,
    )
    accelerator = resolve_accelerator(device, calibration)
    budgets = accelerator.budgets(budget, host_budget)
    chosen = None if policy is None else _parse_policy(policy)
    with CachedSimulator(target, job, accelerator, enabled=cache) as simulator:
        limits = _Limits(*budgets, margins_for(accelerator, job.ranks), parse_share(headroom))
        planner = _Planner(simulator, job, accelerator, limits, exact=exact, progress=progress, tell=on_candidate)
        found = planner.plan_one(chosen) if chosen is not None else planner.plan_all()
        return planner.with_ways_out(found, chosen) if suggest and not found.fits else found


plan.__module__ = "lowtide"


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What a policy may take."""

    device: int
    host: int
    margins: Margins
    headroom: float

    @property
    def usable(self) -> int:
        """Return the device bytes that a recommended policy may take."""
        return int(self.device * (1 - self.headroom))

    def judge(self, estimate: Estimate) -> Candidate:
        return judge(estimate, self.device, self.host, self.margins, self.headroom)


class _Planner:
    """Makes one plan from a simulator's figures."""

    def __init__(
        self,
        simulator: CachedSimulator,
        job: Job,
        accelerator: Accelerator,
        limits: _Limits,
        *,
        exact: bool,
        progress: Progress | None,
        tell: OnCandidate | None,
    ) -> None:
        self._simulator = simulator
        self._job = job
        self._accelerator = accelerator
        self._limits = limits
        self._exact = exact
        self._progress = progress or (lambda *_: None)
        self._tell = tell or (lambda _: None)
        self._done, self._total = 0, 1
        self._inapplicable: dict[str, str] = {}
        self._idle_tiles: list[str] = []

    def plan_one(self, policy: str) -> Plan:
        """Judge this policy alone; not at all if there is no room for the weights."""
        if not self._has_room_for_weights():
            return self._plan([], best=None, fastest=None)
        self._report(policy)
        candidate = self._judge(policy, exact=True)
        chosen = candidate if candidate.fits else None
        return self._plan([candidate], best=chosen, fastest=chosen)

    def plan_all(self) -> Plan:
        """Judge every uniform policy, and the best mixtures of them; none if there is no room for the weights."""
        if not self._has_room_for_weights():
            return self._plan([], best=None, fastest=None)
        summary = self._simulator.summary
        self._total = sum(len(region_policies(tile)) + 1 for tile in summary.tile_options) + 1
        uniform = self._uniform()
        mixed = list(self._mixtures(uniform))
        good = ("fits",) if any(candidate.verdict == "fits" for candidate in (*uniform, *mixed)) else ("tight",)
        candidates = [*uniform, *(candidate for candidate in mixed if candidate.verdict in good)]
        fastest = self._fastest(candidates)
        return self._plan(candidates, best=fastest and self._simplest(candidates, fastest), fastest=fastest)

    def _has_room_for_weights(self) -> bool:
        return self._simulator.summary.resident_bytes + self._limits.margins.total <= self._limits.device

    def with_ways_out(self, plan: Plan, policy: str | None) -> Plan:
        """Return a plan in which nothing fits with the changes that would help, or a note that none does."""
        limits = self._limits
        policy = policy or joined("recompute+offload", self._simulator.summary.tile_options[-1])
        known = next((c.estimate for c in plan.candidates if c.policy == policy), None)
        question = Question(
            self._simulator, self._job, self._accelerator, policy, limits.device, limits.host, limits.headroom, known
        )
        ways, none_helps = find_ways_out(question, self._report)
        return dataclasses.replace(plan, ways_out=ways, notes=[*([none_helps] if none_helps else []), *plan.notes])

    def _uniform(self) -> list[Candidate]:
        """Judge every region policy with every tile option, in all processes at once."""
        options = self._simulator.summary.tile_options
        shares = [[tile for tile in options if process_for(tile) == number] for number in range(PROCESSES)]
        pool = concurrent.futures.ThreadPoolExecutor(PROCESSES)
        try:
            results = [pool.submit(self._judge_applicable, share) for share in shares]
            return [candidate for result in results for candidate in result.result()]
        except BaseException:
            self._simulator.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _mixtures(self, uniform: list[Candidate]) -> Iterator[Candidate]:
        """Yield the solver's choice for each tile option, the most promising first.

        A choice that turns out to need more than the solver thought is solved again with a smaller budget; one that
        does not promise to be faster than what is known to fit is not simulated at all.
        """
        fastest = min((c.estimate.seconds for c in uniform if c.verdict == "fits"), default=math.inf)
        fragmentation = max(c.estimate.needed_bytes - c.estimate.peak_bytes for c in uniform)
        usable = self._limits.usable
        budgets = dict.fromkeys(self._mixable_tile_options(), usable - self._limits.margins.total - fragmentation)
        choices: dict[str, Choice | None] = {}
        for tile in budgets:
            self._report(f"mixing policies{f' with {tile}' if tile else ''}")
            choices[tile] = self._choose(tile, budgets[tile])
        for _ in range(_ROUNDS):
            promising = {tile: choice for tile, choice in choices.items() if choice and choice.seconds < fastest}
            if not promising:
                return
            tile = min(promising, key=lambda tile: promising[tile].seconds)
            candidate = self._judge(str(as_policy(promising[tile].region_policies, tile)), exact=True)
            yield candidate
            if candidate.verdict == "fits":
                choices[tile] = None
                fastest = min(fastest, candidate.estimate.seconds)
            else:
                budgets[tile] -= max(candidate.device_bytes - usable, usable // 200)
                choices[tile] = self._choose(tile, budgets[tile])

    def _mixable_tile_options(self) -> list[str]:
        """Return the tile options that apply, so that there is something to choose from."""
        return [tile for tile in self._simulator.summary.tile_options if self._region_policies(tile)]

    def _region_policies(self, tile: str) -> tuple[str, ...]:
        """Return the region policies that apply with a tile option: attention is only kept where there is some."""
        return tuple(policy for policy in region_policies(tile) if joined(policy, tile) not in self._inapplicable)

    def _choose(self, tile: str, budget: int) -> Choice | None:
        """Return the solver's choice; None if there is none, or if it is one policy for all, which is known already."""
        costs = self._simulator.costs(tile, self._region_policies(tile))
        choice = solve(costs, budget, self._limits.host, self._accelerator.link_rate)
        return choice if choice and len(set(choice.region_policies.values())) > 1 else None

    def _fastest(self, candidates: list[Candidate]) -> Candidate | None:
        """Return the fastest that leaves the headroom, or if none does the fastest that fits, with all layers."""
        by_seconds = sorted(range(len(candidates)), key=lambda place: candidates[place].estimate.seconds)
        for good in (("fits",), ("fits", "tight")):
            for place in by_seconds:
                if candidates[place].verdict in good and self._confirmed(candidates, place).verdict in good:
                    return candidates[place]
        return None

    def _simplest(self, candidates: list[Candidate], fastest: Candidate) -> Candidate:
        """Return the simplest that fits as well as the fastest, and takes hardly longer."""

        def is_good(candidate: Candidate) -> bool:
            return candidate.verdict == fastest.verdict and candidate.estimate.seconds <= most

        most = fastest.estimate.seconds * _WITHIN
        by_words = sorted(range(len(candidates)), key=lambda place: _complexity(candidates[place]))
        return next(
            candidates[place]
            for place in by_words
            if is_good(candidates[place]) and is_good(self._confirmed(candidates, place))
        )

    def _confirmed(self, candidates: list[Candidate], place: int) -> Candidate:
        """Simulate every layer of a candidate, which may turn out too large."""
        if not candidates[place].estimate.exact:
            self._report(f"simulating every layer of {candidates[place].policy}")
            candidates[place] = self._judge(candidates[place].policy, exact=True)
        return candidates[place]

    def _judge_applicable(self, tiles: list[str]) -> list[Candidate]:
        """Judge the policies with these tile options that apply to this model; why the rest do not is for a note."""
        found = []
        for tile in tiles:
            for policy in (joined(policy, tile) for policy in region_policies(tile)):
                if tile in self._idle_tiles:
                    self._inapplicable[policy] = ""
                    continue
                self._report(policy)
                try:
                    candidate = self._judge(policy, exact=self._exact)
                except INAPPLICABLE as error:
                    self._inapplicable[policy] = str(error).splitlines()[0].partition(". ")[0]
                    continue
                if candidate.estimate.runs_whole:
                    self._idle_tiles.append(tile)
                    self._inapplicable[policy] = ""
                    continue
                found.append(candidate)
                self._tell(candidate)
        return found

    def _judge(self, policy: str, *, exact: bool) -> Candidate:
        return self._limits.judge(self._simulator.estimate(policy, exact=exact))

    def _report(self, what: str) -> None:
        self._progress(what, min(self._done, self._total - 1), self._total)
        self._done += 1

    def _plan(self, candidates: list[Candidate], *, best: Candidate | None, fastest: Candidate | None) -> Plan:
        return Plan(
            summary=self._simulator.summary,
            job=self._job,
            accelerator=self._accelerator,
            margins=self._limits.margins,
            budget=self._limits.device,
            host_budget=self._limits.host,
            headroom=self._limits.headroom,
            candidates=sorted(candidates, key=lambda candidate: candidate.estimate.seconds),
            best=best,
            fastest=fastest,
            notes=self._notes(candidates),
        )

    def _notes(self, candidates: list[Candidate]) -> list[str]:
        notes = []
        if any(candidate.estimate.host_bytes > self._limits.host for candidate in candidates):
            notes.append(
                f"offload may take {format_bytes(self._limits.host)} of host memory per rank: set host_budget "
                "(--host-budget) to what this machine has"
            )
        for tile in sorted(self._idle_tiles):
            less = "as tile(loss)" if "loss" in Policy.parse(tile).tile else "as no tiles"
            notes.append(f"{tile} is left out: no call is long enough to be cut, so it does the same {less}")
        for reason in filter(None, dict.fromkeys(self._inapplicable.values())):
            policies = [policy for policy, why in self._inapplicable.items() if why == reason]
            notes.append(f"not applicable here, and left out: {', '.join(policies)} ({reason})")
        summary = self._simulator.summary
        whole = "tile" if self._job.trainer is None else "tile(attention, mlp)"
        if len(candidates) > 1 and whole not in summary.tile_options:
            notes.append(
                f"not all of {summary.model_class} can be tiled: its calls of attention cannot be seen, its MLPs are "
                "not separate modules, or it does not compute its loss from labels as transformers' models do"
            )
        if summary.unquantized_bytes:
            notes.append(
                f"{format_bytes(summary.unquantized_bytes)} of experts' weights are not in 4 bits: transformers 5 "
                "stacks them into parameters of three dimensions, and bitsandbytes quantizes linear layers alone"
            )
        notes += _left_alone(candidates)
        if self._simulator.warning:
            notes.append(self._simulator.warning)
        if too_long := summary.too_long(self._job.tokens):
            notes.append(too_long)
        if not self._accelerator.is_measured:
            notes.append(
                "seconds are estimated from data sheets, so the ranking is the claim: `lowtide calibrate` measures them"
            )
        return notes


def _complexity(candidate: Candidate) -> tuple[int, int, float]:
    """Order policies by how many rules they have, then by how many words, then by their speed."""
    policy = Policy.parse(candidate.policy)
    words = re.findall(r"\w+", candidate.policy.partition(";")[0])
    return len(policy.overrides), len(words), candidate.estimate.seconds


def _left_alone(candidates: list[Candidate]) -> list[str]:
    """Return notes about blocks that policies with `tile` leave alone, a note for each reason."""
    reasons: dict[str, list[str]] = {}
    for candidate in candidates:
        for reason, names in candidate.estimate.left_alone.items():
            reasons.setdefault(reason, names)
    return [
        f"tile leaves {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} alone: {reason}"
        for reason, names in reasons.items()
    ]


def _parse_policy(policy: Policy | str | Mapping[str, Any]) -> str:
    parsed = Policy.parse(policy)
    if any("disk" in (chosen.offload or "") for chosen in (parsed, *(rule for _, rule in parsed.overrides))):
        raise InvalidValueError(
            f"{parsed} offloads to disk, and a plan has no clock for disks: plan it with offload to the host, which "
            "takes the same device memory"
        )
    return str(parsed)
