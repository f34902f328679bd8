"""The public names as a user's type checker sees them. `make lint` checks this file; nothing runs it.

`assert_type` states what a call gives. A wrong use stands with the error that it must be: an ignore that ignores
nothing is an error itself, so a use that stops being refused turns `make lint` red.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from torch import Tensor, nn

import lowtide
from lowtide import simdevice
from lowtide.applying.report import Report
from lowtide.auditing import CheckResult
from lowtide.torch_patch import TorchPatch

if TYPE_CHECKING:
    from pathlib import Path


def double(x: Tensor) -> Tensor:
    return x * 2


def halves(x: Tensor, *, at: int) -> tuple[Tensor, Tensor]:
    return x[:at], x[at:]


def policies() -> None:
    policy = lowtide.Policy(recompute=True, offload="host", host_limit=8 * 2**30)
    assert_type(lowtide.Policy.parse("recompute+offload"), lowtide.Policy)
    assert_type(lowtide.Policy.parse({"recompute": True}), lowtide.Policy)
    assert_type(policy.tile, tuple[str, ...])
    assert_type(str(policy), str)
    lowtide.Policy(True)  # type: ignore[call-arg]
    lowtide.Policy(recomputes=True)  # type: ignore[call-arg]
    lowtide.Policy(recompute="yes")  # type: ignore[arg-type]
    policy.recompute = False  # type: ignore[misc]


def applies(model: nn.Module) -> None:
    applied = lowtide.apply(model, "recompute+offload+tile")
    assert_type(applied, lowtide.Applied)
    assert_type(applied.report(), Report)
    assert_type(applied.policy, lowtide.Policy)
    applied.remove()
    with lowtide.apply(model, lowtide.Policy(recompute=True), regions=["layers.*", "Block"], strict=False) as handle:
        assert_type(handle, lowtide.Applied)
    lowtide.apply(model, budget="24GiB", tokens="128k", device="L40S")
    lowtide.apply("gpt2")  # type: ignore[arg-type]
    lowtide.apply(model, 2)  # type: ignore[arg-type]
    lowtide.apply(model, "recompute", ["layers.*"])  # type: ignore[call-arg]
    lowtide.apply(model).reports()  # type: ignore[attr-defined]


def mechanisms(mlp: nn.Module, x: Tensor, weight: Tensor, labels: Tensor, scratch: Path) -> None:
    assert_type(lowtide.checkpoint(double, x, use_reentrant=True), Tensor)
    assert_type(lowtide.checkpoint(halves, x, at=2, offload="host"), tuple[Tensor, Tensor])
    lowtide.checkpoint(double, x, offload=lowtide.DiskStore(scratch, limit="200GiB"))
    lowtide.checkpoint(double, x, offload=lowtide.Schedule(lowtide.HostStore("8GiB")))
    lowtide.checkpoint(double, x, offload="tape")  # type: ignore[call-overload]
    lowtide.checkpoint(double, x, early_stop="no")  # type: ignore[call-overload]

    assert_type(lowtide.tile(double, x, tokens="16k"), Tensor)
    assert_type(lowtide.tile(mlp, x), Any)  # torch says no more of a module's call
    lowtide.tile(double, x, accumulate="float64")  # type: ignore[arg-type]
    lowtide.tile(double, tokens=1024)  # type: ignore[call-arg]

    assert_type(lowtide.linear_cross_entropy(x, weight, labels, reduction="none"), Tensor)
    lowtide.linear_cross_entropy(x, weight, labels, reduction="median")  # type: ignore[arg-type]
    lowtide.linear_cross_entropy(x, weight, labels, None)  # type: ignore[call-arg]
    assert_type(lowtide.linear_log_probs(x, weight, labels, temperature=0.7), Tensor)
    assert_type(lowtide.linear_log_probs(x, weight, labels, entropy=True), tuple[Tensor, Tensor])
    lowtide.linear_log_probs(x, weight, labels, kernel="liger")  # type: ignore[call-overload]


def contexts(x: Tensor, scratch: Path) -> None:
    with lowtide.offload(lowtide.HostStore()) as context:
        assert_type(context, lowtide.offload)
    with lowtide.patch_torch(offload="host") as patch:
        assert_type(patch, TorchPatch)
        assert_type(patch.calls, int)
    lowtide.offload("disk")  # type: ignore[arg-type]
    lowtide.patch_torch(offload=str(scratch))  # type: ignore[arg-type]
    lowtide.DiskStore(limit="1GiB")  # type: ignore[call-arg]
    lowtide.HostStore().put(x.tolist()[0]).fetch()  # type: ignore[attr-defined]


def verdicts(model: nn.Module, batch: dict[str, Tensor]) -> None:
    report = lowtide.audit(model, batch, configure=lambda m: lowtide.apply(m, "recompute"), dropout=0.1)
    assert_type(report, lowtide.AuditReport)
    assert_type(report.ok, bool)
    assert_type(report["memory"], CheckResult)
    lowtide.audit(model)  # type: ignore[call-arg]
    lowtide.audit(model, batch, lambda m: m)  # type: ignore[call-arg]


def traces(model: nn.Module, x: Tensor) -> None:
    with lowtide.trace(model) as seen:
        model(x).sum().backward()
    assert_type(seen, lowtide.Trace)
    assert_type(seen.peak_bytes, int)
    assert_type(seen.to_html(), str)
    lowtide.trace()  # type: ignore[call-arg]


def plans(model: nn.Module) -> None:
    plan = lowtide.plan("Qwen3-VL-4B", tokens=131072, device="L40S", ranks=8, lora=16, trainer="trl")
    assert_type(plan, lowtide.Plan)
    assert_type(plan.fits, bool)
    assert_type(plan.policy, lowtide.Policy | None)
    assert_type(plan.peak_bytes, int)
    lowtide.apply(model, plan.policy)
    lowtide.plan(model, batch={"ids": 1}, budget="24GiB")
    lowtide.plan(model, tokens=1024, rank=8)  # type: ignore[call-arg]
    plan.best.fits  # type: ignore[union-attr]  # noqa: B018  (nothing may fit)


def errors(model: nn.Module) -> str:
    try:
        lowtide.apply(model)
    except lowtide.LowtideError as error:
        return str(error)
    return lowtide.__version__


def device() -> None:
    assert_type(simdevice.enable(memory="1500KiB"), simdevice.Settings)
    assert_type(lowtide.simdevice.stats(), simdevice.Stats)
    assert_type(simdevice.violations(), list[simdevice.Violation])
    with simdevice.timeline() as spans:
        assert_type(spans, list[simdevice.Span])
    simdevice.enable(on_violation="ignore")  # type: ignore[arg-type]
    simdevice.enable("1500KiB")  # type: ignore[call-arg]


def names_that_are_not_there() -> None:
    lowtide.aply  # type: ignore[attr-defined]  # noqa: B018
    from lowtide import Polcy  # type: ignore[attr-defined]  # noqa: F401
