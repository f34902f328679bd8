"""Says in one sentence what an audit found: first whether gradients are right, then what else failed, worst first.

A statement that does not hold for all modes names those that it holds for. What is only untidy comes last and is called
so, and what a baseline knows already is counted, not repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.auditing.grades import GRADES, Grade
from lowtide.auditing.setups import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lowtide.auditing.result import CheckResult

_STATEMENTS = {
    "runs": "the set-up raises in its first step",
    "parameters reached": "the model's own code cuts parameters off from the loss",
    "gradients present": "parameters lose their gradient",
    "gradient values": "gradients are wrong",
    "experts": "experts lose or gain gradients",
    "outputs": "outputs differ from the plain model's",
    "buffers": "buffers are not as after one forward",
    "random state": "the recompute draws different random numbers",
    "adapters on a frozen base": "adapters on a frozen base get no gradient or a wrong one",
    "memory": "no memory is saved",
    "offload": "offloading has no effect",
    "DDP readiness": "DDP would reduce gradients too early or twice",
    "ranks agree": "ranks end with different gradients",
    "in-place changes": "a change in place goes unnoticed",
    "idempotent": "switched on twice, it adds up",
    "reversible": "switched off, it leaves something behind",
    "copy and pickle": "the model can no longer be copied or pickled",
}
"""What a failure of each check means, without its names and numbers."""

_AFTERWARDS = {
    "idempotent": "switched on twice",
    "reversible": "switched off",
    "copy and pickle": "copied",
}
"""When the checks run the model that are about what a set-up leaves behind."""

_SHOWN = 2
"""How many stacks are named."""


def conclude(checks: list[CheckResult], *, ok: bool, unproven: bool) -> str:
    """Return the sentence about these checks."""
    modes = list(dict.fromkeys(check.mode for check in checks if check.mode != PLAIN))
    failures = [check for check in checks if check.grade is not None]
    new = [check for check in failures if not check.known]
    graded = {grade: _joined(_failures(new, grade), modes) for grade in reversed(Grade)}
    untidy = graded.pop(Grade.UNTIDY)
    statements = _joined(_about_gradients(checks, modes), modes)
    statements += [statement for found in graded.values() for statement in found]
    if untidy:
        statements.append(f"untidy: {', '.join(untidy)}")
    known = len(failures) - len(new)
    if known:
        statements.append(f"{known} known {'failure' if known == 1 else 'failures'}")
    if not failures:
        statements = [_without_failures(statements, ok=ok, unproven=unproven)]
    sentence = "; ".join(statements)
    return sentence[:1].upper() + sentence[1:]


def _without_failures(statements: list[str], *, ok: bool, unproven: bool) -> str:
    if unproven:
        return "nothing failed, but the gradients are not proven right"
    if not ok:
        return "no check passed: nothing is proven"
    return ", and ".join([*statements, "no check failed"])


def _about_gradients(checks: list[CheckResult], modes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield a statement with its mode where the values were judged and are not wrong; what is wrong is said later.

    If the plain model lacks gradients, the set-up's are no more right than that model's.
    """
    is_cut = any(check.name == "parameters reached" and check.grade is not None for check in checks)
    right = "gradients are the plain model's" if is_cut else "gradients are right"
    for mode in modes:
        verdicts = {check.name: check.verdict for check in checks if check.mode == mode}
        if "fail" in (verdicts.get("gradient values"), verdicts.get("gradients present")):
            continue
        if "inconclusive" in (verdicts.get("gradient values"), verdicts.get("gradients present")):
            yield "the gradients are not proven right", mode
        elif verdicts.get("gradient values") == "pass":
            yield right, mode


def _failures(checks: list[CheckResult], grade: Grade) -> Iterator[tuple[str, str]]:
    order = list(GRADES)
    for check in sorted((c for c in checks if c.grade is grade), key=lambda c: order.index(c.name)):
        yield _statement(check), check.mode


def _statement(check: CheckResult) -> str:
    if check.name == "recomputed":
        return _about_recompute(check)
    if check.name in _AFTERWARDS and check.grade is Grade.WRONG:
        if "error" in check.evidence:
            return f"{_AFTERWARDS[check.name]}, it raises"
        return f"{_STATEMENTS[check.name]}, and gradients are wrong then"
    return _STATEMENTS.get(check.name, f"{check.name} failed")


def _about_recompute(check: CheckResult) -> str:
    stacks = check.evidence.get("stacks", [])
    if stacks and not any(stack["recomputed"] for stack in stacks):
        return "nothing is recomputed"
    never = [stack["name"] for stack in stacks if stack["name"] in check.evidence.get("missed", [])]
    if never:
        some = [stack for stack in stacks if stack["name"] in never and stack["recomputed"]]
        more = len(never[_SHOWN:])
        few = ", ".join(never[:_SHOWN]) + (f" and {more} more" if more else "")
        return f"{few} {'are' if len(never) > 1 else 'is'} {'not wholly' if some else 'never'} recomputed"
    return "blocks are recomputed too often"


def _joined(found: Iterable[tuple[str, str]], modes: list[str]) -> list[str]:
    """Join equal statements of several modes, and name the modes unless they are all."""
    by_statement: dict[str, list[str]] = {}
    for statement, mode in found:
        by_statement.setdefault(statement, []).append(mode)
    return [
        statement if PLAIN in held or set(held) == set(modes) else f"{statement} ({', '.join(held)})"
        for statement, held in by_statement.items()
    ]
