"""What a survey audits: the classes of a type that differ in more than their heads, and features that are turned on."""

from __future__ import annotations

import json

import pytest

import lowtide
import lowtide_zoo as zoo
from lowtide.auditing import audit
from lowtide_zoo.records import Record, command_for, read_records
from lowtide_zoo.subjects import Subject, public_classes, subjects_of
from lowtide_zoo.survey import Engine, find_subjects, survey_one
from lowtide_zoo.variants import SEVERAL_IMAGES, variants_of, with_variant
from support import needs_zoo
from support.foreign_warnings import ignore_warnings_of

pytestmark = [needs_zoo, ignore_warnings_of("torch", "transformers")]


def classes(model_type: str) -> set[str]:
    return {subject.model_class for subject in subjects_of(model_type, every_class=True, variants=False)}


def test_heads_on_one_model_are_audited_once():
    assert len(public_classes("llama")) == 5
    assert classes("llama") == {""}


def test_classes_that_are_put_together_differently_are_all_audited():
    assert classes("blip") == {
        "BlipForConditionalGeneration",
        "BlipForQuestionAnswering",
        "BlipForImageTextRetrieval",
        "BlipModel",
    }


def test_a_survey_looks_for_its_subjects_in_processes():
    seen = []
    found = find_subjects(["qwen2", "blip"], every_class=True, variants=True, workers=2, on_type=seen.append)
    assert found == [
        Subject("qwen2"),
        Subject("qwen2", variant="sliding-window"),
        *subjects_of("blip", every_class=True, variants=True),
    ]
    assert seen == ["qwen2", "blip"]


def test_a_class_beside_the_usual_one_is_audited_by_name():
    record = survey_one(Subject("blip", "BlipModel"), Engine.TRANSFORMERS)
    assert (record.model_class, record.subject_class) == ("BlipModel", "BlipModel")
    assert "default: adapters on a frozen base" in {f"{f['mode']}: {f['name']}" for f in record.failures}
    assert record.command == "lowtide audit blip --class BlipModel --engine transformers"


def test_records_of_one_type_stay_apart(tmp_path):
    subjects = [Subject("blip"), Subject("blip", "BlipModel"), Subject("blip", variant=SEVERAL_IMAGES)]
    path = tmp_path / "r.jsonl"
    records = [
        Record(
            model_type=subject.model_type,
            subject_class=subject.model_class,
            variant=subject.variant,
            engine="lowtide",
            status="audited",
            versions={},
            command=command_for(subject, "lowtide", "recompute"),
        )
        for subject in subjects
    ]
    path.write_text("".join(f"{record.to_json()}\n" for record in [*records, records[0]]))
    assert [record.subject for record in read_records(path)] == subjects
    assert records[2].command == "lowtide audit blip --variant several-images --policy recompute"
    older = json.loads(records[0].to_json())
    del older["subject_class"], older["variant"]
    assert Record(**older).subject == Subject("blip")


def test_variants_are_those_that_a_configuration_leaves_off():
    found = {subject.variant for subject in subjects_of("gemma4", every_class=False, variants=True)}
    assert found == {"", "kv-sharing", "moe", SEVERAL_IMAGES}
    with pytest.raises(zoo.CannotBuildError, match="nothing to turn on for moe"):
        zoo.find("llama", variant="moe")
    with pytest.raises(zoo.CannotBuildError, match="no variant 'rope': choose from kv-sharing"):
        zoo.find("llama", variant="rope")


def test_shared_keys_and_values_reach_the_model():
    plain, shared = (zoo.find("gemma4_text", variant=variant) for variant in (None, "kv-sharing"))
    assert "k_proj.weight" in " ".join(name for name, _ in plain.build().named_parameters() if ".layers.3." in name)
    assert "k_proj" not in " ".join(name for name, _ in shared.build().named_parameters() if ".layers.3." in name)
    model, batch = shared.build(), shared.batch()
    report = audit(
        model, batch, configure=lambda m: lowtide.apply(m, "recompute"), checks=["recomputed", "gradient values"]
    )
    assert report.ok, report
    assert report["gradient values"].evidence["identical"]


def test_every_second_layer_gets_a_window():
    model = zoo.find("qwen2", variant="sliding-window").build()
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 8]


@pytest.mark.parametrize("model_type", ["ministral3", "smollm3", "mellum", "dots1"])
def test_a_window_changes_what_a_model_computes_however_its_configuration_says_it(model_type):
    """`sliding_window` alone, `use_sliding_window`, or layers that are all full although there is a window."""
    plain, windowed = (zoo.find(model_type, variant=variant) for variant in (None, "sliding-window"))
    losses = []
    for tiny_model in (plain, windowed):
        model = tiny_model.build().eval()
        losses.append(model(**tiny_model.batch()).loss.item())
    assert losses[0] != losses[1]
    assert "sliding-window" not in variants_of(windowed.config), "it is on"


def test_one_expert_becomes_several():
    config = with_variant(zoo.find("hunyuan_v1_moe").config, "moe")
    assert (config.num_experts, config.moe_topk) == (4, 2)
    assert "moe" not in variants_of(zoo.find("vitpose_backbone").config), "its experts are chosen by the batch"


def test_several_images_stand_in_each_row():
    one, two = (zoo.find("llava", variant=variant).batch() for variant in (None, SEVERAL_IMAGES))
    assert len(two["pixel_values"]) == 2 * len(one["pixel_values"])
    token = zoo.find("llava").config.image_token_id
    assert (two["input_ids"] == token).sum() == 2 * (one["input_ids"] == token).sum()
