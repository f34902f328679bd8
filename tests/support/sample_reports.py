"""Reports with all verdicts, made by hand, and records of a survey."""

from __future__ import annotations

from lowtide.auditing import AuditReport, CheckResult, Verdict
from lowtide_zoo.records import Record


def check(name: str, verdict: Verdict, mode: str = "default", **known) -> CheckResult:
    known.setdefault("summary", f"what {name} found")
    return CheckResult(name=name, mode=mode, verdict=verdict, **known)


def blocks(*, recomputed: bool = True) -> list[dict]:
    sizes = {"text.layers": (6000, 500), "vision.blocks": (3 * 1024**2, 1024**2)}
    return [
        {
            "name": f"{stack}.{number}",
            "stack": stack,
            "forward": 1,
            "backward": int(recomputed),
            "plain_bytes": plain,
            "bytes": now if recomputed else plain,
        }
        for stack, (plain, now) in sizes.items()
        for number in range(3)
    ]


def report() -> AuditReport:
    """Two modes; one fails with much to escape."""
    missed = blocks(recomputed=False)
    missed[0]["backward"] = 2
    return AuditReport(
        model="TinyModel",
        seed=7,
        checks=[
            check("gradient values", Verdict.PASS, evidence={"identical": True, "largest_error": 0.0}, remedy="unused"),
            check(
                "gradients present",
                Verdict.FAIL,
                summary="2 of 9 parameters <b>lost</b> 50% & more: a, b",
                evidence={"lost": ["layers.0.weight", "layers.1.weight"], "nested": {"count": 2}, "nothing": []},
                remedy="use_reentrant=False,\nor another engine",
            ),
            check("experts", Verdict.NOT_APPLICABLE, summary="no mixture of experts"),
            check("memory", Verdict.INCONCLUSIVE, summary="nothing held", evidence={"plain_bytes": 2048}),
            check("outputs", Verdict.PASS, mode="reentrant"),
        ],
        blocks={"default": blocks(), "reentrant": missed},
    )


def failure(name: str, mode: str = "default") -> dict:
    return {
        "name": name,
        "mode": mode,
        "summary": f"{name} is <i>wrong</i>",
        "evidence": {"lost": ["layers.0.weight"], "count": 1},
        "remedy": "repair it",
        "command": f"lowtide audit zeta --policy '{mode} & tile'",
    }


def record(model_type: str, **known) -> Record:
    """Of a model that passes, unless told otherwise."""
    passed = {"outputs": "pass", "gradient values": "pass", "experts": "not applicable"}
    usual = {
        "model_class": f"{model_type.title()}Model",
        "engine": "transformers",
        "status": "audited",
        "versions": {},
        "seconds": 1.5,
        "verdicts": {"default": dict(passed), "reentrant": dict(passed)},
        "command": f"lowtide audit {model_type} --engine transformers",
    }
    return Record(model_type=model_type, **(usual | known))


def records() -> list[Record]:
    passed = {"outputs": "pass", "gradient values": "pass", "experts": "not applicable"}
    wrong = {"default": passed | {"gradient values": "fail"}, "reentrant": passed}
    doubtful = {"default": passed | {"outputs": "fail"}, "reentrant": passed}
    return [
        record("alpha"),
        record("broken", verdicts={}, status="failed to run", why="ValueError: no <batch> fits"),
        record("doubtful", verdicts=doubtful, unconfirmed=[failure("outputs")]),
        record("unbuilt", verdicts={}, status="not built", model_class=None, why="no rule"),
        record("zeta", verdicts=wrong, failures=[failure("gradient values")]),
    ]
