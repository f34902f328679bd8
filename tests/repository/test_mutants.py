"""How many faults of the engine the tests notice: the record of `make mutants`, and the tool that writes it."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "mutants.json").read_text())
VERDICTS = RECORD["verdicts"]
FIELDS = {"name", "file", "line", "function", "operator", "before", "after", "number", "verdict", "at_first", "seconds"}


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("mutants")


@pytest.fixture
def find(tool):
    """List the faults of a piece of source as (operator, before, after)."""
    return lambda source: [(m.operator, m.before, m.after) for m in tool.find_mutants(source, "lowtide/a.py")]


class TestTheRecord:
    def test_every_verdict_says_what_was_changed_and_who_noticed(self):
        for known in VERDICTS:
            assert known.keys() - {"by", "why", "obsolete"} == FIELDS, known["name"]
            assert known["verdict"] in ("killed", "timeout", "survived", "equivalent"), known["name"]
            assert ("by" in known) == (known["verdict"] in ("killed", "timeout")), known["name"]
            assert ("why" in known) == (known["verdict"] == "equivalent"), known["name"]
            assert len(known.get("why", "a reason, in words").split()) > 3, known["name"]
        assert len({known["name"] for known in VERDICTS}) == len(VERDICTS)

    def test_the_summary_counts_the_verdicts(self, tool):
        assert RECORD["summary"] == tool.summary(VERDICTS)
        counts = Counter(known["verdict"] for known in VERDICTS)
        assert RECORD["summary"]["killed"] == counts["killed"]
        assert RECORD["samples"]

    def test_most_faults_are_noticed(self):
        assert RECORD["summary"]["killed"] + RECORD["summary"]["timeout"] >= 40
        assert RECORD["summary"]["score"] >= 0.95

    def test_what_nobody_noticed_is_still_there_or_marked(self, tool):
        names = {mutant.name for mutant in tool.all_mutants()}
        unnoticed = [known for known in VERDICTS if known["verdict"] in ("survived", "equivalent")]
        gone = [known["name"] for known in unnoticed if known["name"] not in names and not known.get("obsolete")]
        assert gone == [], "the code is gone: python tools/mutants.py --tidy"

    def test_the_page_for_contributors_gives_the_score(self, tool):
        page = (ROOT / "CONTRIBUTING.md").read_text()
        assert len(tool.SCORE.findall(page)) == len(tool.FIRST.findall(page)) == 1
        assert tool.with_score(page, RECORD["summary"]) == page


class TestMutants:
    @pytest.mark.parametrize(
        ("source", "faults"),
        [
            ("x = a < b", [("comparison", "a < b", "(a <= b)")]),
            ("x = a is None", [("comparison", "a is None", "(a is not None)")]),
            (
                "x = a and b",
                [
                    ("and/or", "a and b", "(a or b)"),
                    ("operand left out", "a and b", "(a)"),
                    ("operand left out", "a and b", "(b)"),
                ],
            ),
            ("x = not a", [("not", "not a", "(a)")]),
            ("x = 1", [("constant", "1", "0"), ("constant", "1", "2")]),
            ("x = True", [("constant", "True", "False")]),
            ("x = a + b", [("arithmetic", "a + b", "(a - b)")]),
            ("x = a if b else c", [("branches swapped", "a if b else c", "(c if b else a)")]),
            ("def f(): return a", [("returns None", "return a", "return None")]),
            ("a.b()", [("statement left out", "a.b()", "pass")]),
            ("a.b = c", [("statement left out", "a.b = c", "pass")]),
            ("raise E('a')", [("statement left out", "raise E('a')", "pass")]),
            ("a += b", [("arithmetic", "a += b", "a -= b"), ("statement left out", "a += b", "pass")]),
        ],
    )
    def test_operators(self, find, source, faults):
        assert sorted(find(source)) == sorted(faults)

    @pytest.mark.parametrize(
        "source",
        [
            "'''A docstring with 1 number.'''",
            "def f(a: Literal[1]) -> Literal[2]: ...",
            "x: Literal[1]",
            "if TYPE_CHECKING:\n    a = 1",
            "__all__ = ['a', *(1, 2)]",
            "f'{a + 1}'",
            "'a' + b",
            "class A:\n    def __repr__(self): return str(1)",
            "def f(): return None",
            "warnings.warn('a' * 3)",
            "raise NotImplementedError('a')",
        ],
    )
    def test_what_is_no_behaviour_is_left_out(self, find, source):
        assert find(source) == []

    def test_a_mutant_changes_its_own_text_and_nothing_else(self, tool):
        source = "# Größe\ndef f(a, b):\n    return a < b  # kept\n"
        (mutant,) = [m for m in tool.find_mutants(source, "a.py") if m.operator == "comparison"]
        assert mutant.apply(source) == source.replace("a < b", "(a <= b)")
        assert (mutant.function, mutant.line) == ("f", 3)

    def test_a_name_holds_when_lines_move_and_other_lines_change(self, tool):
        before = {m.name: m for m in tool.find_mutants("def f(a):\n    g(a)\n    return a < 7\n", "a.py")}
        after = {m.name: m for m in tool.find_mutants("x = 3\n\ndef f(a):\n    h(a)\n    return a < 7\n", "a.py")}
        same = before.keys() & after.keys()
        assert {before[name].operator for name in same} == {"comparison", "constant", "returns None"}
        assert all(before[name].line == after[name].line - 2 for name in same)

    def test_equal_faults_of_a_function_have_different_names(self, tool):
        names = [m.name for m in tool.find_mutants("def f(a):\n    a.b()\n    a.b()\n", "a.py")]
        assert len(set(names)) == len(names) == 2

    @pytest.mark.parametrize("file", ["stores/tiered.py", "tensor_tree.py"])
    def test_mutants_compile(self, tool, file):
        source = (ROOT / "src/lowtide" / file).read_text()
        for mutant in tool.find_mutants(source, file):
            assert compile(mutant.apply(source), mutant.before, "exec")

    def test_every_mutant_of_the_engine_has_a_name_of_its_own_and_tests(self, tool):
        mutants = tool.all_mutants()
        assert len({m.name for m in mutants}) == len(mutants) > 2000
        for file in {m.file for m in mutants}:
            assert all((ROOT / path).exists() for portion in tool.tests_of(file) for path in portion), file


class TestSamples:
    def test_a_sample_depends_on_the_seed_and_grows_by_the_count(self, tool):
        mutants = tool.all_mutants()
        small, large = tool.sample(mutants, 1, 10), tool.sample(mutants, 1, 20)
        assert small == large[:10]
        assert tool.sample(mutants[::-1], 1, 10) == small
        assert tool.sample(mutants, 2, 10) != small
        assert {tool.room_of(m.file) for m in tool.sample(mutants, 1, 10, "losses")} == {"losses"}

    def test_the_order_of_the_others_holds_when_one_goes(self, tool):
        mutants = tool.sample(tool.all_mutants(), 1, 20)
        assert tool.sample(mutants[:3] + mutants[4:], 1, 19) == mutants[:3] + mutants[4:]


class TestJudging:
    """Verdicts on mutants of a package of two functions, of which one is tested."""

    @pytest.fixture
    def judge(self, tool, tmp_path, monkeypatch):
        package, tests = tmp_path / "src/lowtide/stores", tmp_path / "tests/stores"
        package.mkdir(parents=True)
        tests.mkdir(parents=True)
        (tmp_path / "src/lowtide/__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n")
        (tests / "test_sums.py").write_text(
            "from lowtide.stores.sums import add\n\n\n"
            "def test_add():\n    while add(2, 1) == 2:\n        pass\n    assert add(1, 2) == 3\n"
        )
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        monkeypatch.setattr(tool, "ROOT", tmp_path)
        monkeypatch.setattr(tool, "SOURCE", tmp_path / "src")
        monkeypatch.setattr(tool, "WIDER", {"stores": ["tests/stores"]})
        with tool.Judge() as judge:
            yield judge
        assert "a + b" in (package / "sums.py").read_text(), "the working tree is never changed"

    def _mutant(self, tool, operator: str, function: str):
        (found,) = [m for m in tool.all_mutants() if (m.operator, m.function) == (operator, function)]
        return found

    def test_a_fault_that_a_test_notices_is_killed_by_it(self, tool, judge):
        verdict = judge.verdict(self._mutant(tool, "arithmetic", "add"))
        assert (verdict["verdict"], verdict["by"]) == ("killed", "tests/stores/test_sums.py::test_add")

    def test_a_fault_that_no_test_notices_survives(self, tool, judge):
        verdict = judge.verdict(self._mutant(tool, "arithmetic", "sub"))
        assert verdict["verdict"] == "survived"
        assert "by" not in verdict

    def test_a_test_that_fails_anyway_gives_no_verdict(self, tool, judge, tmp_path):
        (tmp_path / "tests/stores/test_sums.py").write_text("def test_wrong():\n    assert 1 == 2\n")
        with pytest.raises(SystemExit, match="test_wrong fails without a mutant"):
            judge.verdict(self._mutant(tool, "arithmetic", "sub"))

    def test_a_fault_that_hangs_is_noticed(self, tool, judge, monkeypatch):
        monkeypatch.setattr(tool, "TEST_SECONDS", 2)
        mutant = self._mutant(tool, "arithmetic", "add")
        hanging = type(mutant)(**{**vars(mutant), "after": "a"})  # add(2, 1) == 2
        assert judge.verdict(hanging)["verdict"] == "timeout"


def test_a_record_is_tidied(tool):
    (mutant, *_) = tool.all_mutants()
    known = tool.entry(mutant) | {"verdict": "survived", "at_first": "survived", "seconds": 1, "line": -1}
    gone = known | {"name": "gone"}
    tidied = tool.tidy([known, gone], {mutant.name: mutant})
    assert [(k["line"], k.get("obsolete", False)) for k in tidied] == [(mutant.line, False), (-1, True)]
    assert tool.summary(tidied)["survived"] == 1
    assert tool.summary(tidied)["at_first"] == {"judged": 2, "noticed": 0}
