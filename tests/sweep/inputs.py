"""Micro-batches for any type of model: whatever it takes besides its labels, found by trying what its forward names.

A *form* makes one micro-batch of so many rows and tokens. The first form of a kind that a model computes a finite loss
from is the one that it is trained with.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.sweep.configs import FIRST_WORD, LAST_WORD
from tests.sweep.media import SPECIAL

MicroBatch = dict[str, Any]
Form = Callable[[torch.Generator, int, int], MicroBatch]

_FEATURES = re.compile(r"tokens?\D*?:? ?(\d+)\D+?features?\D*?:? ?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A task of transformers' auto classes. ``media``: what it takes besides text."""

    mapping: str
    media: str = "text"


KINDS = {
    "causal": Kind(mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": Kind(mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": Kind(mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": Kind(mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", media="image"),
    "audio": Kind(mapping="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", media="sound"),
    "ctc": Kind(mapping="MODEL_FOR_CTC_MAPPING_NAMES", media="sound"),
    "speech": Kind(mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", media="sound"),
    "image-text": Kind(mapping="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", media="image and text"),
}


@dataclass(frozen=True, kw_only=True)
class Forms:
    """What a model is trained with. ``other``: of the steps between, which are text alone; None: it takes no text."""

    main: Form
    other: Form | None
    name: str


OWN_LOSS = frozenset(
    (
        *("DeiTForImageClassificationWithTeacher", "LevitForImageClassificationWithTeacher"),
        *("PPLCNetForImageClassification", "ShieldGemma2ForImageClassification", "DiffusionGemmaForBlockDiffusion"),
        *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    )
)
"""Classes that compute no loss: the cross entropy of their logits is taken."""


def loss_of(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """What a model is trained by: its own loss, or that of ``OWN_LOSS``."""
    given = dict(micro_batch)
    if type(model).__name__ not in OWN_LOSS:
        loss: torch.Tensor = model(**given).loss
        return loss
    labels = given.pop("labels")
    found = model(**given)
    logits = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class NoFormError(Exception):
    """No form gave a loss; says what each came to."""


def forms_of(model: nn.Module, kind: str) -> Forms:
    """What a model can be trained with.

    Raises:
        NoFormError: nothing that was tried gives a loss.
    """
    failed: list[str] = []
    found: dict[str, Form] = {}
    for name, form in _candidates(model, kind):
        group = "text" if name.startswith("text") else "media"
        if group in found or (KINDS[kind].media == "text" and found):
            continue
        try:
            found[group] = _tried(model, form)
            found[group + " name"] = name  # type: ignore[assignment]
        except Exception as error:  # noqa: BLE001  whatever a model raises for inputs that are not for it
            failed.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    media, text = found.get("media"), found.get("text")
    if media is None and text is None:
        raise NoFormError("; ".join(failed))
    if media is None:
        assert text is not None
        return Forms(main=text, other=None, name=str(found["text name"]))
    both = f"{found['media name']}, {found['text name']}" if text else str(found["media name"])
    return Forms(main=media, other=text, name=both)


def _tried(model: nn.Module, form: Form) -> Form:
    """A form that the model computes a loss from. One of images is given as many places in its text as they come to."""
    for _ in range(3):
        try:
            for shape in ((2, 12), (3, 8)):
                loss = loss_of(model, form(torch.Generator().manual_seed(5), *shape))
                if loss is None:
                    raise NoFormError("no loss")
                if not math.isfinite(float(loss.detach())) or loss.dim():
                    raise NoFormError(f"the loss is {loss}")
            return form
        except (ValueError, RuntimeError) as error:
            wanted = _FEATURES.search(str(error))
            if wanted is None or not isinstance(form, _Pictured):
                raise
            form = form.with_places(int(wanted[2]) // 2)
    raise NoFormError("its number of image features changes")


def _candidates(model: nn.Module, kind: str) -> Iterator[tuple[str, Form]]:
    media = KINDS[kind].media
    takes = _parameters(model)
    special = SPECIAL.get(type(model).__name__)
    if special is None and kind not in ("causal", "masked", "image"):
        special = SPECIAL.get(model.config.model_type)
    if special is not None:
        made = functools.partial(special.made, model.config)
        if special.places is None:
            yield special.name, _only(takes, made)
        else:
            yield special.name, _Pictured(model, made, takes, places=special.places)
    if type(model).__name__ == "ShieldGemma2ForImageClassification":  # whose picture goes beside a text
        yield "images beside text", _classified(_Pictured(model, next(_pictures(model))[1], takes, places=4))
    if media == "image":
        for name, pictures in _pictures(model):
            yield name, _with_classes(model, pictures, takes)
        yield "words", _with_classes(model, lambda *shape: {"input_ids": whole(*shape)["input_ids"]}, takes)
        return
    if media == "sound":
        for name, sounds in _sounds(model):
            if kind == "audio":
                yield name, _with_classes(model, sounds, takes)
            else:
                yield name, _with_text(sounds, takes, words=kind != "ctc")
        return
    if media == "image and text":
        for name, pictures in _pictures(model):
            if not takes & set(pictures(torch.Generator(), 1, 8)):
                continue
            yield name, _Pictured(model, pictures, takes, places=1)
            yield f"{name} beside text", _with_text(pictures, takes, words=True, prompt=True)
    for name, words in _texts(kind):
        yield name, _only(takes, words)
    if kind == "causal":
        yield "streams", _only(takes, _streams(int(_found(model, "num_codebooks", 4))))
        for name, pictures in _pictures(model):
            yield f"{name} beside text", _with_text(pictures, takes, words=True, prompt=True)


# ---- text


def _words(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    return torch.randint(FIRST_WORD, LAST_WORD + 1, (rows, length), generator=generator)


def _real(rows: int, length: int) -> torch.Tensor:
    """[rows, length]: every row but the first is shorter than the one before."""
    return torch.arange(length) < (length - 2 * torch.arange(rows).unsqueeze(1))


def text(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Padded on the right."""
    words, real = _words(generator, rows, length), _real(rows, length)
    return {
        "input_ids": words.masked_fill(~real, 0),
        "attention_mask": real.long(),
        "labels": words.masked_fill(~real, -100),
    }


def masked(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    made = text(generator, rows, length)
    hidden = torch.rand(rows, length, generator=generator) < 0.4
    hidden[:, 0] = True
    return made | {
        "input_ids": made["input_ids"].masked_fill(hidden & made["attention_mask"].bool(), 4),
        "labels": made["labels"].masked_fill(~hidden, -100),
    }


def two_texts(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    return text(generator, rows, length) | {"labels": text(generator, rows, length // 2 + 2)["labels"]}


def whole(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Without padding."""
    words = _words(generator, rows, length)
    return {"input_ids": words, "labels": words.clone()}


def _streams(count: int) -> Form:
    """Several streams of tokens, each with labels of its own."""

    def made(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        words = _words(generator, rows * count, length)
        return {"input_ids": words, "labels": words.view(rows, count, length).transpose(1, 2).contiguous()}

    return made


def _texts(kind: str) -> Iterator[tuple[str, Form]]:
    if kind == "masked":
        yield "text, masked", masked
    if kind == "seq2seq":
        yield "text, two", two_texts
    yield "text", text
    yield "text, whole", whole
    if kind != "seq2seq":
        yield "text, two", two_texts
    yield "text, decoder", lambda g, r, n: (made := text(g, r, n)) | {"decoder_input_ids": made["input_ids"]}


# ---- images


def _pictures(model: nn.Module) -> Iterator[tuple[str, Form]]:
    size, patch = _found(model, "image_size", 64), _found(model, "patch_size", 8)
    channels = _found(model, "num_channels", 3)
    temporal = _found(model, "temporal_patch_size", _found(model, "patch_temporal", 1))
    merge = _found(model, "spatial_merge_size", 1)

    def pixels(*between: int) -> Form:
        return lambda g, rows, _: {
            "pixel_values": torch.randn(rows, *between, channels, size, size, generator=g),
            "image_sizes": torch.tensor([[size, size]] * rows),
        }

    def patches(g: torch.Generator, rows: int, _: int) -> MicroBatch:
        side = 2 * merge
        return {
            "pixel_values": torch.randn(rows * side * side, channels * temporal * patch * patch, generator=g),
            "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        }

    def flattened(g: torch.Generator, rows: int, _: int) -> MicroBatch:
        width = _found(model, "patch_embed_hidden_size", channels * patch * patch)
        at = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).float().expand(rows, 9, 2)
        return {"flattened_patches": torch.cat([at, torch.randn(rows, 9, width, generator=g)], dim=2)}

    def flat(g: torch.Generator, rows: int, _: int) -> MicroBatch:
        return {
            "pixel_values": torch.randn(rows, 9, channels * patch * patch, generator=g),
            "pixel_attention_mask": torch.ones(rows, 9, dtype=torch.long),
            "spatial_shapes": torch.tensor([[3, 3]] * rows),
        }

    yield "images", pixels()
    yield "patches of images", flat
    yield "images in patches", patches
    yield "images in flattened patches", flattened
    yield "images in tiles", pixels(1)
    yield "images in two tiles", pixels(2)
    yield (
        "flat images",
        lambda g, rows, _: {"inputs": torch.randn(rows, channels, size, size, generator=g)},
    )


class _Pictured:
    """Text with places for what a picture comes to."""

    def __init__(self, model: nn.Module, pictures: Form, takes: set[str], *, places: int) -> None:
        self._model, self._pictures, self._takes, self._places = model, pictures, takes, places
        names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")
        self._token = next((token for name in names if (token := _found(model, name, None)) is not None), 127)

    def with_places(self, places: int) -> "_Pictured":
        return _Pictured(self._model, self._pictures, self._takes, places=places)

    def __call__(self, generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        made = text(generator, rows, length)
        places = torch.full((rows, self._places), self._token)
        ids = torch.cat([made["input_ids"][:, :1], places, made["input_ids"][:, 1:]], dim=1)
        labels = torch.cat([made["labels"][:, :1], places * 0 - 100, made["labels"][:, 1:]], dim=1)
        mask = torch.cat([torch.ones_like(places), made["attention_mask"]], dim=1)
        kinds = (ids == self._token).long()
        given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        given |= {"token_type_ids": kinds, "mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}
        given |= {"qformer_input_ids": made["input_ids"], "image_embeds_position_mask": kinds}
        return _cut(self._takes, given | self._pictures(generator, rows, ids.shape[1]))


# ---- sound


def _sounds(model: nn.Module) -> Iterator[tuple[str, Form]]:
    names = (
        "feature_projection_input_dim",
        "input_dim",
        "num_mel_bins",
        "input_feat_size",
        "feature_size",
        "input_feat_per_channel",
    )
    mels = next((size for name in names if (size := _found(model, name, None))), 16)
    longest = _found(model, "max_source_positions", 64)
    pictured = _found(model, "max_length", longest)

    def wave(g: torch.Generator, rows: int, length: int) -> MicroBatch:
        return {"input_values": torch.randn(rows, 400 + 160 * length, generator=g)}

    def frames(g: torch.Generator, rows: int, length: int) -> MicroBatch:
        return {
            "input_features": torch.randn(rows, 8 * length, mels, generator=g),
            "attention_mask": torch.ones(rows, 8 * length, dtype=torch.long),
        }

    def spectrum(g: torch.Generator, rows: int, _: int) -> MicroBatch:
        return {"input_features": torch.randn(rows, mels, 2 * longest, generator=g)}

    yield "sound", wave
    yield "frames of sound", frames
    yield "a spectrum", spectrum
    yield "a picture of sound", lambda g, rows, _: {"input_values": torch.randn(rows, pictured, mels, generator=g)}


# ---- labels, and what a forward takes


def _with_classes(model: nn.Module, media: Form, takes: set[str]) -> Form:
    classes = int(_found(model, "num_labels", 2))

    def made(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        rows += 1  # batch norm takes no single row
        labels = torch.randint(0, classes, (rows,), generator=generator)
        return _cut(takes, {**media(generator, rows, length), "labels": labels})

    return made


def _classified(form: Form) -> Form:
    """Labels with a class for each row."""
    return lambda g, rows, length: form(g, rows, length) | {"labels": torch.randint(0, 2, (rows,), generator=g)}


def _with_text(media: Form, takes: set[str], *, words: bool, prompt: bool = False) -> Form:
    def made(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        said = text(generator, rows, length if words else length // 2)
        given = media(generator, rows, length) | {"labels": said["labels"]}
        if prompt:
            given = said | given
        return _cut(takes, given)

    return made


def _only(takes: set[str], form: Form) -> Form:
    return lambda *shape: _cut(takes, form(*shape))


def _cut(takes: set[str], given: MicroBatch) -> MicroBatch:
    return {key: value for key, value in given.items() if key in takes}


def _parameters(model: nn.Module) -> set[str]:
    """Names that a model's forward takes, and its labels."""
    taken = set(inspect.signature(model.forward).parameters)
    return taken | {"labels"} if type(model).__name__ in OWN_LOSS else taken


def _found(model: nn.Module, name: str, otherwise: Any) -> Any:
    """A setting of the model's configuration, or of the parts of it that are for images and sound."""
    config: Any = getattr(model, "config", None)
    within = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    within += [getattr(part, key, None) for part in list(within) for key in getattr(part, "sub_configs", {})]
    for part in (config, *within):
        try:
            value = getattr(part, name, None)
        except Exception:  # noqa: BLE001  a configuration's attribute may be code that refuses
            continue
        if value is not None and not isinstance(value, Mapping):
            return value[0] if isinstance(value, list | tuple) else value
    return otherwise
