"""What a job may be."""

from __future__ import annotations

import pytest

from lowtide.errors import InvalidValueError
from lowtide.targets.job import Job, parse_images


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"tokens": 8, "engine": "zero4"}, "unknown engine 'zero4'"),
        ({"tokens": 8, "ranks": 4}, "4 ranks need an engine"),
        ({"tokens": 8, "engine": "ddp"}, "needs ranks=2 or more"),
        ({"tokens": 8, "base": "4bit"}, "cannot be trained itself"),
        ({"tokens": 8, "lora": 0}, "rank of the adapters"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(InvalidValueError, match=message):
        Job(**settings)


def test_pictures_are_written_as_count_and_size():
    assert parse_images("4x1024x768") == (4, 1024, 768)
    with pytest.raises(InvalidValueError, match="COUNTxHEIGHTxWIDTH"):
        parse_images("four")
