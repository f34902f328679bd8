"""Reads and writes sizes as people do: `"24GiB"` of memory, `"128k"` tokens.

Every size that a user can pass goes through here, so all of Lowtide reads and prints them the same way. Memory takes
binary (`KiB`, `MiB`, `GiB`, `TiB`) and decimal (`KB`, `MB`, `GB`, `TB`) units, which differ by up to 10 %. Tokens take
`k` and `M`, and both are powers of two, because that is what "128k context" means: 131072.
"""

from __future__ import annotations

import math
import re

from lowtide.errors import InvalidValueError

_BYTE_UNITS = {"": 1, "b": 1}
_BYTE_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_BYTE_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}

_STEP = 1024
_PRINTED_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}

_NUMBER_AND_UNIT = re.compile(r"\s*(?P<number>\d+(?:[_,]\d+)*(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Return the bytes that a number or a string means, such as `"24GiB"`, `"500 MB"` or `"4096"`."""
    return _parse(size, _BYTE_UNITS, what="memory size", example='"24GiB" or "500MB"')


def parse_tokens(count: int | str) -> int:
    """Return the tokens that a number or a string means, such as `"128k"` (131072) or `"1M"` (1048576)."""
    return _parse(count, _TOKEN_UNITS, what="token count", example='"128k" or 131072')


def parse_share(share: float | str) -> float:
    """Return the share that a number or a string means: `0.05`, `"5%"`. It must be less than all of it."""
    text = str(share).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if isinstance(share, bool) or not 0 <= found < 1:
        raise InvalidValueError(f"{share!r} is not a share: write it like 0.05 or '5%'")
    return found


def format_bytes(size: float) -> str:
    """Write a size with a binary unit and about three digits: `512 B`, `1.5 GiB`, `640 MiB`."""
    amount, power = abs(size), 0
    while amount >= _STEP and power + 1 < len(_PRINTED_UNITS):
        amount, power = amount / _STEP, power + 1
    decimals = 0 if power == 0 or amount >= 100 else 2  # noqa: PLR2004  (three digits)
    number = f"{amount:.{decimals}f}"
    if decimals:
        number = number.rstrip("0").rstrip(".")
    return f"{'-' if size < 0 else ''}{number} {_PRINTED_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Write a duration with about three digits: `45 µs`, `12.3 ms`, `1.95 s`, `32.5 min`."""
    for unit, length in (("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length * (10 if unit == "min" else 1):
            return f"{seconds / length:.3g} {unit}" if seconds < 999.5 * length else f"{seconds / length:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _parse(value: int | str, units: dict[str, int], *, what: str, example: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidValueError(f"{what} must be a whole number or a string such as {example}, not {value!r}")
    if isinstance(value, int):
        amount: float = value
    else:
        match = _NUMBER_AND_UNIT.fullmatch(value)
        if match is None or match["unit"].lower() not in units:
            raise InvalidValueError(f"{value!r} is not a {what}: write it like {example}")
        unit = units[match["unit"].lower()]
        amount = float(re.sub("[_,]", "", match["number"])) * unit
        amount = (
            math.floor(amount) if unit > 1 else amount
        )  # "44.4GiB" is not a whole number of bytes, but clear enough
    if amount < 0:
        raise InvalidValueError(f"{what} must not be negative, got {value!r}")
    if amount != int(amount):
        raise InvalidValueError(f"{value!r} is not a whole {what}: it comes to {amount}")
    return int(amount)
