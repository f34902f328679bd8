"""Trains under stress: streams that are late at random, an allocator full of holes, several threads at once.

None of it changes what is computed, so gradients must be bit-identical to the plain model's without stress. A wait that
is missing in an engine reads bytes that are not there yet, or that are already somebody else's.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from typing import TYPE_CHECKING, Any

import torch

import lowtide
from lowtide import simdevice
from lowtide._torch import sleep_on_cuda
from lowtide.auditing.result import Verdict
from lowtide.regions import find_regions
from lowtide.selftest.models import build
from lowtide.selftest.noise import OWN_NOISE, PlainRuns
from lowtide.selftest.record import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.auditing.comparison import Gradients
    from lowtide.selftest.bench import Bench
    from lowtide.selftest.findings import Findings
    from lowtide.selftest.models import Batch
    from lowtide.selftest.noise import Judgement

POLICY = "recompute+offload"
_THREADS = 3
_CYCLES = 4_000_000
"""The longest that a stream sleeps, in cycles of a GPU: a few milliseconds."""
_SQUARE = 192
"""Where a device cannot sleep, it multiplies matrices of this size up to four times."""
_HOLES = 256


def run(bench: Bench, found: Findings) -> None:
    """Run each kind of stress a number of times."""
    prepared = found.attempt("steps without stress", _prepare, bench)
    if prepared is None:
        return
    model, batch, plain = prepared
    kinds: dict[str, Callable[[Bench, nn.Module, Batch, int], list[Gradients]]] = {
        "an allocator full of holes": _with_holes,
        "several threads": _in_threads,
    }
    if bench.has_streams:
        kinds = {"streams that are late": _with_late_streams, **kinds}
    for name, stress in kinds.items():
        found.add(name, _judge, bench, name, stress, (model, batch, plain))


def _prepare(bench: Bench) -> tuple[nn.Module, Batch, PlainRuns]:
    model, batch = build("llama")
    model = model.to(bench.device)
    batch = {name: tensor.to(bench.device) for name, tensor in batch.items()}
    return model, batch, PlainRuns(lambda: _gradients(model, batch))


def _judge(
    bench: Bench,
    name: str,
    stress: Callable[[Bench, nn.Module, Batch, int], list[Gradients]],
    subject: tuple[nn.Module, Batch, PlainRuns],
) -> Row:
    model, batch, plain = subject
    judged: list[Judgement] = []
    steps = 0
    if bench.is_emulated:
        simdevice.reset()
    while steps < bench.work.stresses and not (steps and bench.limits.reached):
        bench.show(f"{name}: {steps + 1} of {bench.work.stresses}")
        judged += [plain.judge(found) for found in stress(bench, model, batch, steps)]
        steps += 1
    broken = [str(violation) for violation in simdevice.violations()] if bench.is_emulated else []
    wrong = [judgement for judgement in judged if judgement.verdict is Verdict.FAIL]
    unknown = [judgement for judgement in judged if judgement.verdict is Verdict.INCONCLUSIVE]
    if wrong:
        verdict, said = Verdict.FAIL, f"{len(wrong)} steps have wrong gradients: {wrong[0].summary}"
    elif broken:
        verdict, said = Verdict.FAIL, f"the device saw {len(broken)} broken rules"
    elif unknown:
        verdict, said = Verdict.INCONCLUSIVE, unknown[0].summary
    else:
        identical = all(judgement.identical for judgement in judged)
        verdict, said = Verdict.PASS, f"{'bit-identical' if identical else OWN_NOISE} in {steps} steps"
    return Row(
        name=name,
        verdict=verdict,
        summary=said,
        figures={
            "steps": steps,
            "wrong": len(wrong),
            "largest_error": max(judgement.largest_error for judgement in judged),
            "broken_rules": broken[:3],
        },
    )


def _gradients(model: nn.Module, batch: Batch) -> Gradients:
    model.zero_grad()
    loss: Any = model(**batch).loss
    loss.backward()
    found = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def _with_late_streams(bench: Bench, model: nn.Module, batch: Batch, seed: int) -> list[Gradients]:
    chance = random.Random(seed)  # noqa: S311
    with lowtide.apply(model, POLICY) as applied:
        sleeper = _Sleeper(bench, chance, applied)
        with sleeper.around(model):
            return [_gradients(model, batch)]


class _Sleeper:
    """Makes the compute stream or one of the copy streams late, at random, before each region."""

    def __init__(self, bench: Bench, chance: random.Random, applied: lowtide.Applied) -> None:
        self._chance = chance
        self._device = bench.device
        self._store: Any = applied.store
        self._matrices: dict[Any, torch.Tensor] = {}

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Sleep before every forward of a region, and before every backward of one."""
        handles: list[Any] = []
        for region in find_regions(model):
            handles.append(region.module.register_forward_pre_hook(self._sleep))
            handles.append(region.module.register_full_backward_pre_hook(self._sleep))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            torch.accelerator.synchronize(self._device)

    def _sleep(self, *_arguments: Any) -> None:
        streams = self._store.copy_streams.on(self._device)
        stream = self._chance.choice([*streams, torch.accelerator.current_stream(self._device)])
        with stream:
            if self._device.type == "cuda":
                sleep_on_cuda(self._chance.randrange(_CYCLES))
                return
            for _ in range(self._chance.randrange(1, 5)):
                self._matrix(stream).matmul(self._matrix(stream))

    def _matrix(self, stream: torch.Stream) -> torch.Tensor:
        """Return a matrix that was made on this stream, so that no other stream has to be waited for."""
        if stream not in self._matrices:
            self._matrices[stream] = torch.ones(_SQUARE, _SQUARE, device=self._device)
        return self._matrices[stream]


def _with_holes(bench: Bench, model: nn.Module, batch: Batch, seed: int) -> list[Gradients]:
    chance = random.Random(seed)  # noqa: S311
    blocks = [torch.empty(chance.randrange(512, 2**18), dtype=torch.uint8, device=bench.device) for _ in range(_HOLES)]
    del blocks[::2]
    with lowtide.apply(model, bench.offload(POLICY)):
        found = [_gradients(model, batch)]
    del blocks
    return found


def _in_threads(bench: Bench, model: nn.Module, batch: Batch, seed: int) -> list[Gradients]:
    """Train a copy in each of several threads, each on a stream of its own where there are streams."""
    del seed
    found: list[Gradients] = []
    errors: list[BaseException] = []

    def work(twin: nn.Module) -> None:
        try:
            with _stream_of_its_own(bench):
                found.append(_gradients(twin, batch))
        except BaseException as error:  # noqa: BLE001  (raised again below, in the thread that asked)
            errors.append(error)

    with contextlib.ExitStack() as stack:
        twins = [copy.deepcopy(model) for _ in range(_THREADS)]
        for twin in twins:
            stack.enter_context(lowtide.apply(twin, bench.offload(POLICY)))
        if bench.device.type != "cpu":
            torch.accelerator.synchronize(bench.device)
        threads = [threading.Thread(target=work, args=(twin,)) for twin in twins]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if bench.device.type != "cpu":
            torch.accelerator.synchronize(bench.device)
    if errors:
        raise errors[0]
    return found


@contextlib.contextmanager
def _stream_of_its_own(bench: Bench) -> Iterator[None]:
    if not bench.has_streams:
        yield
        return
    own = torch.Stream(device=bench.device)
    with own:
        yield
    own.synchronize()
