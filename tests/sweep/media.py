"""Pictures and sound for the types whose own forms no rule of ``inputs`` makes.

``SPECIAL`` has a function for each: of a configuration, a generator, rows and tokens of text. What it gives goes beside
text that has places for what the picture or sound comes to, as many as the model says, or as ``places`` has; or is a
whole micro-batch, where ``places`` is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.sweep.configs import FIRST_WORD, LAST_WORD

MicroBatch = dict[str, Any]
Made = Callable[[Any, torch.Generator, int, int], MicroBatch]


@dataclass(frozen=True, kw_only=True)
class Special:
    """``places``: in a text, to begin with; None: ``made`` gives the text, too."""

    name: str
    made: Made
    places: int | None = 1


def _noise(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def _words(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(FIRST_WORD, LAST_WORD + 1, shape, generator=g)


def _side(config: Any) -> int:
    size = config.image_size
    return int(size if isinstance(size, int) else size[0])


def _image(g: torch.Generator, config: Any, *before: int) -> torch.Tensor:
    return _noise(g, *before, 3, _side(config), _side(config))


def _images(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {"pixel_values": _image(g, c.vision_config, rows)}


def _two_resolutions(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    low, high = (_image(g, config, rows) for config in (c.vision_config, c.high_res_vision_config))
    return {"pixel_values": low, "high_res_pixel_values": high}


def _tiles(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {
        "pixel_values": _image(g, c.vision_config, rows, 1),
        "pixel_attention_mask": torch.ones(rows, 1, dtype=torch.bool),
    }


def _square_patches(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[patches, channels, height, width]"""
    size = c.vision_config.patch_size
    return {"pixel_values": _noise(g, 4 * rows, 3, size, size), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}


def _merged_patches(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[tokens, height, width, channels]"""
    size = c.vision_config.patch_size * c.vision_config.spatial_merge_size
    return {"pixel_values": _noise(g, 2 * rows, size, size, 3), "image_grid_thw": torch.tensor([[1, 1, 2]] * rows)}


def _with_merge_sizes(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {
        "pixel_values": _noise(g, 4 * rows, 3 * c.vision_config.patch_size**2),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows),
        "image_merge_sizes": torch.tensor([2] * rows),
    }


def _shapes(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {
        "pixel_values": _noise(g, rows, 16, 3 * c.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * rows),
    }


def _crossed(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    tiles = c.vision_config.max_num_tiles
    return {
        "pixel_values": _image(g, c.vision_config, rows, 1, tiles),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(rows, length, 1, tiles, dtype=torch.long),
    }


def _attended(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    return {
        "pixel_values": _image(g, c.vision_config, rows, 1),
        "image_attention_mask": torch.ones(rows, length, 1, dtype=torch.long),
    }


def _frames(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {"pixel_values": _image(g, c.vision_config, rows, 4)}


def _flattened(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    at = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).float().expand(rows, 9, 2)
    patches = _noise(g, rows, 9, c.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([at, patches], dim=2), "labels": _words(g, rows, length)}


def _pooled(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """Four patches of each image, all in one token."""
    patches = _noise(g, rows, 4, 3 * c.vision_config.patch_size**2)
    pooling = torch.arange(4 * rows).view(rows, 4)
    return {
        "pixel_values": patches,
        "image_token_pooling": pooling,
        "image_grids": torch.tensor([[1, 1, 0, 0]] * rows),
        "image_num_crops": torch.ones(rows, dtype=torch.long),
    }


def _boxes(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    corners = torch.rand(rows, length, 2, generator=g).mul(0.5)
    return {
        "input_ids": _words(g, rows, length),
        "bbox": torch.cat([corners, corners + 0.3], dim=2),
        "pixel_values": _image(g, c, rows),
        "labels": _words(g, rows, length // 2),
    }


def _actions(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    vision = c.vlm_config.vision_config
    places = (_side(vision) // vision.patch_size) ** 2
    pictured = torch.full((rows, places), c.vlm_config.image_token_id)
    return {
        "input_ids": torch.cat([pictured, _words(g, rows, length)], dim=1),
        "attention_mask": torch.ones(rows, places + length, dtype=torch.long),
        "pixel_values": _image(g, vision, rows, 1),
        "pixel_attention_mask": torch.ones(rows, 1, dtype=torch.bool),
        "state": _noise(g, rows, c.max_state_dim),
        "noise": _noise(g, rows, c.chunk_size, c.max_action_dim),
        "timestep": torch.rand(rows, generator=g),
        "actions": _noise(g, rows, c.chunk_size, c.max_action_dim),
    }


def _spectrum(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[rows, mels, frames], with a mask of frames."""
    audio = c.audio_config
    frames = 2 * getattr(audio, "max_source_positions", getattr(audio, "n_window", 64))
    mask = torch.ones(rows, frames, dtype=torch.long)
    return {
        "input_features": _noise(g, rows, audio.num_mel_bins, frames),
        "input_features_mask": mask,
        "feature_attention_mask": mask,
    }


def _heard(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[rows, frames, mels of 7 frames]"""
    return {
        "input_features": _noise(g, rows, 8, 7 * c.audio_config.num_mel_bins),
        "input_features_mask": torch.ones(rows, 8, dtype=torch.long),
    }


def _frames_of_sound(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[rows, frames, mels]"""
    return {
        "input_features": _noise(g, rows, 64, c.audio_config.asr_config.num_mel_bins),
        "input_features_mask": torch.ones(rows, 64, dtype=torch.long),
    }


def _windows(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """A window of frames, of which three tokens are made."""
    return {
        "input_features": _noise(g, rows, c.window_size, c.encoder_config.input_dim),
        "input_features_mask": torch.ones(rows, c.window_size // c.downsample_rate, dtype=torch.bool),
    }


def _beside_each_token(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    words = _words(g, rows, length)
    frames = 2 * c.downsample_factor * length
    return {
        "input_ids": words,
        "input_features": _noise(g, rows, c.audio_config.num_mel_bins, frames),
        "labels": words.clone(),
    }


def _stacked(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Four frames at a time, connectionist."""
    return {
        "input_features": _noise(g, rows, 8 * length, 4 * c.encoder_config.num_mel_bins),
        "attention_mask": torch.ones(rows, 8 * length, dtype=torch.long),
        "labels": _words(g, rows, length // 2),
    }


def _spoken(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Text in, channels of sound out."""
    channels = c.decoder_config.num_channels
    return {
        "input_ids": _words(g, rows, length),
        "decoder_input_ids": _words(g, rows, length, channels),
        "labels": _words(g, rows * channels, length),
    }


def _embedded(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    return {"input_features": _noise(g, rows, 16, c.d_model), "labels": _words(g, rows, length)}


def _streamed(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    words = _words(g, rows, length)
    codes = torch.randint(0, c.codebook_vocab_size, (rows, length, c.num_codebooks), generator=g)
    return {"input_ids": torch.cat([words.unsqueeze(2), codes], dim=2), "labels": words.clone()}


def _waves(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {
        "input_values": _noise(g, rows, 1, 16),
        "padding_mask": torch.ones(rows, 16, dtype=torch.bool),
        "sample": False,
    }


def _all_positions(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    words = _words(g, rows, c.max_position_embeddings)
    words[:, 0] = FIRST_WORD + 1
    return {"input_ids": words.masked_fill(words % 3 == 0, 4), "labels": words.masked_fill(words % 3 != 0, -100)}


def _protein(_: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    """A protein beside each text, which cross attention reads; the second is shorter."""
    real = torch.ones(rows, length, dtype=torch.long)
    real[1:, -3:] = 0
    return {"protein_input_ids": _words(g, rows, length), "protein_attention_mask": real}


def _placed(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """Patches with their places in an image of two by two tokens."""
    side = 2 * c.vision_config.pooling_kernel_size
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(rows, side * side, 2)
    patches = torch.rand(rows, side * side, 3 * c.vision_config.patch_size**2, generator=g)
    return {"pixel_values": patches, "image_position_ids": at}


def _merged(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """Patches of a token each, with their places."""
    at = torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(rows, 4, 2)
    patches = torch.rand(rows, 4, 3 * c.vision_config.model_patch_size**2, generator=g)
    return {"pixel_values": patches, "image_position_ids": at}


def _diffused(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Images in the prompt, and words to be restored."""
    words = _words(g, rows, length)
    return _placed(c, g, rows, length) | {"decoder_input_ids": words, "labels": words.clone()}


def _voxels(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    """[images, time, height, width, channels]: a patch of each"""
    v = c.vision_config
    return {"pixel_values": _noise(g, rows, v.temporal_patch_size, v.patch_size, v.patch_size, v.num_channels)}


def _of_timm(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    side = c.vision_config.model_args["img_size"][0]
    return {"pixel_values": _noise(g, rows, 1, 3, side, side)}


def _sized(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    return {"pixel_values": _noise(g, rows, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]] * rows)}


def _drafted(c: Any, g: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Keys and values of another model, of its last layer of each kind: two heads, as wide as the tiny one's are."""

    def of(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _noise(g, rows, 2, length, width), _noise(g, rows, 2, length, width)

    return {
        "inputs_embeds": _noise(g, rows, length, 2 * c.backbone_hidden_size),
        "position_ids": torch.arange(length).expand(rows, length),
        "shared_kv_states": {"full_attention": of(512), "sliding_attention": of(8)},
        "labels": _words(g, rows, length),
    }


def _grid(c: Any, g: torch.Generator, rows: int, _: int) -> MicroBatch:
    size = c.vision_config.patch_size
    return {"pixel_values": _noise(g, 4 * rows, 3 * size**2), "image_grid_hw": torch.tensor([[2, 2]] * rows)}


SPECIAL: dict[str, Special] = {
    "deepseek_vl_hybrid": Special(name="images of two resolutions", made=_two_resolutions, places=4),
    "deepseek_vl": Special(name="images", made=_images, places=4),
    "janus": Special(name="images", made=_images, places=4),
    **dict.fromkeys(
        ("mistral3", "mistral4", "mistral_large4", "lighton_ocr"), Special(name="images", made=_sized, places=4)
    ),
    "molmo2": Special(name="images in patches", made=_pooled, places=1),
    "granite_docling": Special(name="images in tiles", made=_tiles),
    "inkling2": Special(name="images in patches", made=_merged_patches),
    "kimi_k25": Special(name="images in patches", made=_square_patches),
    "paddleocr_vl": Special(name="images in patches", made=_square_patches),
    "video_llama_3": Special(name="images in patches", made=_with_merge_sizes),
    "lfm2_vl": Special(name="patches of images", made=_shapes),
    "llava": Special(name="images", made=_images),
    "mllama": Special(name="images in tiles", made=_crossed, places=1),
    "idefics": Special(name="images", made=_attended, places=0),
    "kosmos-2": Special(name="images", made=_images, places=4),
    "instructblipvideo": Special(name="images in frames", made=_frames, places=16),
    "pix2struct": Special(name="images in flattened patches", made=_flattened, places=None),
    "udop": Special(name="images", made=_boxes, places=None),
    "pi0": Special(name="images", made=_actions, places=None),
    "glmasr": Special(name="a spectrum", made=_spectrum),
    "audioflamingo3": Special(name="a spectrum", made=_spectrum),
    "musicflamingo": Special(name="a spectrum", made=_spectrum),
    "qwen2_audio": Special(name="a spectrum", made=_spectrum, places=64),
    "qwen3_asr": Special(name="a spectrum", made=_spectrum),
    "fun_asr_nano": Special(name="frames of sound", made=_heard),
    "nemo_speechlm": Special(name="frames of sound", made=_frames_of_sound),
    "granite_speech": Special(name="frames of sound", made=_windows, places=3),
    "granite_speech_plus": Special(name="frames of sound", made=_windows, places=3),
    "voxtral_realtime": Special(name="a spectrum", made=_beside_each_token, places=None),
    "granite_speech5_ctc": Special(name="frames of sound", made=_stacked, places=None),
    "dia": Special(name="text", made=_spoken, places=None),
    "pop2piano": Special(name="frames of sound", made=_embedded, places=None),
    "kyutai_speech_to_text": Special(name="streams", made=_streamed, places=None),
    "vibevoice": Special(name="sound", made=_waves, places=4),
    "vibevoice_asr": Special(name="sound", made=_waves, places=4),
    "emu3": Special(name="images", made=_sized, places=20),
    "Gemma4AssistantForCausalLM": Special(name="another model's keys and values", made=_drafted, places=None),
    "Gemma4UnifiedAssistantForCausalLM": Special(name="another model's keys and values", made=_drafted, places=None),
    "PerceiverForMaskedLM": Special(name="text, masked", made=_all_positions, places=None),
    "evolla": Special(name="proteins", made=_protein, places=0),
    "gemma4": Special(name="patches of images", made=_placed, places=4),
    "diffusion_gemma": Special(name="patches of images", made=_diffused, places=4),
    "inkling_mm_model": Special(name="images in patches", made=_voxels),
    "perception_lm": Special(name="images in tiles", made=_of_timm, places=4),
    "gemma4_unified": Special(name="patches of images", made=_merged, places=4),
    "nemotron_h_omni": Special(name="images in patches", made=_grid),
    "voxtral": Special(name="a spectrum", made=_spectrum),
}
