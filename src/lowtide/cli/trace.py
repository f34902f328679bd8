"""`lowtide trace`: runs one training step of a model of yours, and shows what it held in memory."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.output import check_output, give_up, write

if TYPE_CHECKING:
    from torch import nn

    from lowtide.tracing import Trace

_FORMATS = ("text", "json", "html", "chrome")


def _parse_format(word: str) -> str:
    if word not in _FORMATS:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(_FORMATS)}.")
    return word


def trace(
    factory: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="A function that returns (model, batch).", show_default=False),
    ],
    policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Train under this policy: see `lowtide policies`.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Move the model and the batch there first, e.g. cuda.")
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--format",
            parser=_parse_format,
            metavar=f"<{'|'.join(_FORMATS)}>",
            help="How to print the trace. chrome is for ui.perfetto.dev.",
        ),
    ] = "text",
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the trace to this file instead.")
    ] = None,
) -> None:
    """Run one training step, and show what it holds in memory, by region and over time.

    Exit code 0: the step ran. 2: it could not be run.

    [bold]lowtide trace my_package.training:build --policy recompute --format html -o trace.html[/]
    """
    from lowtide.errors import LowtideError
    from lowtide.targets.target import is_factory

    check_output(to)
    if not is_factory(factory):
        give_up(f"{factory!r} is not MODULE:FACTORY, a module and a function in it that returns (model, batch)")
    try:
        seen = _trace_step(factory, policy, device)
        text = {"text": seen.__str__, "json": seen.to_json, "html": seen.to_html, "chrome": seen.to_chrome}[output]()
    except LowtideError as error:
        give_up(str(error))
    write(text, to)


def _trace_step(factory: str, policy: str | None, device: str | None) -> Trace:
    import torch

    import lowtide
    from lowtide.errors import InvalidValueError
    from lowtide.objective import objective
    from lowtide.targets.batches import put_on
    from lowtide.targets.models import call_factory

    model, batch, options = call_factory(factory)
    if batch is None:
        raise InvalidValueError(f"{factory} returns no batch to train on: return (model, batch)")
    if device is not None:
        model, batch = model.to(device), put_on(torch.device(device), batch)
    model.train()
    if policy is not None:
        lowtide.apply(model, policy)
    with lowtide.trace(model) as seen:
        objective(_call(model, batch), options.get("loss")).backward()  # type: ignore[no-untyped-call]
    return seen


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)
