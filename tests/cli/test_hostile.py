"""Whatever is in a file, its reader gives a value or an error of ours, soon.

Valid documents are mutated (``tests.hostile``), with their checksums computed again, and given to whoever reads them.
What once broke a reader is in ``hostile_corpus.json`` and is tried first. ``--campaign`` tries many more.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from torch import nn

import penstock
from penstock.cli import main
from penstock.cli.located import dump_yaml
from penstock.cli.run_record import RunRecord
from penstock.cli.settings import load
from penstock.data.chat import ChatEncoder
from penstock.data.example import read_as
from penstock.data.forms import form_of
from penstock.data.identity import FileFacts, Identity
from penstock.data.sources.jsonl import JsonLines
from penstock.data.token_files import open_tokens, write_tokens
from penstock.documents.text import MalformedError
from penstock.errors import BudgetError, ConfigError, ModelError, ScheduleError, StoreError
from penstock.hardware.machine import parse_machine
from penstock.hf.models.folder import weight_files
from penstock.hf.models.shards import read_headers
from penstock.report.metrics_file import read_metrics
from penstock.report.prediction import parse_prediction
from penstock.report.trace_file import read_traces
from penstock.schedule.place import Format
from penstock.shape.huggingface import model_shape
from penstock.shape.shipped import CONFIGS
from penstock.store.facts import facts_of
from penstock.store.owner import Owner
from penstock.store.records import encode, read_document, write_document
from tests.conftest import Campaign
from tests.data_documents import TOOLS_TEMPLATE, tokenizer
from tests.hostile import mutated
from tests.questions import MACHINE
from tests.reports import offload_schedule, write_run

OURS = (ConfigError, StoreError, ModelError, BudgetError, ScheduleError, MalformedError)
CORPUS = Path(__file__).with_name("hostile_corpus.json")
SECONDS = 10
"""For one document, on a machine that is busy."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """``valid``: a document that is read without an error. ``read``: writes it where it is read from, and reads it."""

    valid: Any
    read: Callable[[Any], object]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _engine(store: Path) -> penstock.Engine:
    torch.manual_seed(0)
    return penstock.wrap(
        _Model(),
        optimizer=penstock.SGD(lr=0.1),
        budget=penstock.Budget(device="16MiB", host="16MiB", disk=store, weights="disk", state="disk"),
        loss_fn=lambda model, micro_batch: model(micro_batch["x"]).square().mean(),
        plan=None,
        device="cpu",
    )


def _trained(store: Path, snapshot: Path) -> None:
    with _engine(store) as engine:
        engine.step([{"x": torch.ones(2, 4)}])
        engine.save(snapshot)


def _opened(folder: Path, body: Any, *, kind: str, names: tuple[str, ...]) -> None:
    """An engine goes on with a copy of the store in which a document is another."""
    store = folder / "copy"
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(folder / "store", store)
    for name in names:
        (store / name).write_bytes(encode(kind, body).ljust(1))
    facts_of([store])
    with _engine(store) as engine:
        engine.step([{"x": torch.ones(2, 4)}])


def _loaded(folder: Path, body: Any) -> None:
    """A snapshot whose manifest is another is loaded, and trained on from."""
    write_document(folder / "snapshot" / "snapshot.json", "snapshot", body)
    with _engine(folder / "fresh") as engine:
        engine.load(folder / "snapshot")
        engine.step([{"x": torch.ones(2, 4)}])
    shutil.rmtree(folder / "fresh")


def _owned(folder: Path, body: Any) -> None:
    write_document(folder / "run.json", "run", body)
    RunRecord.read(folder)


def _safetensors(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(48))
    read_headers([folder / "model.safetensors"])


def _index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weight_files(folder)


def _configuration(folder: Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    model_shape(folder / "config.json").profile(1, 16, Format.of("bf16", 2))


def _report(folder: Path, name: str, write: Callable[[Any], str], document: Any) -> None:
    """One file of a run is another; the whole page is made, and pictures by the readers alone."""
    (folder / name).write_text(write(document), encoding="utf-8", errors="surrogatepass")
    read_metrics(folder / "metrics.jsonl")
    read_traces(folder)
    assert main(["report", str(folder)]) in (0, 2)


def _settings(folder: Path, tree: Any) -> None:
    (folder / "c.yaml").write_text(yaml.dump(tree), encoding="utf-8", errors="surrogatepass")
    assert dump_yaml({"again": load(folder / "c.yaml").run})


def _chat(folder: Path, row: Any, encoder: ChatEncoder) -> None:
    (folder / "a.jsonl").write_text(json.dumps(row) + "\n")
    for example, _ in JsonLines(files=(folder / "a.jsonl",)).read(None):
        form = form_of(example, None, template=True)
        found = read_as(example, form, answers=True)
        if form.kind == "chat":
            encoder.encode([found])


def _lines(document: Any) -> str:
    return "".join(json.dumps(line) + "\n" for line in document) if isinstance(document, list) else str(document)


def _as_trace(document: Any) -> str:
    return "[\n" + "".join(json.dumps(line) + ",\n" for line in document) if isinstance(document, list) else "["


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Reader]:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    state = folder("state")
    _trained(state / "store", state / "snapshot")
    manifest = read_document(state / "store" / "manifest.json", "store")
    commit = max((_commit(state / "store" / f"commit.{n}") for n in (0, 1)), key=lambda body: body["sequence"])
    run = folder("run")
    RunRecord.of(Owner.new(run)).write(run)
    tokens = folder("tokens")
    write_tokens(tokens / "a.tokens", [[1, 2], [3]])
    facts = FileFacts(name="a", nbytes=1, changed_ns=2, digest="x")
    identity = Identity(files=(facts,), settings={"packing": True, "sources": [{"path": "a"}]})
    shards = folder("shards")
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    header["b"] = {"dtype": "F32", "shape": [6], "data_offsets": [24, 48]}
    (shards / "one.safetensors").touch()
    report = folder("report")
    write_run(report, schedule=offload_schedule(1))
    trace = [json.loads(line.rstrip(",")) for line in (report / "trace.json").read_text().splitlines()[1:12]]
    metrics = [json.loads(line) for line in (report / "metrics.jsonl").read_text().splitlines()]
    prediction = json.loads((report / "prediction.json").read_text())
    words = tokenizer(300)
    words.chat_template = TOOLS_TEMPLATE
    said = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "water"}]
    written = yaml.safe_load((Path(__file__).parent.parent.parent / "examples" / "demo.yaml").read_text())
    call = {"from": "function_call", "value": '{"name": "valve", "arguments": {"open": 1}}'}
    rows: Mapping[str, Any] = {
        "chat": {"messages": said, "tools": "[]"},
        "sharegpt": {"system": "be", "conversations": [{"from": "human", "value": "the"}, call]},
        "alpaca": {"instruction": "the", "input": "of", "output": "water", "history": [["a", "b"]]},
    }
    chats = ChatEncoder(words, answers=True, alone=True)
    return {
        "manifest": Reader(valid=manifest, read=partial(_opened, state, kind="store", names=("manifest.json",))),
        "commit": Reader(valid=commit, read=partial(_opened, state, kind="commit", names=("commit.0", "commit.1"))),
        "snapshot": Reader(
            valid=read_document(state / "snapshot" / "snapshot.json", "snapshot"), read=partial(_loaded, state)
        ),
        "run": Reader(valid=read_document(run / "run.json", "run"), read=partial(_owned, run)),
        "tokens": Reader(
            valid=json.loads((tokens / "a.json").read_text()),
            read=lambda head: (tokens / "a.json").write_text(json.dumps(head)) and open_tokens(tokens / "a.tokens"),
        ),
        "identity": Reader(
            valid=json.loads(identity.to_json()), read=lambda value: Identity.from_json(json.dumps(value))
        ),
        "safetensors": Reader(valid=header, read=partial(_safetensors, folder("safetensors"))),
        "index": Reader(valid={"weight_map": {"a": "one.safetensors"}}, read=partial(_index, shards)),
        "configuration": Reader(valid=dict(CONFIGS["llama-8b"]), read=partial(_configuration, folder("config"))),
        "gpt": Reader(valid=dict(CONFIGS["gpt-13b"]), read=partial(_configuration, folder("gpt"))),
        "machine": Reader(
            valid=json.loads(MACHINE.to_json()), read=lambda value: parse_machine(json.dumps(value), "x.json")
        ),
        "metrics": Reader(valid=metrics, read=partial(_report, report, "metrics.jsonl", _lines)),
        "trace": Reader(valid=trace, read=partial(_report, report, "trace.json", _as_trace)),
        "prediction": Reader(valid=prediction, read=lambda value: parse_prediction(json.dumps(value))),
        "settings": Reader(valid=written, read=partial(_settings, folder("settings"))),
        **{name: Reader(valid=row, read=partial(_chat, folder(name), encoder=chats)) for name, row in rows.items()},
    }


def _commit(path: Path) -> Any:
    try:
        return read_document(path, "commit")
    except StoreError:
        return {"sequence": -1}


READERS = (
    *("manifest", "commit", "snapshot", "run", "tokens", "identity", "safetensors", "index", "configuration", "gpt"),
    *("machine", "metrics", "trace", "prediction", "settings", "chat", "sharegpt", "alpaca"),
)


def _read(reader: Reader, document: Any) -> None:
    with suppress(*OURS):
        reader.read(document)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_changed_document_is_read_or_refused(
    name: str, readers: Mapping[str, Reader], campaign: Campaign, pytestconfig: pytest.Config
) -> None:
    reader = readers[name]
    reader.read(reader.valid)
    for known in json.loads(CORPUS.read_text()):
        if known["reader"] == name:
            _read(reader, known["document"])

    @settings(
        max_examples=campaign.cases(few=4, many=3000),
        deadline=timedelta(seconds=SECONDS),
        suppress_health_check=list(HealthCheck),
        derandomize=not campaign.full,
        database=None,
    )
    @given(document=mutated(reader.valid))
    def every(document: Any) -> None:
        _read(reader, document)

    every()
    reader.read(reader.valid)  # nothing that was read has harmed what is kept
