"""Finds the code in pages of the documentation."""

from __future__ import annotations

import re

CODE = re.compile(r"```python\n(?P<code>.*?)```(?:\n+```text\n(?P<output>.*?)```)?", flags=re.DOTALL)
