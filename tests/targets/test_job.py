"""What a job may be."""

from __future__ import annotations

import pytest

from lowtide.errors import InvalidValueError
from lowtide.targets.job import Job, make_job, parse_images


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"tokens": 8, "engine": "zero4"}, "unknown engine 'zero4'"),
        ({"tokens": 8, "ranks": 4}, "4 ranks need an engine"),
        ({"tokens": 8, "engine": "ddp"}, "needs ranks=2 or more"),
        ({"tokens": 8, "base": "4bit"}, "cannot be trained itself"),
        ({"base": "4bit", "lora": 8, "engine": "zero3", "ranks": 2}, "a 4-bit base with zero3 is not modelled"),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 6, "tp": 4}, "6 ranks cannot be divided into groups of tp=4"),
        ({"ranks": 4, "tp": 2}, "2 ranks need an engine"),
        ({"ranks": 2, "tp": 2, "engine": "ddp"}, "2 ranks leave none to share batches with"),
        ({"tp": 0}, "tp must be 1 or more"),
        ({"ranks": 2, "tp": 2, "lora": 8}, "tp with adapters is not modelled"),
        ({"ranks": 4, "tp": 2, "engine": "zero3"}, "tp with zero3 is not modelled"),
        ({"ranks": 4, "tp": 2, "sp": 2, "engine": "ddp"}, "sp with tp is not modelled"),
        ({"ranks": 2, "sp": 2, "engine": "ddp", "images": (1, 64, 64)}, "sp with images is not modelled"),
        ({"ranks": 3, "sp": 3, "engine": "ddp"}, "8 tokens cannot be divided into 3 parts"),
        ({"ranks": 4, "cp": 2, "tp": 2, "engine": "ddp"}, "cp with tp is not modelled"),
        ({"ranks": 2, "cp": 2, "engine": "ddp", "images": (1, 64, 64)}, "cp with images is not modelled"),
        ({"ranks": 2, "pp": 2}, r"pp \(pipeline parallelism\) is not modelled"),
        ({"microbatches": 4}, "give pp=2 or more too"),
    ],
)
def test_ranks_that_cannot_share_a_batch_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(InvalidValueError, match=message):
        Job(tokens=8, **settings)


def test_ranks_are_those_that_share_a_batch_unless_told():
    def made(**settings: object) -> Job:
        return make_job(**{"tokens": 8, "images": None, "engine": None, "ranks": None, **settings})

    assert (made().ranks, made().engine) == (1, "single")
    assert (made(tp=4).ranks, made(tp=4).engine, made(tp=4).parallelism) == (4, "single", "tp 4")
    assert (made(sp=4).engine, made(sp=4).length, made(sp=4).parallelism) == ("ddp", 2, "ddp, sp 4")
    wide = made(tp=2, ranks=8, engine="fsdp2")
    assert (wide.data_ranks, wide.shared_by, wide.parallelism) == (4, 2, "fsdp2, tp 2")
