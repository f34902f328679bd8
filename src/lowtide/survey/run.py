"""Runs a survey: one process per architecture, a few at a time, each with a time limit.

Processes are forked from a server that has imported torch and transformers once. A crash or a hang costs one
architecture, never the survey; and what is done is on disk.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from lowtide.survey.one import Engine, survey_one
from lowtide.survey.records import Record, read_records, surveyed, unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lowtide.survey.records import Status

PRELOAD = ["torch._dynamo", "transformers", "transformers.modeling_utils", "lowtide.survey"]


class _Job:
    """One architecture in a process of its own."""

    def __init__(self, context: Any, model_type: str, engine: Engine) -> None:
        self._model_type, self._engine = model_type, engine
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(model_type, engine.value, sender), daemon=True)
        self._process.start()
        sender.close()
        self._started = time.monotonic()

    def poll(self, timeout: float) -> Record | None:
        """Its record, once there is one; a record of what went wrong, if there will be none."""
        record = None
        if self._receiver.poll():
            try:
                record = self._receiver.recv()
            except EOFError:
                self._process.join()
                record = self._unfinished("failed to run", f"the process died with code {self._process.exitcode}")
        elif time.monotonic() - self._started > timeout:
            record = self._unfinished("timed out", f"no result within {timeout:.0f} s")
        if record is not None:
            self._process.kill()
            self._process.join()
            self._receiver.close()
        return record

    def _unfinished(self, status: Status, why: str) -> Record:
        return unfinished(self._model_type, self._engine.value, status, why, time.monotonic() - self._started)


def _work(model_type: str, engine: str, sender: Any) -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of models that are told to do odd things; the verdicts tell
    try:
        record = survey_one(model_type, Engine(engine))
    except Exception as error:  # noqa: BLE001  whatever it was, it is one architecture's
        record = unfinished(model_type, engine, "failed to run", f"{type(error).__name__}: {error}")
    sender.send(record)
    sender.close()


def run_survey(
    model_types: Sequence[str],
    engine: Engine,
    path: Path,
    *,
    workers: int = 2,
    timeout: float = 180,
    resume: bool = False,
    on_record: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Audit all of these, writing a line for each; with `resume`, those that the file has already are left out.

    Without it, the file's records of these under this engine go; those of others stay.
    """
    _prepare(path, engine, () if resume else model_types)
    done = surveyed(path, engine.value)
    waiting = [model_type for model_type in model_types if model_type not in done]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    jobs: list[_Job] = []
    with path.open("a") as file:
        while waiting or jobs:
            while waiting and len(jobs) < workers:
                jobs.append(_Job(context, waiting.pop(0), engine))
            for job in list(jobs):
                record = job.poll(timeout)
                if record is not None:
                    jobs.remove(job)
                    file.write(record.to_json() + "\n")
                    file.flush()
                    on_record(record)
            time.sleep(0.02)
    wanted = set(model_types)
    return [r for r in read_records(path) if r.engine == engine.value and r.model_type in wanted]


def _prepare(path: Path, engine: Engine, anew: Sequence[str]) -> None:
    """Whole lines, to which others can be added: a run that was killed may have left half a line. Without those of what
    is surveyed anew."""
    gone = set(anew)
    kept = [record for record in read_records(path) if record.engine != engine.value or record.model_type not in gone]
    path.write_text("".join(f"{record.to_json()}\n" for record in kept))
