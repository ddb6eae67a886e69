"""A quick look at a model, at data and at a machine: no weights are read, and nothing is measured."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from penstock.cli.located import parse_yaml
from penstock.cli.named_files import check_model
from penstock.cli.settings import check_braces, read
from penstock.config import ModelConfig, SourceConfig, format_size
from penstock.config.data import STREAM_FROM
from penstock.config.sizes import format_parameters
from penstock.data.forms import form_of_source
from penstock.data.sources.find import local_source
from penstock.data.sources.walk import is_packed
from penstock.data.token_files import token_count
from penstock.errors import ConfigError
from penstock.hardware import system
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import find_profile, machine_named, on_directories
from penstock.planner.task import OWN_SHARE, own_budget
from penstock.shape import decoders
from penstock.shape.huggingface import model_shape
from penstock.shape.shipped import CONFIGS, ON_THE_HUB
from penstock.store.directory import is_there

_ENOUGH = 2000
"""Documents that are looked at."""
BYTES_A_TOKEN = 4
"""Bytes of text that are about a token."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model. ``config``: of Hugging Face. ``parameters``: None, they cannot be told without building it.
    ``template``: whether its tokenizer renders chats; None: that is not known here. ``tokenizer``: whether there is
    one."""

    settings: ModelConfig
    config: Mapping[str, Any]
    parameters: int | None
    template: bool | None
    tokenizer: bool

    @property
    def positions(self) -> int | None:
        """Tokens that it takes at a time, if its configuration says."""
        return next((n for key in _POSITIONS if isinstance(n := self.config.get(key), int) and n > 1), None)

    @property
    def name(self) -> str:
        """The name of the model, or of the folder that its configuration is in."""
        folder = Path(os.path.expanduser(self.settings.source)).absolute()
        return self.settings.name or (folder.parent if self.settings.config else folder).name

    @property
    def said(self) -> str:
        count = "" if self.parameters is None else f", {format_parameters(self.parameters)}"
        return f"model    {self.name}: {self.config['model_type']}{count}"


_POSITIONS = ("max_position_embeddings", "n_positions")


def look_at_model(name: str) -> ModelFacts:
    """Raises ConfigError: there is no such model, or its configuration cannot be read."""
    file = Path(os.path.expanduser(name))
    scratch = file.is_file() and file.name == "config.json"
    settings = ModelConfig(config=name, init=True) if scratch else ModelConfig(path=name)
    check_model(settings)
    if name in CONFIGS:
        raise ConfigError(
            f"{name} is a shape that ships for plans, without weights: give the model's folder or its name on the hub"
        )
    folder, shipped = file.parent if scratch else file, None
    if not file.exists():
        from penstock.hf.models.folder import resolve

        shipped = ON_THE_HUB.get(name)
        if shipped is None:
            folder = resolve(name, weights=False)
    config = CONFIGS[shipped] if shipped is not None else model_shape(folder / "config.json").config
    return ModelFacts(
        settings=settings,
        config=config,
        parameters=_parameters(config, None if scratch or shipped is not None else folder),
        template=None if shipped is not None else _has_template(folder),
        tokenizer=shipped is not None or any((folder / name).is_file() for name in _TOKENIZERS),
    )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _has_template(folder: Path) -> bool:
    from penstock.hf.models.folder import read_json

    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def _parameters(config: Mapping[str, Any], folder: Path | None) -> int | None:
    """By formula where there is one, else by the bytes of the weights."""
    formula = decoders.from_config(config, name="model")
    if formula is not None:
        return formula.parameters
    if folder is None:
        return None
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return nbytes // (2 if dtype.endswith("16") else 4) or None


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of data. ``forms``: of each source, in words. ``kinds``: of the examples; ``tokens`` where ids are on disk.
    ``documents``: as many as were counted, at most so many as are looked at. ``nbytes``: of all files; ``tokens``: ids
    that are on disk, and about so many of texts; None: some are not here."""

    sources: tuple[SourceConfig, ...]
    forms: tuple[str, ...]
    kinds: frozenset[str]
    documents: int
    nbytes: int | None
    tokens: int | None

    @property
    def has_many(self) -> bool:
        """True if a hundredth of the documents is certainly some."""
        return self.documents >= _ENOUGH // 2

    @property
    def said(self) -> str:
        return f"data     {'; '.join(self.forms)}"


def look_at_data(paths: Sequence[str], *, template: bool | None, tokenizer: bool) -> DataFacts:
    """``template``, ``tokenizer``: of the model, see there.

    Raises:
        ConfigError: there is nothing there, or it is of no form that is read.
    """
    sources, forms, kinds, documents, sizes, tokens = [], [], set[str](), 0, list[int](), 0
    known = True
    for path in paths:
        source = _source(path)
        reader = local_source(source)
        sources.append(source)
        if reader is None:
            known = False
            forms.append(f"{source.path}: a data set on the hub, which is looked at when training begins")
            continue
        files = reader if isinstance(reader, tuple) else reader.files
        sizes.append(sum(file.stat().st_size * (4 if is_packed(file) else 1) for file in files))
        if isinstance(reader, tuple):
            if not tokenizer:
                raise ConfigError(
                    f"data: {source.path!r} is token ids, and the model brings no tokenizer: put the one that they are "
                    "of beside its config.json, or write the settings yourself, with data.tokenizer (penstock train "
                    "--help)"
                )
            kinds.add("tokens")
            tokens += sum(token_count(file, source.dtype) for file in files)
            documents = _ENOUGH  # a share is then of tokens
            forms.append(f"{source.path}: token ids")
            continue
        tokens += min(sizes[-1], source.limit_bytes or sizes[-1]) // BYTES_A_TOKEN
        examples = (example for example, _ in reader.read(None))
        first = next(examples, None)
        form, words = form_of_source(source, first, template=bool(template))
        documents += sum(example.begins for example in chain((first,), islice(examples, _ENOUGH)) if example)
        kinds.add(form.kind)
        said = words if template is not None else None
        forms.append(f"{source.path}: {said or f'each document is {form.called}'}")
        if form.kind == "chat" and not tokenizer:
            raise ConfigError(
                f"data: {source.path!r} has chats, and the model brings no tokenizer: give the folder of one "
                "whose tokenizer has a chat template, or write the settings yourself, with data.tokenizer and "
                "data.chat_template (penstock train --help)"
            )
        if form.kind == "chat" and template is False:
            raise ConfigError(
                f"data: {source.path!r} has chats, and the model's tokenizer has no chat template: take a chat model, "
                "or write the settings yourself, with data.chat_template (penstock train --help)"
            )
    if len(sources) > 1 and known and sum(sizes) >= STREAM_FROM and "tokens" not in kinds:
        sources = _weighted(sources, sizes)
    return DataFacts(
        sources=tuple(sources),
        forms=tuple(forms),
        kinds=frozenset(kinds),
        documents=documents,
        nbytes=sum(sizes) if known else None,
        tokens=tokens if known else None,
    )


def _weighted(sources: list[SourceConfig], sizes: Sequence[int]) -> list[SourceConfig]:
    """Sources that are streamed, which have to have shares: their sizes in GB, unless they have weights."""
    if any(source.weight is not None for source in sources):
        return sources
    both = zip(sources, sizes, strict=True)
    return [replace(source, weight=float(f"{size / 1e9:.3g}")) for source, size in both]


def _source(text: str) -> SourceConfig:
    if text.lstrip().startswith("{"):
        return read(SourceConfig, parse_yaml(text, "--data", flag=True), section="")
    return SourceConfig(path=text)


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Directories for the disk tier. ``free``: bytes in the directories together; None: they are on another machine, or
    there are none."""

    paths: tuple[Path, ...]
    free: int | None


def look_at_disk(paths: Sequence[str], *, here: bool) -> DiskFacts:
    """``here``: whether it is this machine that will train.

    Raises:
        ConfigError: a directory cannot be made or written to.
    """
    found, free = list[Path](), dict[int, int]()
    for text in paths:
        path = Path(os.path.expanduser(text))
        if text.strip() == "" or "\0" in text:
            raise ConfigError("--disk: give a directory")
        check_braces("--disk ", text)
        if os.path.abspath(path) in map(os.path.abspath, found):
            raise ConfigError(f"--disk {text} is given twice: give each directory once")
        found.append(path)
        if not here:
            continue
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if is_there(folder))
        if not there.is_dir():
            raise ConfigError(f"--disk {text}: {there} is no directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"--disk {text}: {there} cannot be written to")
        free[there.stat().st_dev] = shutil.disk_usage(there).free  # of several on one drive once
    return DiskFacts(paths=tuple(found), free=sum(free.values()) if here and found else None)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Bytes of memory that a budget may have on a machine: of the device to compute on, and of the host.

    ``name``: as it was given; None: this machine. ``how``: where the figures are known from.
    """

    name: str | None
    kind: DeviceKind
    title: str
    device: int
    host: int
    how: str

    @property
    def said(self) -> str:
        where = (
            f"{format_size(self.device)} to compute in" if self.kind == "cpu" else f"{format_size(self.device)} of GPU"
        )
        return f"machine  {self.title}: {where}, {format_size(self.host)} of host memory"


def look_at_machine(name: str | None, paths: Sequence[Path]) -> MachineFacts:
    """Raises ConfigError: there is no such machine, or it has fewer drives than there are directories."""
    if name is not None:
        machine = on_directories(machine_named(name), paths)
        return _of_profile(machine, name, f"the profile of {machine.name}", machine.host.memory)
    now = system.look()
    found = find_profile(tuple(paths)) or find_profile()
    if found is not None:
        return _of_profile(found, None, "what penstock doctor has measured here, and what is free now", now.available)
    room = _gpu()
    kind: DeviceKind = "cpu" if room is None else "cuda"
    shares = OWN_SHARE[kind]
    title = f"this one, {now.cores} cores" + (", no GPU" if room is None else ", a GPU")
    return MachineFacts(
        name=None,
        kind=kind,
        title=title,
        device=int(now.available * shares[0]) if room is None else room,
        host=int(now.available * shares[1]),
        how="what is free now; penstock doctor measures the machine",
    )


def _of_profile(machine: Machine, name: str | None, how: str, memory: int) -> MachineFacts:
    """``memory``: of the host, that may be had."""
    machine = replace(machine, host=replace(machine.host, memory=min(memory, machine.host.memory)))
    if machine.device.kind == "cpu":
        machine = replace(machine, device=replace(machine.device, memory=min(memory, machine.device.memory)))
    budget = own_budget(machine, device=None, host=None)
    return MachineFacts(
        name=name,
        kind=machine.device.kind,
        title=machine.name,
        device=budget.device_bytes,
        host=budget.host_bytes,
        how=how,
    )


def _gpu() -> int | None:
    """Bytes of the GPU that a budget may have; None: there is none. Without a driver torch is not asked: that takes
    seconds."""
    if not any(Path(place).exists() for place in ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")):
        return None
    from penstock.engine.device import free_room

    return free_room()
