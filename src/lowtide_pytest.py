"""Adds fixtures to pytest that audit a model: in one test, or in one test for each check.

    def test_model(lowtide_audit):
        lowtide_audit(model, batch, configure=set_up)

    @pytest.fixture(scope="module")
    def lowtide_model():
        return model, batch, {"configure": set_up}

    def test_checkpointing(lowtide_check):
        lowtide_check.assert_ok()

The second way runs the audit once per module and collects `test_checkpointing[gradient values]` and so on.

Pytest imports this module in every run of everybody who has Lowtide installed. So neither the package nor torch is
imported before a test asks for one of the fixtures.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.auditing import AuditReport, CheckResult

_NOT_RUN = "not run: the set-up failed before this check, or the check was not asked for"


@pytest.fixture
def lowtide_audit() -> Callable[..., AuditReport]:
    """Audit a model, with the arguments of `lowtide.audit`. A failure from the grade `fail_on` on fails the test."""
    return _audit_or_fail


@pytest.fixture(scope="module")
def lowtide_model() -> NoReturn:
    """Define a fixture with this name that returns `model, batch`, or `model, batch, options` for the audit."""
    pytest.fail(
        'lowtide_check needs a fixture lowtide_model with scope="module" that returns model, batch or '
        'model, batch, {"configure": ...}',
        pytrace=False,
    )


@pytest.fixture(scope="module")
def lowtide_report(lowtide_model: tuple[Any, ...]) -> AuditReport:
    """Audit `lowtide_model` once. A failed check does not fail the fixture: tests look at the report."""
    model, batch, *options = lowtide_model
    return _audit(model, batch, **(options[0] if options else {}))


@pytest.fixture
def lowtide_check(request: pytest.FixtureRequest, lowtide_report: AuditReport) -> NamedCheck:
    """Give one check of `lowtide_model`'s audit; a test that uses it runs once for each check."""
    return NamedCheck(request.param, lowtide_report)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lowtide_check" in metafunc.fixturenames:
        from lowtide.auditing import CHECKS
        from lowtide.auditing.result import RUNS

        metafunc.parametrize("lowtide_check", [RUNS, *CHECKS], indirect=True)


@dataclasses.dataclass(frozen=True)
class NamedCheck:
    """What an audit says about one check, in all modes."""

    name: str
    report: AuditReport

    @property
    def outcomes(self) -> list[CheckResult]:
        return [check for check in self.report.checks if check.name == self.name]

    def assert_ok(self) -> None:
        """Fail if a failure in any mode counts. Skip, with the reason, if none passed, or one failed too mildly."""
        __tracebackhide__ = True
        from lowtide.auditing.result import RUNS

        failed = [check for check in self.outcomes if self.report.counts(check)]
        if failed:
            pytest.fail("\n\n".join(map(_message, failed)), pytrace=False)
        mild = [check for check in self.outcomes if check.verdict == "fail"]
        if not mild and (self.name == RUNS or any(check.verdict == "pass" for check in self.outcomes)):
            return
        pytest.skip("; ".join(f"[{c.mode}] {c.label}: {c.summary}" for c in mild or self.outcomes) or _NOT_RUN)


def _audit_or_fail(model: Any, batch: Any, **options: Any) -> AuditReport:
    __tracebackhide__ = True
    report = _audit(model, batch, **options)
    if report.counted:
        paragraphs = [f"{report.model}: {report.conclusion}", *map(_message, report.counted)]
        pytest.fail("\n\n".join(paragraphs), pytrace=False)
    if not report.ok:
        pytest.fail(f"{report.conclusion}\n{report}", pytrace=False)
    return report


def _audit(model: Any, batch: Any, **options: Any) -> AuditReport:
    __tracebackhide__ = True
    from lowtide.auditing import CannotAuditError, audit

    try:
        return audit(model, batch, **options)
    except CannotAuditError as error:
        reason = str(error)
    pytest.fail(f"the audit cannot run: {reason}", pytrace=False)  # outside the handler: no chained tracebacks


def _message(check: CheckResult) -> str:
    from lowtide.auditing.ci import details

    lines = [f"[{check.mode}] {check.name} ({check.label}): {check.summary}", *details(check).splitlines()]
    return "\n    ".join(lines)
