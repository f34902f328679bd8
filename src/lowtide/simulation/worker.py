"""The worker process, `python -m lowtide.simulation.worker`: it simulates for a `SimulatorProcess`.

Its patches, its memory and its crashes do not reach the user's process. It reads pickled tasks from its standard input
and writes pickled replies to what was its standard output; whatever the model's code prints goes to standard error. It
ends when its input does: a killed parent leaves no worker behind.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import pickle
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from lowtide.errors import LowtideError
from lowtide.simulation.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Answer tasks until there are no more."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tasks = sys.stdin.buffer
    simulator: Simulator | None = None
    while (task := _read_task(tasks)) is not None:
        name, arguments = task
        if name == "open":
            simulator = _answer(replies, functools.partial(Simulator, *arguments), operator.attrgetter("summary"))
            gc.freeze()  # modules and classes, hundreds of thousands, that every collection would look through again
        elif simulator is not None:
            _answer(replies, functools.partial(getattr(simulator, name), **arguments), lambda result: result)


def _read_task(tasks: BinaryIO) -> Any:
    try:
        return pickle.load(tasks)  # noqa: S301  (from our own parent)
    except EOFError:
        return None


def _answer(replies: BinaryIO, run: Callable[[], Any], reply: Callable[[Any], Any]) -> Any:
    answer: tuple[str, Any, str | None]
    """How it went, what came of it, and where somebody else's code failed."""
    try:
        result = run()
        answer = ("ok", reply(result), None)
    except LowtideError as error:
        result, answer = None, ("refused", (type(error).__name__, str(error)), _trace_of(error.__cause__))
    except Exception as error:  # noqa: BLE001  (the model's own code may raise anything, and the parent must hear of it)
        result, answer = None, ("failed", f"{type(error).__name__}: {error}", _trace_of(error))
    replies.write(pickle.dumps(answer))
    replies.flush()
    return result


def _trace_of(error: BaseException | None) -> str | None:
    """Write down where somebody else's code failed; the parent logs it. Of our own refusals there is nothing to see."""
    return None if error is None else "".join(traceback.format_exception(error))


if __name__ == "__main__":
    main()
