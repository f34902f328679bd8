"""Runs a survey: one process per architecture, a few at a time, each with a time limit.

Processes are forked from a server that has imported torch and transformers once. A crash or a hang costs one
architecture, never the survey; and what is done is on disk.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from lowtide.survey.one import Engine, survey_one
from lowtide.survey.records import Record, read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PRELOAD = ["torch._dynamo", "transformers", "transformers.modeling_utils", "lowtide.survey"]


class _Job:
    """One architecture in a process of its own."""

    def __init__(self, context: Any, model_type: str, engine: Engine) -> None:
        self.model_type = model_type
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(model_type, engine.value, sender), daemon=True)
        self._process.start()
        sender.close()
        self._started = time.monotonic()

    def poll(self, timeout: float, engine: Engine) -> Record | None:
        """Its record, once there is one; a record of what went wrong, if there will be none."""
        record = None
        if self._receiver.poll():
            try:
                record = self._receiver.recv()
            except EOFError:
                self._process.join()
                record = _broken(self, engine, "failed to run", f"the process died with code {self._process.exitcode}")
        elif time.monotonic() - self._started > timeout:
            record = _broken(self, engine, "timed out", f"no result within {timeout:.0f} s")
        if record is not None:
            self._process.kill()
            self._process.join()
            self._receiver.close()
        return record

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def _broken(job: _Job, engine: Engine, status: Any, why: str) -> Record:
    return Record(
        model_type=job.model_type,
        engine=engine.value,
        status=status,
        versions={},
        command=f"lowtide audit {job.model_type} --engine {engine.value}",
        why=why,
        seconds=round(job.seconds, 2),
    )


def _work(model_type: str, engine: str, sender: Any) -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of models that are told to do odd things; the verdicts tell
    try:
        record = survey_one(model_type, Engine(engine))
    except Exception as error:  # noqa: BLE001  whatever it was, it is one architecture's
        record = Record(
            model_type=model_type,
            engine=engine,
            status="failed to run",
            versions={},
            command=f"lowtide audit {model_type} --engine {engine}",
            why=f"{type(error).__name__}: {error}",
        )
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
    """Audit all of these, writing a line for each; with `resume`, those that the file has already are left out."""
    done = {record.model_type for record in read_records(path) if record.engine == engine.value} if resume else set()
    if not resume:
        path.unlink(missing_ok=True)
    elif path.exists() and not path.read_text().endswith("\n"):
        path.write_text(path.read_text() + "\n")  # after the half line of a run that was killed
    waiting = [model_type for model_type in model_types if model_type not in done]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    jobs: list[_Job] = []
    with path.open("a") as file:
        while waiting or jobs:
            while waiting and len(jobs) < workers:
                jobs.append(_Job(context, waiting.pop(0), engine))
            for job in list(jobs):
                record = job.poll(timeout, engine)
                if record is not None:
                    jobs.remove(job)
                    file.write(record.to_json() + "\n")
                    file.flush()
                    on_record(record)
            time.sleep(0.02)
    wanted = set(model_types)
    return [r for r in read_records(path) if r.engine == engine.value and r.model_type in wanted]
