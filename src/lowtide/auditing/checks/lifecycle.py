"""Can the set-up be switched on twice and off again, and the model still be copied and pickled?"""

from __future__ import annotations

import collections
import copy
import pickle
from typing import TYPE_CHECKING

from lowtide._torch import hooks_of
from lowtide.auditing.comparison import compare
from lowtide.auditing.grades import Grade
from lowtide.auditing.result import CheckResult, Verdict, first_few, listed
from lowtide.auditing.step import observe

if TYPE_CHECKING:
    from torch import nn

    from lowtide.auditing.case import Case
    from lowtide.auditing.setups import Installed


def idempotent(case: Case) -> CheckResult:
    """Check that setting a model up twice has the effect of once: as many recomputes, as many hooks."""
    name = "idempotent"
    if case.setup.configure is None:
        return case.result(name, Verdict.NOT_APPLICABLE, "the model is judged as it is, not set up by the audit")
    once = case.install()
    hooks = _hook_counts(once.model)
    try:
        twice = case.setup.install(once.model)
    except Exception as error:  # noqa: BLE001  whatever it raises is the finding
        return _refused_twice(case, once, error)
    grown = {kind: n - hooks[kind] for kind, n in _hook_counts(twice.model).items() if n > hooks[kind]}
    seen = observe(twice.model, case.experiment)  # after the hooks are counted: models may add some as they first run
    counts = {block: seen.backward_calls[block] for block in case.blocks}
    before = {block: case.run().backward_calls[block] for block in case.blocks}
    wrong = compare(case.run().gradients, seen.gradients, case.reference.rerun_errors).suspects
    if counts != before or wrong or grown:
        return case.result(
            name,
            Verdict.FAIL,
            f"switched on twice, {_twice(grown, [block for block in counts if counts[block] != before[block]], wrong)}",
            remedy="remember what is installed, and do not install it again",
            escalated=Grade.WRONG if wrong else None,
            new_hooks=dict(grown),
            wrong_gradients=len(wrong),
        )
    return case.result(name, Verdict.PASS, "switched on twice, it acts once")


def _refused_twice(case: Case, once: Installed, error: Exception) -> CheckResult:
    """Report a set-up that raises the second time, after a step that shows that the model still trains."""
    seen = observe(once.model, case.experiment)
    wrong = compare(case.run().gradients, seen.gradients, case.reference.rerun_errors).suspects
    return case.result(
        "idempotent",
        Verdict.FAIL,
        f"switched on twice, it raises {_in_short(error)}"
        + (f", and {len(wrong)} gradients are different then: {listed(wrong)}" if wrong else ""),
        remedy="remember what is installed, and do not install it again",
        escalated=Grade.WRONG if wrong else None,
        error=_in_short(error),
    )


def _twice(grown: dict[str, int], changed: list[str], wrong: list[str]) -> str:
    said = [
        "hooks pile up" if grown else "",
        f"these blocks run a different number of times: {listed(changed)}" if changed else "",
        f"{len(wrong)} gradients are different: {listed(wrong)}" if wrong else "",
    ]
    return "; ".join(filter(None, said))


def reversible(case: Case) -> CheckResult:
    """Check that nothing is left of the set-up after it was undone: no recompute, no hook, no changed gradient."""
    name = "reversible"
    if case.setup.configure is None:
        return case.result(name, Verdict.NOT_APPLICABLE, "the model is judged as it is, not set up by the audit")
    installed = case.install()
    if not installed.can_be_undone:
        return case.result(
            name,
            Verdict.NOT_APPLICABLE,
            "the audit does not know how to switch it off: let configure return an object with remove()",
        )
    hooks = _hook_counts(case.source)
    installed.undo()
    left = {kind: n - hooks[kind] for kind, n in _hook_counts(installed.model).items() if n > hooks[kind]}
    seen = observe(installed.model, case.experiment)
    still = sorted(block for block in case.blocks if seen.backward_calls[block] > case.plain.backward_calls[block])
    wrong = compare(case.plain.gradients, seen.gradients, case.reference.rerun_errors).suspects
    if still or wrong or left:
        return case.result(
            name,
            Verdict.FAIL,
            f"switched off, {_left(still, wrong, sum(left.values()))}",
            remedy="undo everything that was installed",
            escalated=Grade.WRONG if wrong else None,
            still_recomputed=still[:8],
            hooks_left=dict(left),
        )
    return case.result(name, Verdict.PASS, "switched off, the model is as it was")


def _left(still: list[str], wrong: list[str], hooks: int) -> str:
    said = [
        f"{len(still)} blocks still run again in backward: {listed(still)}" if still else "",
        f"{len(wrong)} gradients differ: {listed(wrong)}" if wrong else "",
        f"{hooks} {'hook is' if hooks == 1 else 'hooks are'} left" if hooks else "",
    ]
    return "; ".join(filter(None, said))


def portable(case: Case) -> CheckResult:
    """Check that a model that is set up can be copied and pickled, and that the copy's gradients are right."""
    name = "copy and pickle"
    plain_error = _plain_pickling_error(case)
    if plain_error is not None:
        return case.result(name, Verdict.NOT_APPLICABLE, f"the plain model cannot be pickled either: {plain_error}")
    model = case.install().model
    problem = _pickling_error(model)
    if problem is None:
        wrong = _wrong_gradients(case, copy.deepcopy(model))
        if wrong:
            return case.result(
                name,
                Verdict.FAIL,
                f"a deep copy of the model that is set up has {len(wrong)} wrong gradients: {listed(wrong)}",
                remedy="what is installed must be copied with the model, and must not refer to the original",
                escalated=Grade.WRONG,
                different=first_few(wrong),
                count=len(wrong),
            )
    if problem is not None:
        return case.result(
            name,
            Verdict.FAIL,
            f"with the set-up, the model cannot be copied or pickled: {problem}",
            remedy="closures and hooks on instances cannot be copied or pickled: use methods, or objects with "
            "__deepcopy__",
            error=problem,
        )
    return case.result(name, Verdict.PASS, "deep copy and pickle work, and a copy's gradients are right")


def _wrong_gradients(case: Case, twin: nn.Module) -> list[str]:
    """Return the parameters whose gradients are wrong in a copy, and not in the model that was set up."""
    seen = observe(twin, case.experiment)
    wrong = compare(case.plain.gradients, seen.gradients, case.reference.rerun_errors).suspects
    already = compare(case.plain.gradients, case.run().gradients, case.reference.rerun_errors).suspects
    return [name for name in wrong if name not in already]


def _plain_pickling_error(case: Case) -> str | None:
    """Say why the plain model cannot be pickled, such as a class that is local to a function; None if it can."""
    if case.setup.configure is not None:
        return _pickling_error(case.source)
    try:
        plain = copy.deepcopy(case.reference.model)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return _in_short(error)
    for module in plain.modules():  # what a set-up leaves in a copy, even with its flag off
        vars(module).pop("forward", None)
        for hooks in hooks_of(module).values():
            hooks.clear()
    return _pickling_error(plain)


def _pickling_error(model: nn.Module) -> str | None:
    try:
        pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)
        copy.deepcopy(model)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return _in_short(error)
    return None


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _hook_counts(model: nn.Module) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for module in model.modules():
        for kind, hooks in hooks_of(module).items():
            counts[kind] += len(hooks)
    return counts
