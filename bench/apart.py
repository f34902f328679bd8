"""A call in a forked process: what it patches, enables or breaks dies with it.

The caller has imported what is expensive and run nothing in parallel, so a fork costs a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


class CannotRunError(Exception):
    """The call raised; the message is what it said, in one line."""


def apart(call: Callable[..., Any], *args: object) -> Any:
    """What the call returns."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, call, args))
    process.start()
    sender.close()
    try:
        done, value = receiver.recv()
    except EOFError:
        done, value = False, "its process died"
    process.join()
    if not done:
        raise CannotRunError(value)
    return value


def _send(sender: Connection, call: Callable[..., Any], args: tuple[object, ...]) -> None:
    try:
        sender.send((True, call(*args)))
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is the result)
        sender.send((False, one_line(error)))
    os._exit(0)  # no exit handlers: they are the parent's


def one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
