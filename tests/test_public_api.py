"""The public surface is small and changes only on purpose; importing it does nothing."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

import lowtide
from lowtide import errors, simdevice
from support import run_python

LOOK_AROUND = """
import json, logging, os, sys, torch, torch.utils.checkpoint
before = set(sys.modules)
environment, function = dict(os.environ), torch.utils.checkpoint.checkpoint
handlers = list(logging.getLogger().handlers)
import lowtide
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "environment": os.environ == environment,
    "patched": torch.utils.checkpoint.checkpoint is not function,
    "device": torch._C._get_privateuse1_backend_name(),
    "root_handlers": logging.getLogger().handlers == handlers,
}))
"""


def test_exported_names_are_pinned():
    assert lowtide.__all__ == [
        "Applied",
        "AuditReport",
        "DiskStore",
        "HostStore",
        "LowtideError",
        "Plan",
        "Policy",
        "Schedule",
        "Trace",
        "__version__",
        "apply",
        "audit",
        "checkpoint",
        "linear_cross_entropy",
        "linear_log_probs",
        "offload",
        "patch_torch",
        "plan",
        "simdevice",
        "tile",
        "trace",
    ]
    assert simdevice.__all__ == [
        "Settings",
        "Span",
        "Stats",
        "Toolchain",
        "Violation",
        "enable",
        "is_enabled",
        "reset",
        "stats",
        "timeline",
        "toolchain",
        "violations",
    ]
    for module in (lowtide, simdevice):
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("name", [name for name in lowtide.__all__ if name not in ("__version__", "simdevice")])
def test_a_public_name_says_where_it_is_imported_from(name: str):
    """In tracebacks, representations and pickles: `lowtide.Policy`, not the file that it happens to stand in."""
    thing = getattr(lowtide, name)
    assert (thing.__module__, thing.__qualname__) == ("lowtide", name)
    assert f"lowtide.{name}" in repr(thing) or not isinstance(thing, type)
    assert pickle.loads(pickle.dumps(thing)) is thing  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("text", ["none", "recompute+offload(host=8GiB)+tile; visual.*: recompute"])
def test_a_policy_can_be_pickled_and_copied(text: str):
    policy = lowtide.Policy.parse(text)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(policy, protocol)) == policy  # noqa: S301  (our own bytes)
    assert copy.deepcopy(policy) == policy
    assert repr(policy).startswith("Policy(recompute=")
    assert b"lowtide.policy" not in pickle.dumps(policy), "old pickles outlive a file that is moved"


def test_there_is_one_exception_tree():
    classes = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    assert len(classes) > 3
    assert all(issubclass(cls, lowtide.LowtideError) for cls in classes)


def test_importing_has_no_effects(tmp_path: Path):
    seen = json.loads(run_python(LOOK_AROUND, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache")).stdout)
    assert seen["environment"], "the environment is untouched"
    assert not seen["patched"]
    assert seen["root_handlers"]
    assert seen["device"] == "privateuseone", "no device is registered"
    assert list(tmp_path.rglob("*")) == [], "nothing is written"
    ours = {name.split(".")[0] for name in seen["modules"]}
    optional = {"transformers", "accelerate", "peft", "trl", "deepspeed", "typer", "rich", "psutil", "ninja", "numpy"}
    assert not ours & optional


def test_importing_loads_neither_torch_nor_the_engine():
    """Counted, not timed: what a name needs comes with its first use."""
    loaded = json.loads(run_python("import json, sys, lowtide; print(json.dumps(sorted(sys.modules)))").stdout)
    assert [name for name in loaded if name.split(".")[0] == "lowtide"] == ["lowtide", "lowtide._version"]
    assert "torch" not in loaded
    after = "import json, sys, lowtide; lowtide.Policy; print(json.dumps('lowtide.policy' in sys.modules))"
    assert json.loads(run_python(after).stdout) is True


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"lowtide.*no attribute 'aply'"):
        _ = lowtide.aply
    assert set(lowtide.__all__) <= set(dir(lowtide))


def test_the_library_logger_is_silent_by_default():
    import logging

    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("lowtide").handlers)


def test_the_package_is_typed():
    assert (Path(lowtide.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("cls", [errors.InvalidValueError, errors.MissingDependencyError, errors.SimBuildError])
def test_errors_have_a_builtin_parent_too(cls: type[Exception]):
    assert issubclass(cls, (ValueError, ImportError, RuntimeError))
