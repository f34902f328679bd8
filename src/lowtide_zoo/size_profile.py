"""Says how small a tiny model is: upper bounds for the integer fields of configurations, by their names.

The first rule whose pattern matches the whole name decides; a field that no rule matches keeps its value. A rule gives
an upper bound, so nothing is ever enlarged.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class SizeProfile:
    """The sizes of a tiny model. Some architectures cannot be built in the small one, and get the large one."""

    name: str
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    inner: int = 96
    vocabulary: int = 128
    image: int = 32
    staged_image: int = 64
    patch: int = 8


SIZE_PROFILES = (
    SizeProfile("small"),
    SizeProfile("large", width=128, head_dim=32, inner=128, image=64, staged_image=128, patch=16),
)


def bound_of(name: str, value: int, profile: SizeProfile) -> int:
    """Return the value that an integer field gets under a profile."""
    for rule in _RULES:
        if rule.names.fullmatch(name):
            return value if rule.bound is None else min(value, rule.bound(profile))
    return value


@dataclasses.dataclass(frozen=True)
class _Rule:
    """An upper bound for one kind of field."""

    names: re.Pattern[str]
    bound: Callable[[SizeProfile], int] | None
    """Computes the bound for a profile; without it, the field keeps its value."""


def _rule(names: str, bound: Callable[[SizeProfile], int] | int | None) -> _Rule:
    if isinstance(bound, int):
        number = bound
        return _Rule(re.compile(names), lambda _: number)
    return _Rule(re.compile(names), bound)


_RULES = (
    # geometry of channels, kernels and patches
    _rule(r"num_channels|.*in_channels|in_chans|audio_channels|input_channels|.*kernel.*|.*stride.*", None),
    _rule(r".*_merge_size|merge_size|temporal_patch_size|tubelet_size|patch_temporal|.*pad(ding)?", None),
    # ratios and factors
    _rule(r".*ratio|.*rate|.*factor|.*_mult|expand|.*_expand|.*multiplier|.*divi.*", None),
    # switches, and constants of losses
    _rule(r"chunk_size_feed_forward|pretraining_tp|.*loss.*|.*_cost|seed|.*temperature.*|scale.*", None),
    # types and labels
    _rule(r".*type_vocab_size|num_labels|.*_depth_bins|max_depth", None),
    # widths of features that come from outside
    _rule(r".*_input_dim|input_dim|query_dim|visual_pos_dim|state_dim|act_dim|dim_bbox", None),
    # vocabularies
    _rule(
        r"(.*_)?vocab(_size)?(_.*)?|(.*_)?codebook_size|num_embeddings|num_embeds|.*hash_.*vocab",
        lambda p: p.vocabulary,
    ),
    # classes of tasks
    _rule(r"num_(qa|object|attr|bpe|wordpiece)_labels|num_classes|num_clusters|num_ctc_classes", 16),
    # number of experts
    _rule(r"(.*_)?(num|n)(_.*)?_experts|zero_expert_num", 4),
    # experts per token
    _rule(r"num_experts_per_tok(en)?|moe_topk|moe_k|.*top_?k_experts|num_selected_experts|top_k", 2),
    _rule(r"experts_per_token|moe_top_k|moe_router_topk|num_experts_per_topk|router_top_k", 2),
    # expert groups
    _rule(r"n_group|topk_group|num_expert_groups?|o_groups", 1),
    # image sizes
    _rule(
        r"image_size|input_size|img_size|crop_size|max_image_size|pretrain_image_size|resolution",
        lambda p: p.image,
    ),
    # patch sizes
    _rule(r"patch_size", lambda p: p.patch),
    # positions in images
    _rule(r"num_position_embeddings|position_embedding_size|max_num_patches", 64),
    # tokens per image
    _rule(r"image_seq_len(gth)?|mm_tokens_per_image|num_image_tokens|.*soft_tokens_per_image", 16),
    # frames of a video
    _rule(r"num_frames|frames_per_clip", 4),
    # queries and proposals
    _rule(
        r"(.*_)?num_(queries|query_tokens|latents|denoising|object_queries)|.*_n_latents|.*latent_query_num",
        8,
    ),
    _rule(r"two_stage_num_proposals|num_detection_tokens|train_num_points", 8),
    # windows of attention
    _rule(r"n_window", 8),
    _rule(r"n_window_infer", 32),
    _rule(r"attention_window|window_size|local_window_size|attention_window_size|local_radius", 4),
    _rule(r"sliding_window(_size)?|local_attention|index_topk|(mamba_|attention_)?chunk_size", 8),
    # positions in an encoder's input
    _rule(r"max_source_positions", 16),
    # positions
    _rule(r"n_positions|n_ctx|max_seq_len|max_sequence_length|max_length|max_target_positions", 128),
    _rule(r"(.*_)?max_position_embeddings|max_(en|de)coder_position_embeddings|max_pos_emb", 128),
    _rule(r"max_(speech|text)_positions|max_ep_len|max_new_tokens|max_text_len(gth)?", 128),
    # mel bins
    _rule(
        r"(num|n)_mels?(_bins)?|feature_size|input_feat_size|input_feat_per_channel|mel_dim|model_in_dim",
        16,
    ),
    # groups of norms and convolutions
    _rule(r"num_groups|num_norm_groups|.*conv_pos.*_groups|upsample_groups", 4),
    # widths of state-space states
    _rule(r"mamba_d_state|state_size|ssm_state_size|mamba_state_dim|mamba_d_ssm", 16),
    # half widths, for one axis of a position
    _rule(r"num_pos_feats", lambda p: p.width // 2),
    # rotated part of a head
    _rule(r"rotary_dim", lambda p: p.head_dim // 2),
    # head widths
    _rule(
        r"(.*_)?head_dim|d_kv|(.*_)?d_head|(.*_)?dim_head|(attention_)?head_size|kv_channels",
        lambda p: p.head_dim,
    ),
    # heads
    _rule(r"(.*_)?(num|n)_heads?|(.*_)?heads", lambda p: p.heads),
    # inner widths
    _rule(
        r".*(intermediate|ffn_dim|ffn_hidden|mlp_dim|d_ff|_ffn|n_inner|d_inner|linear_units).*",
        lambda p: p.inner,
    ),
    _rule(r".*(feedforward|feed_forward|dim_ff|dff|mlp_hidden|share_expert_dim).*", lambda p: p.inner),
    # widths
    _rule(
        r"hidden_size.*|d_model|n_embd|dim|width|(.*_)?hidden_size|(.*_)?hidden_dim(ension)?",
        lambda p: p.width,
    ),
    _rule(
        r"(.*_)?emb(ed|edding|d)?_?(dim|size|dims)?|.*_(dim|dims|width|rank|units|features)",
        lambda p: p.width,
    ),
    _rule(
        r".*_channels?|num_filters|.*_(proj|projection|output|pooler|bottleneck|latent|flow)_size",
        lambda p: p.width,
    ),
    _rule(r"projection_size|latent_size|bottleneck_size|shape_size|coordinate_size", lambda p: p.width),
    _rule(r"(fpn|mask)_feature_size|prediction_head_size", lambda p: p.width),
)
