"""Overrides what the rules make of single architectures' configurations, each with its reason.

The tables are keyed by the model type of a configuration, and hold wherever that configuration occurs, also nested in a
different one. A path such as `backbone_config.patch_size` reaches into a tower.
"""

from __future__ import annotations

from typing import Any

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

FIELDS: dict[str, dict[str, Any]] = {
    # -- Sizes of stages that the rules cannot scale: they have no common divisor, or must fit one another. --
    "align_vision_model": {"width_coefficient": 0.2, "depth_coefficient": 1.0, "hidden_dim": 64},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320},
    "efficientloftr": {
        "num_attention_heads": 8,
        "stage_num_blocks": [2, 2, 2, 2],
        "out_features": [16, 16, 32, 64],
        "hidden_size": 64,
    },
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 64],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 32, 64, 128],
        "hidden_sizes": [16, 32, 64, 128],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "embedding_size": 16,
    },
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [2, 2, 2, 2],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "window_size_per_stage": [4, 4, 2, 2],
        "global_attention_blocks": [3, 5],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam2_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "textnet": {"stem_out_channels": 16},
    "seggpt": {"image_size": [64, 32], "pretrain_image_size": 32, "merge_index": 0},
    # The drop path rate is looked up by the stage's index in a list as long as the stage: stage 2 needs three layers.
    "cvt": {"depth": [2, 2, 3]},
    "swin2sr": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32, "window_size": 4},
    # The model adds these to a list, so they must be lists.
    "vitmatte": {
        "convstream_hidden_sizes": [16, 16, 32],
        "fusion_hidden_sizes": [32, 32, 16, 16],
        "hidden_size": 64,
        "backbone_config.patch_size": 16,
        "backbone_config.image_size": 64,
    },
    "vitpose": {"image_size": [32, 32]},
    "yolos": {"image_size": [32, 48]},
    # The width doubles with every downsampling.
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 64},
    "encodec": {"num_filters": 4},
    "neucodec": {"encoder_hidden_size": 4, "quantization_dim": 128},
    "xcodec2": {"encoder_hidden_size": 4, "quantization_dim": 128},
    "mimi": {"num_filters": 4},
    "mimi_decoder": {"num_filters": 4},
    "mimi_encoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    # With the default ratios, the decoded audio would be 3200 times as long as its latents.
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4, "downsampling_ratios": [2, 2, 2, 2, 2, 2]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    # The patches of an image are whole images for its towers; and hooks are set on layers by index.
    "depth_pro": {"patch_size": 32, "intermediate_hook_ids": [1, 0]},
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2, "output_num_channels": 16},
    # Axial positions form a rectangle with as many cells as the text has tokens; chunks divide the text as well.
    "reformer": {
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
    },
    # -- Fields that are unset by default although the model needs them. --
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
    },
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "num_hidden_layers": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "sapiens2_head": {"upsample_out_channels": [32, 32], "conv_out_channels": [32]},
    "chameleon": {"vocabulary_map": {"<image>": 127} | {f"IMGIMG{chr(65 + n)}Z": 100 + n for n in range(8)}},
    "chameleon_vqgan": {"num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
    "emu3": {
        "vocabulary_map": {"<image>": 127, "<|extra_200|>": 126}
        | {f"<|visual token {n:06d}|>": 100 + n for n in range(8)}
    },
    "emu3_vqgan": {"codebook_size": 8, "channel_multiplier": [1, 1, 1, 1]},
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1, 2, 3],
        "text_config.num_hidden_layers": 4,
    },
    # -- Kinds of layers that are described in an unusual way, or that the defaults lack. --
    "bamba": {
        "attn_layer_indices": [1, 3],
        "num_hidden_layers": 4,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2, 4, 2], "num_hidden_layers": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "molmo2_vision": {"num_position_embeddings": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    # -- Numbers that must fit other numbers. --
    "aria": {"projector_patch_to_query_dict": {16: 8, 64: 8}},
    # The rotary embedding is at least 32 wide and is applied to whole heads, so heads must be as wide.
    "clvp_encoder": {"num_attention_heads": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    # The width after subsampling is computed as if the first number were the number of bins, which is 128.
    "gemma4_audio": {"subsampling_conv_channels": [128, 8]},
    "janus_vqgan": {"num_patches": 4, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
    # The numbers in a patch: three channels of 8 x 8.
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 192},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "glm5_next_text": {"index_kpool": 4},
    "granite_speech_encoder": {"context_size": 16},
    "granite_speech_plus_encoder": {"context_size": 16},
    # The last layer's output and those of two more, side by side.
    "mllama_vision_model": {"vision_output_dim": 192},
    "granite_speech": {"window_size": 10},
    "granite_speech_plus": {"window_size": 10},
    # Four of the tower's outputs are shuffled into one before they go through its projector.
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64},
    # Six coordinates share the width, so it must be a multiple of six.
    "lilt": {"hidden_size": 48},
    # The width of a head's two parts together.
    "longcat_flash": {"qk_head_dim": 32},
    "shieldgemma2": {"yes_token_index": 100, "no_token_index": 101},
    "step3p5": {"sliding_window": 8},
    "tvp": {"max_img_size": 32, "visual_prompt_size": 4},
    # Four audio features become one, which must be as wide as the inner layer.
    "voxtral_encoder": {"intermediate_size": 256},
    "glmasr_encoder": {"intermediate_size": 256},
    # Four neighbouring features become one, four times as wide.
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    # The decoder's input begins with this many of the known values.
    "autoformer": {"label_length": 4},
    # A spectrogram is folded into a square, at most as often as its last stage is high.
    "clap_audio_model": {"num_mel_bins": 32, "hidden_size": 128},
    # The model's formula for lengths holds only for windows of a hundred frames.
    "qwen3_asr_encoder": {"n_window": 50, "n_window_infer": 800, "max_source_positions": 64},
    "qwen3_omni_moe_audio_encoder": {"n_window": 50, "n_window_infer": 800, "max_source_positions": 64},
    "xmod": {"default_language": "en_XX"},
    # Attention takes a layer's input and the first layer's input side by side.
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    # This must be as wide as the first stage of the backbone.
    "pp_doclayout_v3": {"x4_feat_dim": 16},
    "pp_formulanet_vision": {"post_conv_in_channels": 64},
    "slanext": {"post_conv_in_channels": 64},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "rf_detr": {"projector_scale_factors": [1.0]},
    # Tokens are merged after this layer.
    "minicpm_ocr_vision": {"insert_layer_id": 1, "num_hidden_layers": 4},
    "minicpmv4_6_vision": {"insert_layer_id": 1, "num_hidden_layers": 4},
    "minicpmv4_7_vision": {"insert_layer_id": 1, "num_hidden_layers": 4},
    # The last number is the width of the encoder that follows.
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 64]},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, 64]},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4},
    "mask2former": {"feature_size": 64, "mask_feature_size": 64},
    # Height and width must get the same number of a head's pairs.
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROTARY, "mrope_section": [2, 2, 4]}},
    # The model reads rotary parameters by kind of layer, and the defaults lack them.
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROTARY, "mrope_section": [4, 2, 2]}}},
}

# Attributes that a model reads although its configuration has no field for them: the enclosing configuration sets them,
# or nothing does.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 100, "vision_end_token_id": 101},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 100, "vision_end_token_id": 101},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 96},
    "t5gemma2_decoder": {"dropout_rate": 0.1},
    "t5gemma2_text": {"dropout_rate": 0.1},
}


def override_fields(model_type: str, fields: dict[str, Any]) -> None:
    """Change the fields that a configuration of this type is built from, and those of its towers."""
    for path, value in FIELDS.get(model_type, {}).items():
        *towers, name = path.split(".")
        if towers:
            setattr(fields[towers[0]], name, value)
        else:
            fields[name] = value


def set_attributes(config: Any) -> None:
    """Set the attributes that a configuration of this type lacks."""
    for path, value in ATTRIBUTES.get(config.model_type, {}).items():
        *towers, name = path.split(".")
        owner = config
        for tower in towers:
            owner = getattr(owner, tower)
        setattr(owner, name, value)
