"""`python -m lowtide`, where the `lowtide` command is not on the path."""

from __future__ import annotations

from lowtide.cli import app

app()
