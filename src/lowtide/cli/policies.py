"""`lowtide policies`: prints the language of policies, with examples."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WORDS = {
    "none": "keep everything, as plain training does",
    "recompute": "keep each layer's input, and run the layer again in backward",
    "recompute(keep=attention)": "the same, but keep what attention returned: it is small, and dear to run again",
    "recompute(every=2)": "only every second layer of a stack",
    "offload": "what is kept waits in host memory, and comes back before backward needs it",
    "offload(host=8GiB, disk=/scratch)": "8 GiB of it in host memory, and the rest on a disk",
    "tile": "attention, MLPs and the loss run on some thousand tokens at a time, with the same gradients",
    "tile(mlp, loss)": "only these; tile(loss) never makes all the logits at once",
    "tile(mlp, tokens=16k)": "with so many tokens in a tile",
}
"""What can be written between plus signs, and what it does."""

EXAMPLES = {
    "recompute+offload": "the least memory without tiles",
    "recompute+offload+tile": "the least memory",
    "recompute; visual.*: none": "a rule: a glob on the names of layers, a colon, and their policy",
    "tile(loss); layers.0-23: recompute": "the first 24 layers are recomputed, the others are not",
}
"""Whole policies."""


def policies() -> None:
    """Explain the language in which policies are written, with examples."""
    console = Console(highlight=False)
    console.print(_table("word", WORDS))
    console.print(
        "\nPlus signs join words. Rules for some layers follow after semicolons; the last one that fits counts:\n"
    )
    console.print(_table("policy", EXAMPLES))
    console.print(
        "\nWords of other libraries are understood too: gradient_checkpointing, activation_offloading, unsloth, ..."
    )
    console.print(
        '\n[bold]lowtide plan MODEL[/] finds the best one, [bold]lowtide.apply(model, "...")[/] puts it on a model.'
    )


def _table(heading: str, rows: dict[str, str]) -> Table:
    table = Table(heading, "what it does", box=None, pad_edge=False, header_style="dim")
    for text, meaning in rows.items():
        table.add_row(f"[bold]{escape(text)}[/]", meaning)
    return table
