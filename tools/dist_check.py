"""Installs a wheel as a user would, in a clean environment outside of the repository, and uses it there.

    python tools/dist_check.py dist

First without any extra: importing, `lowtide --help`, `lowtide doctor`, an audit, and a plan, which says what it needs.
Then with the extras `sim` and `hf`: a small plan, a tiny Llama trains under a policy on the emulated device, which is
compiled into the user's cache, and `lowtide demo` runs. The versions are those of constraints.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent

IMPORTED = "import lowtide, sys; assert 'torch' not in sys.modules; print(lowtide.__file__)"

AUDITED = """
import torch
from torch import nn
import lowtide

model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))
report = lowtide.audit(model, (torch.randn(8, 16),), configure=lambda m: lowtide.apply(m, "recompute"))
assert report.ok, str(report)
"""

PLANNED = ("plan", "Llama-3.2-1B", "--tokens", "1k", "--device", "L40S", "--lora", "8", "--policy", "recompute")

TRAINED = """
import torch, transformers
import lowtide
from lowtide import simdevice

simdevice.enable()
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
model = transformers.LlamaForCausalLM(config).to("sim").train()
ids = torch.randint(0, 128, (2, 64)).to("sim")
with lowtide.apply(model, "recompute+offload+tile") as applied:
    model(input_ids=ids, labels=ids).loss.backward()
report = applied.report()
print(report)
assert [region.recomputes for region in report.regions] == [1] * 4
assert [region.packed_bytes > 0 for region in report.regions] == [True] * 3 + [False]
assert not simdevice.violations()
print(simdevice.toolchain().cache)
"""


class CleanEnvironment:
    """A virtual environment, a home and a working directory of its own: nothing of the repository is in reach."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "venv/bin"
        self.home = directory / "home"
        self.home.mkdir()
        unset = ("PYTHONPATH", "VIRTUAL_ENV", "LOWTIDE_CACHE", "XDG_CACHE_HOME")
        self.variables = {name: value for name, value in os.environ.items() if name not in unset}
        venv.create(directory / "venv", with_pip=True)

    def install(self, *requirements: str) -> None:
        """Downloads come from pip's usual cache; only what is checked has a home of its own."""
        command = [self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-c", ROOT / "constraints.txt", *requirements], check=True)

    @property
    def size(self) -> int:
        """Return the bytes that all packages take on disk."""
        return sum(path.lstat().st_size for path in self.bin.parent.rglob("*") if path.is_file())

    def refusal(self, program: str, *arguments: str) -> str:
        """Return what a program says that refuses to run."""
        variables = self.variables | {"HOME": str(self.home)}
        command = [self.bin / program, *arguments]
        done = subprocess.run(command, env=variables, cwd=self.home, capture_output=True, text=True, check=False)
        _require(done.returncode == 2, f"{program} {' '.join(arguments)}: exit code {done.returncode}")  # noqa: PLR2004
        return done.stderr

    def run(self, program: str, *arguments: str) -> str:
        variables = self.variables | {"HOME": str(self.home)}
        command = [self.bin / program, *arguments]
        done = subprocess.run(command, env=variables, cwd=self.home, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{program} {' '.join(arguments)[:60]}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout


def check(wheel: Path, directory: Path) -> None:
    clean = CleanEnvironment(directory)
    started = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {what}", flush=True)

    clean.install("torch")  # first, as the Makefile does: other packages then find it there
    clean.install(str(wheel))
    tell("installed without extras")
    place = clean.run("python", "-c", IMPORTED).strip()
    _require(place.startswith(str(directory)), f"imported {place}, which is not what was installed")
    for verb in ("demo", "audit", "plan", "calibrate", "doctor"):
        _require(verb in clean.run("lowtide", "--help"), f"lowtide --help does not name {verb}")
        clean.run("lowtide", verb, "--help")
    clean.run("python", "-W", "error", "-c", AUDITED)
    _require("torch" in clean.run("lowtide", "doctor"), "lowtide doctor does not name torch")
    _require(not (clean.home / ".cache/lowtide").exists(), "something was written to the cache before it was asked for")
    told = clean.refusal("lowtide", *PLANNED)
    _require("uvx --from 'lowtide[hf]' lowtide" in told, f"a plan without transformers does not say what to do: {told}")
    tell("imports, lowtide --help, lowtide doctor and an audit work")
    clean.install(f"{wheel}[sim,hf]")
    tell(f"installed with sim and hf: {clean.size / 1e9:.2f} GB on disk")
    _require("lowtide.apply(model" in clean.run("lowtide", *PLANNED), "lowtide plan prints no line to paste")
    tell("a plan works")
    output = clean.run("python", "-W", "error::UserWarning:lowtide", "-c", TRAINED)
    cache = Path(output.splitlines()[-1])
    _require(cache.is_relative_to(clean.home / ".cache/lowtide"), f"the device was compiled in {cache}")
    tell("compiled the emulated device in the user's cache, and trained there")
    print(output)
    print(clean.run("lowtide", "demo"))
    tell("lowtide demo")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


if __name__ == "__main__":
    (built,) = Path(sys.argv[1]).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as temporary:
        check(built, Path(temporary).resolve())
