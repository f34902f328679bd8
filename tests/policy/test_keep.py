"""`recompute(keep=...)` in all forms of a policy: read, written, merged, and refused with a hint."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import lowtide
from lowtide import Policy
from lowtide.errors import InvalidValueError


def kept(*words: str, **settings: object) -> Policy:
    return Policy(recompute=True, keep=words, **settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("recompute(keep=attention)", kept("attention")),
        ("recompute( keep = attention + matmul )", kept("attention", "matmul")),
        ("recompute(keep=matmul+attention)", kept("attention", "matmul")),
        ("recompute(keep=attention+attention)", kept("attention")),
        ("recompute(keep=[attention])", kept("attention")),
        ("recompute(keep=aten.mm.default)", kept("aten.mm.default")),
        ("recompute(keep=[aten.mm.default, mylib::op])", kept("aten.mm.default", "mylib::op")),
        ("recompute(keep=[mylib::op, attention])", kept("attention", "mylib::op")),
        ("recompute(every=2, keep=[aten.mm, aten.bmm])", kept("aten.mm", "aten.bmm", every=2)),
        ("recompute(keep=[aten.mm, aten.bmm], every=2)", kept("aten.mm", "aten.bmm", every=2)),
        ("recompute(keep=attention)+offload", kept("attention", offload="host")),
        (
            "recompute(keep=attention+matmul)+offload(disk=/a+b)+tile(mlp)",
            kept("attention", "matmul", offload="disk", disk="/a+b", tile=("mlp",)),
        ),
        ("gradient_checkpointing(keep=attention)", kept("attention")),
        ("unsloth(keep=attention)", kept("attention", offload="host")),
    ],
)
def test_strings(text, expected):
    assert Policy.parse(text) == expected
    assert Policy.parse(str(expected)) == expected, "it prints what it parses"
    assert Policy.parse(expected.describe()) == expected
    assert Policy.parse(expected) is expected


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"recompute": True, "keep": "attention"}, "recompute(keep=attention)"),
        ({"recompute": True, "keep": "attention+matmul"}, "recompute(keep=attention+matmul)"),
        ({"recompute": True, "keep": ["attention", "mylib::op"]}, "recompute(keep=[attention, mylib::op])"),
        ({"recompute": True, "keep": ("matmul",), "offload": True}, "recompute(keep=matmul)+offload"),
        ({"recompute": True, "keep": None}, "recompute"),
        ({"recompute": True, "keep": []}, "recompute"),
        ({"recompute": True, "overrides": {"layers.0": {"recompute": True, "keep": "attention"}}},
         "recompute; layers.0: recompute(keep=attention)"),
        # TRL
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "recompute(keep=attention)"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
         "recompute(keep=attention)"),
        ({"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": False, "every_n_layers": 2}},
         "recompute(every=2, keep=attention)"),
        ({"gradient_checkpointing_kwargs": {"selective": True}, "activation_offloading": True},
         "recompute(keep=attention)+offload"),
        ({"gradient_checkpointing_kwargs": {"selective": False}}, "recompute"),
        ({"gradient_checkpointing_kwargs": {"selective": None}}, "recompute"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}}, "none"),
    ],
    ids=str,
)  # fmt: skip
def test_dicts(mapping, expected):
    assert Policy.parse(mapping) == Policy.parse(expected)


@pytest.mark.parametrize(
    "policy",
    [
        "recompute(keep=attention)+recompute(keep=matmul)",
        "recompute(keep=matmul)+gradient_checkpointing(keep=attention)",
        {"recompute": True, "keep": "matmul", "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing_kwargs": {"selective": True}, "keep": ["matmul"]},
    ],
    ids=str,
)
def test_what_to_keep_adds_up(policy):
    assert Policy.parse(policy) == kept("attention", "matmul")


def test_a_word_beside_it_does_not_take_it_back():
    assert Policy.parse("recompute(keep=attention)+recompute") == kept("attention")
    assert Policy.parse("recompute(keep=attention)+unsloth") == kept("attention", offload="host")


def test_rules():
    text = "recompute; layers.0: recompute(keep=attention); *.1: recompute(keep=[mylib::op, aten.mm.default])+offload"
    policy = Policy.parse(text)
    assert str(policy) == text
    assert policy.for_region("layers.7") == Policy(recompute=True)
    assert policy.for_region("layers.0") == kept("attention")
    assert policy.for_region("layers.1") == kept("mylib::op", "aten.mm.default", offload="host")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("recompute(keep=atention)", r"^unknown thing to keep 'atention': did you mean 'attention'\? \(an operator's"),
        ("recompute(keep=mm)", r"unknown thing to keep 'mm': use one of attention, matmul \(an operator's name is li"),
        ("recompute(keep=[attention)", "unknown thing to keep"),
        ("recompute(keep=aten.mm.default.x)", "unknown thing to keep"),
        ("recompute(keep=)", "keep in policy 'recompute\\(keep=\\)' names nothing: write it like keep=attention"),
        ("recompute(keep)", "names nothing"),
        ("recompute(keep=[])", "names nothing"),
        ("recompute(keeps=attention)", "did you mean 'keep'"),
        ("recompute(keep=aten.mm, aten.bmm)", "unknown recompute setting 'aten.bmm'"),
        ("offload(keep=attention)", "unknown offload setting 'keep'"),
        ("tile(keep=attention)", "unknown tile setting 'keep'"),
        ("recompute; layers.0: recompute(keep=atention)", "did you mean 'attention'"),
        ({"keep": "attention"}, "^keep says what is not recomputed, so it needs recompute$"),
        ({"offload": True, "keep": "attention"}, "needs recompute"),
        ({"recompute": True, "overrides": {"*.0": {"keep": "attention"}}}, "needs recompute"),
        ({"recompute": True, "keep": True}, "keep must be a string or a list of names, .* got True"),
        ({"recompute": True, "keep": {"attention": True}}, "keep must be a string or a list of names"),
        ({"recompute": True, "keep": ["attention", 3]}, "keep must be a tuple of names, .* got"),
        ({"gradient_checkpointing_kwargs": {"selective": "attention"}}, "selective must be true or false, got 'attent"),
        ({"gradient_checkpointing_kwargs": {"selectiv": True}}, "did you mean 'selective'"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_with_a_hint(bad, says):
    with pytest.raises(InvalidValueError, match=says):
        Policy.parse(bad)


@pytest.mark.parametrize("keep", ["attention", ["attention"], None, ("attention", 3)])
def test_a_policys_own_field_is_a_tuple_of_names(keep):
    with pytest.raises(InvalidValueError, match="keep must be a tuple of names"):
        Policy(recompute=True, keep=keep)


def test_recompute_cannot_be_taken_away_beneath_it():
    with pytest.raises(InvalidValueError, match="needs recompute"):
        dataclasses.replace(kept("attention"), recompute=False)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("aten.nope", "has no operator 'aten.nope'"),
        ("aten::mm.nope", "has no operator 'aten::mm.nope'"),
        ("aten.view.default", "'aten.view.default' returns a view of its arguments, which costs nothing: keep an op"),
        ("aten.relu_.default", "'aten.relu_.default' writes to its arguments, and has to run again for that: keep"),
    ],
)
@pytest.mark.parametrize("policy", ["recompute(keep=[{}])", "recompute; 0: recompute(keep=[{}])"])
def test_an_operator_that_cannot_be_kept_is_refused_when_a_policy_is_applied(word, says, policy):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InvalidValueError, match=f"^keep: .*{says}"):
        lowtide.apply(model, policy.format(word))
    model(torch.ones(1, 2)).sum().backward()
    assert all("forward" not in vars(module) for module in model.modules()), "nothing was changed"
