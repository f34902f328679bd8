"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowtide.auditing import CHECKS, audit

pytest_plugins = ["pytester"]

MODEL = """
import pytest, torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 8)
        self.use_reentrant = None

    def forward(self, x):
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x).square().mean()


def switch(use_reentrant):
    def configure(model):
        model.use_reentrant = use_reentrant
        return Undo(model)
    return configure


class Undo:
    def __init__(self, model):
        self.model = model

    def remove(self):
        self.model.use_reentrant = None


def cut_off(model):
    model.head = nn.Identity()
    return switch(True)(model)


def breaks(model):
    raise RuntimeError("this set-up is broken")


batch = torch.randn(4, 8)
RIGHT, WRONG, BROKEN = {"configure": switch(False)}, {"configure": switch(True)}, {"configure": breaks}
CUT_OFF = {"configure": cut_off}
"""

ONE_PER_CHECK = """
@pytest.fixture(scope="module")
def lowtide_model():
    print("set up")
    return Model(), batch, {options}

def test_checkpointing(lowtide_check):
    lowtide_check.assert_ok()
"""


@pytest.fixture(scope="module")
def _everything_is_imported():
    """Pytester forgets what a run in this process imports, and parts of torch cannot be imported twice."""
    space: dict = {}
    exec(MODEL, space)  # noqa: S102  (our own)
    audit(space["Model"](), space["batch"], **space["RIGHT"])


@pytest.fixture
def run(pytester, _everything_is_imported):
    """Runs pytest on a test file, with the plugin from its entry point."""

    def run_tests(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(MODEL + source)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    return run_tests


def test_the_entry_point_loads_the_plugin(run):
    run("", "--fixtures").stdout.fnmatch_lines(["*fixtures defined from lowtide_pytest*", "lowtide_audit*"])


def test_a_right_set_up_passes_and_gives_the_report(run):
    done = run("""
def test_model(lowtide_audit):
    report = lowtide_audit(Model(), batch, **RIGHT)
    assert report["recomputed"].verdict == "pass"
    assert report["gradient values"].verdict == "pass"
""")
    done.assert_outcomes(passed=1)


def test_a_wrong_set_up_fails_with_what_to_know_and_no_traceback(run):
    done = run("def test_model(lowtide_audit):\n    lowtide_audit(Model(), batch, **WRONG)\n")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "Model: Parameters lose their gradient; adapters on a frozen base get no gradient or a wrong one",
            "?configured? gradients present (wrong): *",
            "*layers.0.up.weight*",
            "    remedy: *use_reentrant=False*",
        ]
    )
    done.stdout.no_fnmatch_line("*Error*")
    done.stdout.no_fnmatch_line("*lowtide_pytest.py:*")


def test_warnings_are_neither_lost_nor_errors_in_a_strict_suite(run):
    """Torch warns where a reentrant checkpoint gives no gradients; the audit must go on and judge it."""
    done = run(
        "def test_model(lowtide_audit):\n    lowtide_audit(Model(), batch, **WRONG, checks=['gradients present'])\n",
        "-W",
        "error",
    )
    done.assert_outcomes(failed=1, warnings=1)
    done.stdout.fnmatch_lines(["?configured? gradients present (wrong): *", "*UserWarning: None of the inputs have*"])


def test_an_audit_that_proves_nothing_does_not_pass(run):
    done = run("def test_model(lowtide_audit):\n    lowtide_audit(Model(), batch, **RIGHT, checks=['experts'])\n")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["No check passed: nothing is proven", "*no mixture of experts*"])


def test_what_cannot_be_audited_says_why(run):
    done = run("def test_model(lowtide_audit):\n    lowtide_audit(Model(), torch.randn(4, 5))\n")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["the audit cannot run: the plain model fails on this batch: *"])
    done.stdout.no_fnmatch_line("*Traceback*")


def test_one_test_for_each_check_and_one_audit_for_all(run):
    done = run(
        ONE_PER_CHECK.format(options="RIGHT")
        + """
@pytest.fixture(autouse=True, scope="session")
def count_audits():
    import lowtide.auditing
    original, calls = lowtide.auditing.audit, []
    lowtide.auditing.audit = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    yield
    lowtide.auditing.audit = original
    print("AUDITS:", len(calls))
""",
        "-v",
        "-s",
    )
    outcomes = done.parseoutcomes()
    assert sum(outcomes.values()) == len(CHECKS) + 1
    assert "failed" not in outcomes
    assert outcomes["passed"] >= 8
    assert done.stdout.str().count("set up\n") == 1
    done.stdout.fnmatch_lines(["*AUDITS: 1"])
    for name in CHECKS:
        done.stdout.fnmatch_lines_random([f"*::test_checkpointing?{name}?*"])


def test_only_the_tests_of_failed_checks_fail(run):
    done = run(ONE_PER_CHECK.format(options="WRONG"), "-rA")
    done.stdout.fnmatch_lines_random(
        [
            "FAILED *test_checkpointing?gradients present?*",
            "PASSED *test_checkpointing?outputs?*",
            "SKIPPED*configured* not applicable: no mixture of experts",
            "    remedy: *use_reentrant=False*",
        ]
    )
    done.stdout.no_fnmatch_line("*lowtide_pytest.py:*Failed")


def test_a_set_up_that_raises_fails_one_test_and_skips_the_rest(run):
    done = run(ONE_PER_CHECK.format(options="BROKEN"), "-rA")
    done.assert_outcomes(passed=1, failed=1, skipped=len(CHECKS) - 1)
    done.stdout.fnmatch_lines_random(
        [
            "FAILED *test_checkpointing?runs?*",
            "*this set-up is broken*",
            "SKIPPED*not run: the set-up failed before this check*",
        ]
    )


def test_a_loss_cut_off_fails_one_test_and_the_rest_say_no_untruth(run):
    """Everything that has weights inside of reentrant checkpoints: the loss needs no gradient any more."""
    done = run(ONE_PER_CHECK.format(options="CUT_OFF"), "-rA")
    done.assert_outcomes(passed=2, failed=1, skipped=len(CHECKS) - 2, warnings=done.parseoutcomes().get("warnings", 0))
    done.stdout.fnmatch_lines_random(
        ["FAILED *test_checkpointing?gradients present?*", "SKIPPED*not run: the set-up failed before this check*"]
    )


def test_checks_that_were_not_asked_for_are_skipped(run):
    done = run(ONE_PER_CHECK.format(options='{**RIGHT, "checks": ["outputs"]}'), "-rA")
    done.assert_outcomes(passed=2, skipped=len(CHECKS) - 1)
    done.stdout.fnmatch_lines_random(["SKIPPED*not run: *or the check was not asked for"])


def test_a_mild_failure_fails_only_the_test_that_asks_for_it(run):
    """Without a `remove` that works, switching off leaves the set-up in force: that is untidy, and no more."""
    done = run(
        """
def untidy(model):
    undo = switch(False)(model)
    undo.remove = lambda: None
    return undo

def test_mild(lowtide_audit):
    assert lowtide_audit(Model(), batch, configure=untidy).failures[0].grade == "untidy"

def test_strict(lowtide_audit):
    lowtide_audit(Model(), batch, configure=untidy, fail_on="untidy", checks=["reversible", "recomputed"])
"""
        + ONE_PER_CHECK.format(options='{"configure": untidy, "checks": ["reversible", "recomputed"]}'),
        "-rA",
    )
    done.assert_outcomes(passed=3, failed=1, skipped=len(CHECKS) - 1)
    done.stdout.fnmatch_lines_random(
        ["FAILED *::test_strict*", "SKIPPED*configured* untidy: switched off, 3 blocks still run again*"]
    )


def test_several_models_give_a_test_for_each_check_and_model(run):
    done = run(
        """
@pytest.fixture(scope="module", params=["RIGHT", "WRONG"])
def lowtide_model(request):
    return Model(), batch, globals()[request.param]

def test_checkpointing(lowtide_check):
    lowtide_check.assert_ok()
""",
        "-rA",
    )
    outcomes = done.parseoutcomes()
    assert outcomes["passed"] + outcomes["skipped"] + outcomes["failed"] == 2 * (len(CHECKS) + 1)
    done.stdout.fnmatch_lines_random(
        ["PASSED *?RIGHT-gradients present?*", "FAILED *?WRONG-gradients present?*", "PASSED *?WRONG-outputs?*"]
    )


def test_the_model_fixture_must_be_defined(run):
    done = run("def test_checkpointing(lowtide_check):\n    lowtide_check.assert_ok()\n", "-k", "outputs")
    done.assert_outcomes(errors=1, deselected=len(CHECKS))
    done.stdout.fnmatch_lines(['*needs a fixture lowtide_model with scope="module"*'])


def test_the_plugin_imports_neither_torch_nor_the_library(tmp_path):
    """It is loaded in every run of every user, so this is their time."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'lowtide_pytest' in sys.modules\n"
        "    assert not {'torch', 'lowtide', 'jinja2'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
