"""The files of a model: a folder, or a repository of the hub whose files are brought into the hub's own cache."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.errors import ConfigError

_LONGEST_JSON = 64 << 20  # bytes; the index of the largest models has a few millions

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
"""Files beside the weights that prepare a model's inputs, as patterns: its tokenizer's, those for images or sound, and
chat templates.
"""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = {"*.gguf": "GGUF", "*.h5": "TensorFlow", "*.msgpack": "Flax", "*.onnx": "ONNX"}
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, weights: bool) -> Path:
    """The folder that a model's files are in; those of a repository are downloaded, or found in the hub's cache.

    ``weights``: its shards are needed too, else only what is small.

    Raises:
        ConfigError: there is no such folder or repository, or the hub cannot be reached.
    """
    path = Path(os.path.expanduser(name))
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a folder on the way that may not be looked into
        raise ConfigError(f"{name}: cannot be looked at: {error.strerror}") from error
    if is_folder:
        if revision is not None:
            raise ConfigError(f"model.revision={revision!r} has no effect: {name} is a folder, not a name on the hub")
        return path
    if path.exists():
        raise ConfigError(f"{name} is a file: give the folder that a model's {CONFIG} and shards are in")
    if isinstance(name, Path) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name}: there is no such folder (and a name on the hub looks like org/model)")
    small = ["*.json", "*.jinja", "*.txt", "*.model", *(["*.py"] if trust_remote_code else [])]
    folder = _download(name, revision, small)
    if weights:
        wanted = _shard_names(folder) if (folder / INDEX).is_file() else [SINGLE]
        # By the commit that the small files are of: a branch may have moved on in between.
        folder = _download(name, folder.name, wanted)
    return folder


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ConfigError(
            f"{name}: its owners have to let you in first, and you have to log in: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name} is neither a folder here nor a model on the hub (or it is private: hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{name} is no folder here, it is not in the hub's cache, and the hub cannot be reached: give the path of "
            "a folder, or download it where there is a network (hf download)"
        ) from error
    except (HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError) as error:
        raise ConfigError(f"{name}: the hub did not give it: {_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises:
    ConfigError: the file cannot be read, or is no JSON object.
    """
    try:
        value = parse_json(read_bounded(path, _LONGEST_JSON), finite=False)  # Python's own JSON has NaN
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except MalformedError as error:
        raise ConfigError(f"{path}: is not JSON ({error}): was it copied whole?") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value


def _shard_names(folder: Path) -> list[str]:
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{folder / INDEX}: it has no weight_map from tensors to files: get it again")
    files = sorted(set(names.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{folder / INDEX}: {file!r} is not the name of a safetensors file in this folder")
    return files


def weight_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The safetensors files of a model, and the index from tensors to file names if there are several.

    Raises:
        ConfigError: a shard is missing, or there are none, with what else there is and how to convert it.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,), None
    if (folder / INDEX).is_file():
        files = tuple(folder / name for name in _shard_names(folder))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of the {len(files)} shards that {INDEX} names "
                f"{'is' if len(missing) == 1 else 'are'} missing: {some(missing)}. Get the folder again, whole"
            )
        return files, dict(read_json(folder / INDEX)["weight_map"])
    raise ConfigError(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: its weights are pickles ({some(pickles)}), which can run any code when they are read, so they "
            'are not. If you trust them, convert them once, on a machine that holds them in memory: python -c "from '
            f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('OUT')\""
        )
    for pattern, kind in _OTHERS.items():
        if any(folder.glob(pattern)):
            return f"{folder}: its weights are for {kind}: give a folder with safetensors files"
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: this is an adapter (LoRA), not a model: give the folder of its base model"
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        return (
            f"{folder}: it has {some(loose)}, but neither {SINGLE} nor {INDEX}, which says what is where: get the "
            "folder again, whole"
        )
    return f"{folder}: it has no weights: neither {SINGLE} nor {INDEX}"


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few of a list of names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
