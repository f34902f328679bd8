"""Can it be switched on twice, off again, copied and pickled?"""

from __future__ import annotations

import collections
import copy
import pickle
from typing import TYPE_CHECKING

from lowtide._torch import hooks_of
from lowtide.auditing.comparison import compare
from lowtide.auditing.report import CheckResult, Verdict
from lowtide.auditing.step import observe

if TYPE_CHECKING:
    from torch import nn

    from lowtide.auditing.case import Case


def idempotent(case: Case) -> CheckResult:
    """Setting a model up twice is setting it up once: as many recomputations, as many hooks."""
    name = "idempotent"
    if case.setup.configure is None:
        return case.check(name, Verdict.NOT_APPLICABLE, "the model is judged as it is")
    once = case.install()
    hooks = _hooks(once.model)
    twice = case.setup.install(once.model)
    grown = {kind: n - hooks[kind] for kind, n in _hooks(twice.model).items() if n > hooks[kind]}
    seen = observe(twice.model, case.experiment)  # models may install hooks of their own as they first run
    counts = {block: seen.backward_calls[block] for block in case.blocks()}
    before = {block: case.run().backward_calls[block] for block in case.blocks()}
    wrong = compare(case.run().gradients, seen.gradients, case.reference.own_errors).suspects
    if counts != before or wrong or grown:
        what = "hooks pile up" if grown and counts == before and not wrong else "it acts twice"
        return case.check(
            name,
            Verdict.FAIL,
            f"switched on twice, {what}",
            remedy="remember what is installed, and install it once",
            new_hooks=dict(grown),
            wrong_gradients=len(wrong),
        )
    return case.check(name, Verdict.PASS, "switched on twice, it acts once")


def reversible(case: Case) -> CheckResult:
    name = "reversible"
    if case.setup.configure is None:
        return case.check(name, Verdict.NOT_APPLICABLE, "the model is judged as it is")
    installed = case.install()
    if not installed.can_be_undone:
        return case.check(
            name,
            Verdict.NOT_APPLICABLE,
            "nothing was said about how it is switched off: let configure return an object with remove()",
        )
    hooks = _hooks(case.source)
    installed.undo()
    left = {kind: n - hooks[kind] for kind, n in _hooks(installed.model).items() if n > hooks[kind]}
    seen = observe(installed.model, case.experiment)
    still = sorted(block for block in case.blocks() if seen.backward_calls[block] > case.plain.backward_calls[block])
    wrong = compare(case.plain.gradients, seen.gradients, case.reference.own_errors).suspects
    if still or wrong or left:
        return case.check(
            name,
            Verdict.FAIL,
            f"switched off, {len(still)} blocks are still run again, {len(wrong)} gradients differ and "
            f"{sum(left.values())} hooks are left",
            remedy="undo everything that was installed",
            still_recomputed=still[:8],
            hooks_left=dict(left),
        )
    return case.check(name, Verdict.PASS, "switched off, the model is as it was")


def portable(case: Case) -> CheckResult:
    """Deep copies and pickles of a model that is set up."""
    name = "copy and pickle"
    plain_fails = _plain_fails_to_pickle(case)
    if plain_fails is not None:
        return case.check(name, Verdict.NOT_APPLICABLE, f"the plain model cannot be pickled either: {plain_fails}")
    model = case.install().model
    problem = _fails_to_pickle(model)
    if problem is None:
        problem = _wrong_gradients(case, copy.deepcopy(model))
    if problem is not None:
        return case.check(
            name,
            Verdict.FAIL,
            f"the model can no longer be copied or pickled: {problem}",
            remedy="closures and hooks on instances do not travel: use methods or objects with __deepcopy__",
            error=problem,
        )
    return case.check(name, Verdict.PASS, "deep copy and pickle work, and a copy's gradients are right")


def _wrong_gradients(case: Case, twin: nn.Module) -> str | None:
    seen = observe(twin, case.experiment)
    wrong = compare(case.plain.gradients, seen.gradients, case.reference.own_errors).suspects
    already = compare(case.plain.gradients, case.run().gradients, case.reference.own_errors).suspects
    new = [name for name in wrong if name not in already]
    return f"a copy has {len(new)} wrong gradients" if new else None


def _plain_fails_to_pickle(case: Case) -> str | None:
    """Why the model could not be pickled before it was set up, such as a class that is local to a function."""
    if case.setup.configure is not None:
        return _fails_to_pickle(case.source)
    try:
        plain = copy.deepcopy(case.reference.model)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return _words(error)
    for module in plain.modules():  # what a set-up leaves in a copy, a flag that is off as well
        vars(module).pop("forward", None)
        for hooks in hooks_of(module).values():
            hooks.clear()
    return _fails_to_pickle(plain)


def _fails_to_pickle(model: nn.Module) -> str | None:
    try:
        pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)
        copy.deepcopy(model)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return _words(error)
    return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _hooks(model: nn.Module) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for module in model.modules():
        for kind, hooks in hooks_of(module).items():
            counts[kind] += len(hooks)
    return counts
