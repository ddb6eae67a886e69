"""Configurations of transformers, made tiny by rules over the names of their settings.

``tiny(cls)`` is an instance of a configuration class with every width, depth, vocabulary and window small, and those of
the models within it, too. What the rules do not know stays as the class has it. ``EXCEPTIONS`` has what they get wrong.
"""

import copy
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

VOCABULARY = 128
FIRST_WORD = 8
"""Ids below this are special (``SPECIAL``); words go up to ``LAST_WORD``; above are those of images and sound."""
LAST_WORD = 90

SPECIAL = {
    "pad": 0,
    "bos": 1,
    "eos": 2,
    "sep": 3,
    "mask": 4,
    "cls": 5,
    "unk": 6,
    "decoder_start": 1,
    "forced_bos": 1,
    "forced_eos": 2,
}

LENGTH = 128

Settings = Mapping[str, Any]

RULES: tuple[tuple[str, Any], ...] = (
    # ---- vocabulary
    (r"type_vocab_size|task_type_vocab_size", None),
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCABULARY),
    # ---- depth
    (r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|layers|num_(encoder|decoder)_layers", 3),
    (r"(speech_encoder|t2u_encoder|t2u_decoder)_layers|(encoder|decoder|conf)_num_hidden_layers", 3),
    (r"depth|num_blocks|num_self_attends_per_block|resampler_depth", 2),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers", 0),
    (r"first_k_dense_replace|num_dense_layers", 1),
    # ---- heads
    (r"(.*_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads", 2),
    (r"(.*_)?(num_)?attention_heads|n_heads?|num_heads|(.*_)?num_(attention_)?heads|linear_num_value_heads", 4),
    (r"index_n_heads", 2),
    (r"index_head_dim|qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r"(.*_)?head_dim|d_kv|d_head|dim_head|kv_channels|qk_(nope|rope)_head_dim", 8),
    (r"(q|kv|o)_lora_rank|laurel_rank|gated_norm_rank|embedding_rank", 8),
    # ---- width
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size|moe_hidden_size", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim)(_mlp)?|d_ff|dff|dim_ff|d_inner|n_inner|ffn_dim", 64),
    (r"(.*_)?(hidden_size|embedding_size|embed_dim|emb_dim|hidden_dim|projection_dim|projection_size)", 32),
    (r"d_model|n_embd|dim|embedding_dim|output_dim|output_hidden_size|pooler_output_size|image_token_embed_dim", 32),
    (r"mm_embed_dim|classifier_proj_size|hidden_size_(global|per_layer_input)|dim_model_base|vision_output_dim", 32),
    (r"projector_(in|out)put_dim|alignment_intermediate_size|output_proj_dims|word_embed_proj_dim", 32),
    # ---- experts
    (r"n_routed_experts|num_(local_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_topk|top_k_experts|moe_k|moe_top_k", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group", 1),
    (r"expert_capacity", 64),
    # ---- lengths
    (r"(.*_)?max_(.*_)?position(_embedding)?s(_.*)?|n_positions|n_ctx|max_seq_len|seq_len|max_length", LENGTH),
    (r"max_(source|target)_positions", LENGTH),
    (r"sliding_window(_size)?|attention_window|local_attention|attention_chunk_size|sliding_windows?", 4),
    (r"(mamba_)?chunk_size|index_topk|num_buckets", 8),
    # ---- images and sound
    (r"image_size|img_size|crop_size|force_image_size|resolution", 32),
    (r"num_mel_bins|n_mel_bins|input_feat_size|input_feat_per_channel", 16),
    (r"base_channels|conv_channels", 32),
    (r"num_query_tokens|num_latents|latent_query_num|resampler_n(um)?_latents|num_register_tokens", 4),
    # ---- state spaces
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 8),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"mamba_d_ssm", 64),
    # ---- nothing at random
    (r".*(dropout|drop|pdrop|drop_rate|layerdrop|dropout_p)(_prob|_rate)?", 0.0),
    (r"apply_spec_augment", False),
    (r"mask_(time|feature)_prob|router_jitter_noise|moe_token_dropout|drop_path_rate|input_jitter_noise", 0.0),
)
"""(what a setting's whole name matches, its value; None leaves it). The first that matches counts."""

_SMOOTH = {"hidden_act": "silu"}
"""for what has batch norms over few values: where a ReLU's input is all but 0, rounding decides a training"""

_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

_SOME_SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}

_SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}

_THINKER = {"vision_start_token_id": 91, "vision_end_token_id": 92, "position_id_per_seconds": 25}

_FEW_FILTERS = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}

_SWIN = {"embed_dim": 24, "depths": [1, 2], "num_heads": [3, 6], "window_size": 4}

_FASTVIT = {"embed_dims": (8, 16, 32, 64), "layers": (1, 1, 1, 1)}

_PE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "img_size": (28, 28),
    "global_pool": "",
    "use_post_transformer_norm": False,
    "init_values": 0.1,
    "ref_feat_shape": (2, 2),
}

EXCEPTIONS: dict[str, Settings] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 120, **{f"IMGIMG{chr(65 + i)}Z": 91 + i for i in range(10)}}},
    "chameleon_vqgan": {"num_embeddings": 10, "embed_dim": 32, "latent_channels": 32},
    "emu3_vqgan": {"codebook_size": 16, "hidden_size": 128},
    "vibevoice_acoustic_tokenizer": _FEW_FILTERS,
    "vibevoice_acoustic_tokenizer_encoder": _FEW_FILTERS,
    "efficientnet": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "hidden_dim": 320,
        "image_size": 64,
    },
    "timm_wrapper": {"architecture": "test_vit"},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_mci0", "hidden_size": 128, "model_args": _FASTVIT}},
    "gemma3n_text": {
        "intermediate_size": [64, 64, 64],
        "pad_token_id": 7,
    },  # a row of zeros has no gradient of its norm
    "gemma3n_vision": {"hidden_size": 2048, "model_args": {"channel_multiplier": 0.05}},
    "perception_lm": {"vision_config": {"architecture": "vit_pe_core_large_patch14_336", "model_args": _PE}},
    "textnet": {"stem_out_channels": 8, "image_size": 64, **_SMOOTH},
    "hgnet_v2": {"stem_channels": [3, 8, 8], **_SMOOTH},
    "pixtral": {"patch_size": 8},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "emu3": {
        "vocabulary_map": {
            "<image>": 120,
            "<|extra_200|>": 107,
            **{f"<|visual token {i:06d}|>": 91 + i for i in range(16)},
        }
    },
    "ernie4_5_vl_moe_text": {
        "moe_num_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [1, 1, 2]},
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": 4},
    "gemma4_text": _SOME_SHARED,
    "gemma4_unified_text": _SOME_SHARED,
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
    "gemma4_assistant": {"text_config": {**_NO_LAYER_INPUTS, "num_kv_shared_layers": 6}},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "blip-2": {"image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        },
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "glm5_next_text": {"num_hidden_layers": 4, "num_key_value_heads": 4, "index_kpool": 4, "qk_rope_head_dim": 0},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [2, 2, 2, 2],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[32, 32]],
        "vision_config": {"hidden_size": 64, "patch_size": 8},
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "idefics3_vision": {"patch_size": 8},
    "smolvlm_vision": {"patch_size": 8},
    "llama4_vision_model": {"intermediate_size": 128},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "granite_docling_vision": {"patch_size": 8},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "idefics": {"additional_vocab_size": 0},
    "voxtral": {"audio_token_id": 126},
    "instructblipvideo": {"video_token_index": 126, "image_token_index": 126},
    "step3p5": {"sliding_window": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 10, "no_token_index": 11},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, 32]},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "qwen2_5_omni_thinker": _THINKER,
    "qwen3_omni_moe_thinker": _THINKER,
    "nemotron_h_omni": {
        "image_token_id": 126,
        "vision_config": {"video_temporal_patch_size": 2, "image_size": 64},
        "vision_hidden_size": 32,
    },
    "muse_spark_audio": {"num_hidden_layers": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "moshi": {"num_codebooks": 4},
    "mimi": {"upsample_groups": 32, "num_filters": 4, "num_quantizers": 4, "codebook_size": 32},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 32},
    "mobilevitv2": {"image_size": 128, **_SMOOTH},
    "moonshine": {"pad_token_id": 0, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "perceiver": {"d_model": 32, "d_latents": 32, "num_cross_attention_heads": 1, "num_self_attention_heads": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
    "bailing_hybrid": {"num_hidden_layers": 6},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 8, "depths": [1, 2, 1, 1], **_SMOOTH},
    "levit": _SMOOTH,
    "mobilenet_v1": _SMOOTH,
    "mobilenet_v2": _SMOOTH,
    "mobilevit": _SMOOTH,
    "regnet": {"depths": [1, 2, 1, 1], **_SMOOTH},
    "resnet": {"depths": [1, 2, 1, 1], **_SMOOTH},
    "dots3_note_text": {"num_key_value_heads": 4, "shared_experts_intermediate_size": 16, **_SLIDING},
    "donut-swin": _SWIN,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_hidden_layers": 4},
    "nemotron_h": {"n_groups": 2},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "minicpmv4_6": {"text_config": {"num_hidden_layers": 4}},
    "udop": {"decoder_start_token_id": 1},
    "xmod": {"default_language": "en_XX"},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "kyutai_speech_to_text": {"num_codebooks": 4},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [-1, -2]},
        "vision_config": {"image_size": [28, 28], "num_position_embeddings": 4},
    },
}
"""By type: settings that go before the rules; a mapping is for the model within of that name."""

NEEDED: dict[str, Settings] = {
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "hidden_size": 128}},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": _PE}},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_LAYER_INPUTS}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "nemotron_h_omni": {"vision_config": {"model_type": "radio", "video_temporal_patch_size": 2}},
}
"""By type: settings without which its class cannot be made at all."""

_RULES = [(re.compile(pattern), value) for pattern, value in RULES]
_TOKEN = re.compile(r"(.*?)_?(token)?_?(id|index|idx)")
_WIDTHS = re.compile(r"hidden_sizes|(.*_)?dims?|(.*_)?channels|widths|stage_\w+_channels|.*_sizes_hidden")


def tiny(cls: Any, given: Settings | None = None) -> Any:
    """A tiny configuration. ``given``: settings that go before everything; a mapping is for the model within.

    Raises: what the configuration's class does.
    """
    settings: dict[str, Any] = {}
    exceptions = copy.deepcopy({**EXCEPTIONS.get(cls.model_type, {}), **(given or {})})
    default = cls(**copy.deepcopy(NEEDED.get(cls.model_type, {})))
    ids = iter(range(LAST_WORD + 1, VOCABULARY))
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        value = _value(default, name, parameter)
        if hasattr(value, "sub_configs") and hasattr(type(value), "model_type"):
            inner = exceptions.get(name, {})
            settings[name] = tiny(type(value), inner) if isinstance(inner, Mapping) else inner
        elif name in exceptions:
            settings[name] = exceptions[name]
        elif parameter.default is None and value is not None and not isinstance(value, int | float):
            if name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
                settings[name] = {**value, "mrope_section": [2, 1, 1]}
            continue  # the class makes it of others
        else:
            small = _small(name, value, ids)
            if small is not None:
                settings[name] = small
    if "kv_lora_rank" in settings and "num_key_value_heads" not in exceptions:  # latent attention: all heads have keys
        settings["num_key_value_heads"] = settings.get("num_attention_heads", 4)
    settings |= {name: value for name, value in exceptions.items() if name not in settings}
    config = cls(**settings)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SPECIAL["decoder_start"]
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = SPECIAL["pad"]
    rope = vars(config).get("rope_parameters")
    sectioned = "rope_parameters" not in exceptions and "mrope_section" in inspect.getsource(_modeling(cls))
    by_layer = isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())
    if isinstance(rope, dict) and sectioned and not by_layer:  # halves of a head's pairs
        pairs = int(settings.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    return config


def _modeling(cls: Any) -> Any:
    """The module of a configuration's model, or its own where there is none."""
    try:
        return importlib.import_module(cls.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return inspect.getmodule(cls)


def _value(config: Any, name: str, parameter: inspect.Parameter) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # noqa: BLE001  a configuration's attribute may be code that refuses
        return None if parameter.default is inspect.Parameter.empty else parameter.default


def _small(name: str, value: Any, ids: Any) -> Any:
    """The value of a setting that is ``value`` by default; None: as it is."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
        if _WIDTHS.fullmatch(name) and max(value) > 16:
            return type(value)(max(8, v // 8 // 4 * 4) for v in value)
        return None
    for pattern, small in _RULES:
        if pattern.fullmatch(name):
            return _like(value, small)
    token = _TOKEN.fullmatch(name)
    if token and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        if token[1] in SPECIAL:
            return SPECIAL[token[1]]
        return next(ids) if value >= FIRST_WORD else None
    return None


def _like(value: Any, small: Any) -> Any:
    """``small``, where the default is of its kind and not less."""
    if small is None or value is None or isinstance(value, str):
        return None
    if isinstance(small, bool):
        return small if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return type(value)(small) if small in (0, VOCABULARY) or value > small or value == 0 else None


def tiny_of(model_class: Any, config_class: Any) -> Any:
    """A tiny configuration for a model's class: that of the language model within, where the class is of that."""
    config = tiny(config_class)
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        inner = [getattr(config, key, None) for key in config.sub_configs]
        config = next((part for part in inner if isinstance(part, wanted)), config)
    return config
