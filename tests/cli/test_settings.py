"""Settings: what is written is what is meant; anything else is an error that names the place and the remedy."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock
from penstock.cli import settings
from penstock.cli.arguments import train_help
from penstock.cli.located import dump_yaml, parse_yaml
from penstock.config import Budget, Endurance, SourceConfig, TrainConfig
from penstock.config.elsewhere import HERE
from penstock.errors import ConfigError

MINIMAL = """\
run: runs/x
model: {init: true, config: {model_type: llama, rms_norm_eps: 1e-5}}
data: {sources: stdlib, tokenizer: {train: {vocabulary: 512}}, sequence_length: 64}
optimizer:
  lr: 3e-4
budget:
  device: 64MiB
  host: 24MiB
  disk: "{run}/store"
batch: {sequences: 12}
steps: 5
"""

EVALUATED = (("evaluate.every", "2"), ("data.validation.share", "0.1"))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    return path


def _refused(path: Path, *flags: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        settings.load(path, flags)
    return str(caught.value)


def test_a_file_becomes_the_dataclass_with_defaults(config_file: Path) -> None:
    config = settings.load(config_file)
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.name == "adamw"
    assert config.model.config["rms_norm_eps"] == 1e-5
    assert config.budget == Budget(device="64MiB", host="24MiB", disk="runs/x/store")


def test_a_source_may_be_its_path_alone(config_file: Path) -> None:
    data = settings.load(config_file, [("data.sources", "[a.jsonl, {path: b.txt, kind: text}]")]).data
    assert data.each_source == (SourceConfig(path="a.jsonl"), SourceConfig(path="b.txt", kind="text"))


def test_one_mapping_is_a_list_of_it(config_file: Path) -> None:
    given = [
        ("data.sources", "{path: qa.csv, fields: {prompt: question, completion: answer}}"),
        ("optimizer.overrides", "{match: norm, lr: 1e-4}"),
    ]
    config = settings.load(config_file, given)
    assert [source.path for source in config.data.each_source] == ["qa.csv"]
    assert [override.lr for override in config.optimizer.overrides] == [1e-4]
    assert _refused(config_file, ("data.sources", "{path: qa.csv, limits: 1MB}")).startswith(
        "--data.sources: there is no"
    )


def test_flags_win_over_the_file(config_file: Path) -> None:
    flags = [
        ("optimizer.lr", "1e-3"),
        ("run", "else"),
        ("model.config.num_hidden_layers", "2"),
        ("micro-batch-size", "3"),
    ]
    config = settings.load(config_file, [*flags, *EVALUATED, ("optimizer.betas", "[0.9, 0.99]")])
    assert (config.optimizer.lr, config.run, config.budget.disk) == (1e-3, "else", "else/store")
    assert config.model.config["num_hidden_layers"] == 2
    assert config.split == (3, 4)
    assert config.evaluate is not None
    assert config.evaluate.every == 2
    assert config.optimizer.betas == (0.9, 0.99)


def test_what_is_dumped_reads_back_equal(config_file: Path, tmp_path: Path) -> None:
    flags = [
        *EVALUATED,
        ("budget.disk", "[a, b]"),
        ("run", "'on'"),
        ("trace_steps", "null"),
        ("budget.endurance", "{tbw: 1200TB, days: 365}"),
    ]
    config = settings.load(config_file, flags)
    assert config.budget.endurance == Endurance(tbw="1200TB", days=365)
    copy = tmp_path / "copy.yaml"
    copy.write_text(settings.dump(config))
    assert settings.load(copy) == config


def test_an_unknown_key_names_its_line_and_the_nearest_known_one(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace("  lr: 3e-4", "  lr: 3e-4\n  wieght_decay: 0.1"))
    message = _refused(config_file)
    assert "c.yaml:6" in message
    assert "did you mean optimizer.weight_decay" in message


def test_an_unknown_flag_names_itself_and_the_nearest_known_one(config_file: Path) -> None:
    message = _refused(config_file, ("optimizer.lrr", "1"))
    assert message.startswith("--optimizer.lrr:")
    assert "did you mean optimizer.lr?" in message


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("gradient_accumulation_steps", "batch.sequences (batch.sequences counts the sequences of a whole step"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("optimizer.type", "optimizer.name"),
        ("batch.micro_batch_size", "micro_batch_size (outside of any section"),
        ("max-grad-norm", "clip_grad_norm"),
        ("lora.r", "lora.rank"),
        ("zero_optimization", "budget and stage"),
    ],
)
def test_another_tools_name_says_what_it_is_called_here(key: str, here: str, config_file: Path) -> None:
    named = key.replace("-", "_")
    assert _refused(config_file, (key, "1")).startswith(f"--{key}: there is no setting {named}; here it is {here}")


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("moments", "optimizer.moments"),
        ("sequence-length", "data.sequence_length"),
        ("per_day", "budget.endurance.per_day"),
        ("data.share", "data.validation.share"),
        ("optimizer.clip_grad_norm", "clip_grad_norm"),
        ("optimizer.adamw.moments", "optimizer.moments"),
        ("decay_norms_and_biases", "optimizer.decay_norms_and_biases or optimizer.adamw.decay_norms_and_biases"),
    ],
)
def test_a_setting_in_the_wrong_section_says_where_it_belongs(key: str, here: str, config_file: Path) -> None:
    named = key.replace("-", "_")
    assert _refused(config_file, (key, "1")) == f"--{key}: there is no setting {named}; here it is {here}"


def test_a_setting_of_another_section_is_no_answer(config_file: Path) -> None:
    assert "there is no setting budget.moments; did you mean budget." in _refused(config_file, ("budget.moments", "1"))


def test_another_tools_name_in_a_file_says_its_line(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "logging_steps: 10\n")
    assert "c.yaml:12: there is no setting logging_steps; drop it: every step is written" in _refused(config_file)


@pytest.mark.parametrize(
    ("section", "given", "here"),
    [
        ("optimizer.adamw", "learning_rate: 1e-3", "optimizer.adamw.lr"),
        ("optimizer.adamw", "adam_beta1: 0.9", "optimizer.adamw.betas"),
        ("optimizer.adamw", "optim: adamw", "optimizer.name"),
        ("data.validation", "datasets: x", "data.validation.sources"),
    ],
)
def test_another_tools_name_means_the_setting_of_its_own_section_first(
    section: str, given: str, here: str, config_file: Path
) -> None:
    key = given.partition(":")[0]
    message = _refused(config_file, (section, f"{{{given}}}"))
    assert message.startswith(f"--{section}: there is no setting {section}.{key}; here it is {here}")


def test_all_that_stands_for_other_tools_settings_exists() -> None:
    there = {setting.name for setting in settings.settings_below(TrainConfig)}
    sources = {f"data.sources.{field}" for field in SourceConfig.__dataclass_fields__}  # in a list, not described
    for name, said in HERE.items():
        keys = said.partition(" (")[0].split(" and ")
        assert said.startswith("drop it: ") or set(keys) <= there | sources, name
        assert name not in there or name == "micro_batch_size", f"{name} is a setting here, and is never unknown"


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("steps", "many", "whole number"),
        ("steps", "1.5", "whole number"),
        ("steps", "true", "whole number"),
        ("stage", "true", "one of 0, 1, 2, 3"),
        ("steps", "0", "at least 1"),
        ("run", "7", "text"),
        ("optimizer.lr", "fast", "a number"),
        ("optimizer.lr", ".inf", "a number"),
        ("optimizer.lr", "-1e-3", "optimizer.lr=-0.001: must be a finite number of at least 0"),
        ("optimizer.betas", "[0.9, 1.0]", "optimizer.betas=(0.9, 1.0): must be two numbers"),
        ("optimizer.eps", "-1", "optimizer.eps=-1.0: must be a finite number"),
        ("optimizer.weight_decay", "-1", "optimizer.weight_decay=-1.0: must be a finite number"),
        ("optimizer.overrides", "{match: norm, lr: -1}", "lr=-1.0: must be a finite number"),
        ("optimizer.overrides", "{match: norm}", "changes nothing"),
        ("optimizer", "{name: sgd, lr: 1, nesterov: true}", "optimizer.nesterov has no effect without"),
        ("optimizer", "{name: sgd, lr: 1, moments: int8}", "optimizer.moments has no effect without"),
        ("optimizer", "{name: muon, lr: 1, adamw: {lr: -1}}", "optimizer.adamw.lr=-1.0: must be a finite number"),
        ("budget.disk", "[a, ./a]", "budget.disk has a twice"),
        ("budget.interval", "5parsecs", "budget.interval: '5parsecs' is not a time"),
        ("optimizer.betas", "[0.9]", "list of 2"),
        ("optimizer.name", "adamm", "one of adamw"),
        ("budget.device", "12 parsecs", "not a size"),
        ("budget.gradients", "device", "one of host, disk"),
        ("steps.more", "1", "no settings inside"),
        ("model", "7", "text or a mapping"),
        ("model", "{config: {model_type: llama}}", "model.init: true"),
        ("model", "{path: m, init: true}", "model.config: m"),
        ("model", "{path: m, config: {}}", "drop one"),
        ("model", "{init: true}", "names no model"),
        ("model.revision", "main", "no effect"),
        ("model.config", "{}", "model_type"),
        ("optimizer", "{lr: 1", "not YAML"),
        ("data.shuffle", "5", "no effect"),
        ("data", "{sources: a, sequence_length: 8, streaming: true, shuffle: 1000000000000}", "at most 33,554,432"),
        ("data.sources", "[]", "is empty"),
        ("optimizer.momentum", "0.9", "no effect"),
        ("lr_schedule.final", "0.1", "no effect"),
        ("lr_schedule", "{kind: cosine, warmup_steps: 5}", "leaves no step"),
        ("lr_schedule", "{kind: wsd, warmup_steps: 2, decay_steps: 4}", "more than the 5 steps"),
        ("lr_schedule", "{kind: wsd}", "for how long"),
        ("lr_schedule", "{warmup_steps: 2, warmup_share: 0.1}", "twice"),
        ("lr_schedule", "{kind: linear, decay_shape: cosine}", "no effect with kind 'linear'"),
        ("lr_schedule", "{warmup_share: 2}", "from 0 to 1"),
        ("batch", "{sequences: 4, tokens: 256}", "give one of"),
        ("batch", "{}", "neither sequences nor tokens"),
        ("batch", "{sequences: 0}", "at least 1"),
        ("batch", "{tokens: 100}", "give 64 or 128"),
        ("micro_batch_size", "5", "give one of 3, 4, 6"),
        ("epochs", "2", "both given"),
        ("steps", "null", "neither steps nor epochs"),
        ("optimizer.decay_norms_and_biases", "yes", "true or false"),
        ("optimizer", "{lr: 1, name: lion, decay_norms_and_biases: true}", "no effect without weight decay"),
        ("clip_grad_norm", "0", "must be positive"),
        ("evaluate.batches", "1", "lacks every"),
        ("delay", "1.5", "from 0 to 1"),
        ("delay", "half", "a number"),
        ("speculate", "maybe", "true or false or null"),
        ("grad_dtype", "fp16", "one of fp32, bf16"),
        ("data.validation", "{share: 1.0}", "between 0 and 1"),
        ("data.validation", "{sources: v.jsonl}", "no effect without evaluate"),
        ("data.validation", "{}", "give one of them"),
        ("evaluate", "{every: 1}", "needs data.validation"),
        ("data.packing", "tight", "true or false or one of continuous"),
        ("data.sources", "[{path: a.jsonl, weight: 1}]", "no effect on a source that is alone"),
        ("data.sources", "[{path: a.jsonl, weight: 1}, {path: b.jsonl}]", "give all of them one"),
        ("data.sources", "[{path: a.jsonl, weihgt: 1}]", "did you mean data.sources.weight"),
        ("data.sources", "[{path: a.bin}]", "uint16 or uint32"),
        ("data.tokenizer", "{train: {vocabulary: 10}}", "more than 257"),
    ],
)
def test_a_wrong_value_says_which_setting_and_what_it_must_be(
    config_file: Path, key: str, text: str, says: str
) -> None:
    message = _refused(config_file, (key, text))
    assert says in message
    assert message.startswith(("--", str(config_file)))


def test_epochs_of_more_steps_than_a_runs_settings_can_hold_are_refused(config_file: Path) -> None:
    """Else the run could not be resumed: its settings would not be read."""
    said = _refused(config_file, ("steps", "null"), ("epochs", "1e300"))
    assert said == "--epochs=1e+300: must be at most 1,048,576"


def test_a_batch_in_tokens_is_as_many_sequences(config_file: Path) -> None:
    config = settings.load(config_file, [("batch", "{tokens: 512}"), ("micro_batch_size", "2")])
    assert (config.sequences_per_step, config.split) == (8, (2, 4))


def test_merged_mappings_come_behind_a_mappings_own_keys(config_file: Path) -> None:
    text = MINIMAL.replace("  lr: 3e-4", "  <<: [{lr: 1.0, eps: 2.0}, {lr: 3.0, weight_decay: 4.0}]\n  eps: 5.0")
    config_file.write_text(text)
    optimizer = settings.load(config_file).optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay) == (1.0, 5.0, 4.0)
    config_file.write_text(MINIMAL.replace("  lr: 3e-4", "  lr: 3e-4\n  <<: 5"))
    assert _refused(config_file) == f"{config_file}:6: << merges mappings, not 5"


@pytest.mark.parametrize(("key", "says"), [("5", "the key 5 is not text"), ("? [a]\n", "a list or mapping is no key")])
def test_a_key_that_is_no_text_names_its_line(config_file: Path, key: str, says: str) -> None:
    config_file.write_text(f"{MINIMAL}{key}: 1\n")
    assert _refused(config_file).startswith(f"{config_file}:{len(MINIMAL.splitlines()) + 1}: {says}")


def test_a_check_between_settings_points_at_the_line(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace("steps: 5", "steps: -5"))
    assert f"{config_file}:11: steps=-5" in _refused(config_file)


def test_a_length_in_the_other_way_is_given_as_the_refusal_says(config_file: Path) -> None:
    """``penstock init`` writes epochs, and a first try wants a few steps; or the other way about."""
    assert "--steps N --epochs null, or --epochs N --steps null" in _refused(config_file, ("epochs", "2"))
    assert settings.load(config_file, [("epochs", "2"), ("steps", "null")]).epochs == 2
    config_file.write_text(MINIMAL.replace("steps: 5", "epochs: 2"))
    assert "--steps N --epochs null, or --epochs N --steps null" in _refused(config_file, ("steps", "3"))
    assert settings.load(config_file, [("steps", "3"), ("epochs", "null")]).steps == 3


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("model.path", "x", "model.config has no effect with model.path"),
        ("batch.tokens", "64", "batch has sequences and tokens"),
        ("epochs", "3", "steps and epochs are both given"),
        ("steps", "null", "neither steps nor epochs is given"),
    ],
)
def test_where_a_line_does_not_go_with_a_flag_both_are_said(
    config_file: Path, flag: str, value: str, says: str
) -> None:
    said = _refused(config_file, (flag, value), ("run", "runs/b"), ("optimizer.lr", "1e-3"))
    assert re.match(rf"{re.escape(str(config_file))}:\d+: {says}", said)
    assert said.endswith(f"; given as a flag: --{flag}"), "and no other"
    assert _refused(config_file, ("optimizer.lr", "-1"), ("run", "b")).startswith("--optimizer.lr=-1.0: must be")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("- 1", "mapping"),
        ("run: x\nrun: y", "twice"),
        ("1: x", "not text"),
        ("run: [x", "not YAML"),
        ("run: a\0b", "not YAML"),
        ("run: a\x07b", "not YAML"),
        ("run: x", "lacks model, data, optimizer, batch, budget"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert says in _refused(path)


@pytest.mark.parametrize(
    ("disk", "run", "means"),
    [
        ("{run}/store", "/a/runs/b", "/a/runs/b/store"),
        ("{run}", "runs/b", "runs/b"),
        ("/nvme/{run}", "runs/b", "/nvme/b"),
        ("/nvme/{run}", "../b/", "/nvme/b"),
        ("/nvme/{run}/{run}-state", "/a/b", "/nvme/b/b-state"),
    ],
)
def test_each_run_has_its_own_directory_on_a_drive(config_file: Path, disk: str, run: str, means: str) -> None:
    config = settings.load(config_file, (("budget.disk", f"'{disk}'"), ("run", run)))
    assert [str(path) for path in config.budget.disk_paths] == [means]


def test_what_stands_for_nothing_in_the_place_of_the_state_is_refused(config_file: Path) -> None:
    """Braces of the run's own name are none of these, also where the run has written them down."""
    with pytest.raises(ConfigError, match=r"budget.disk='/nvme/\{nope\}': \{nope\} stands for nothing"):
        settings.load(config_file, [("budget.disk", '"/nvme/{nope}"')])
    config = settings.load(config_file, [("run", '"runs/{a}"'), ("budget.disk", '"/nvme/{run}"')])
    assert settings.load_text(settings.dump(config), "config.yaml").budget.disk == "/nvme/{a}"
    earlier = settings.dump(config).replace("/nvme/{a}", "/nvme/{host}")
    assert settings.load_text(earlier, "config.yaml").budget.disk == "/nvme/{host}"


def test_the_words_for_the_runs_folder_are_refused_where_they_stand_for_nothing(config_file: Path) -> None:
    """A run that began with a folder of that name goes on with it."""
    prepared = ("data.prepared", "'{run}/tokens'")
    with pytest.raises(ConfigError, match=r"data.prepared='\{run\}/tokens': \{run\} stands for the run's folder in"):
        settings.load(config_file, [prepared])
    with pytest.raises(ConfigError, match=r"run='runs/\{run\}': \{run\} stands for this folder in budget.disk"):
        settings.load(config_file, [("run", "runs/{run}")])
    earlier = settings.dump(settings.load(config_file, [("data.prepared", "'{was}/tokens'")])).replace("{was}", "{run}")
    assert settings.load_text(earlier, "config.yaml").data.prepared == "{run}/tokens"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in _refused(tmp_path / "none.yaml")


@example({"\x85": None})
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_value_survives_being_written_and_read(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "x").plain() == value


def test_every_setting_has_a_meaning() -> None:
    known = settings.settings_below(TrainConfig)
    assert [each.name for each in known if not (each.meaning if each.kind else each.about)] == []
    (one,) = (each for each in known if each.name == "batch.sequences")
    assert (one.kind, one.default, one.meaning) == ("a whole number or null", "null", "sequences in a step")


@pytest.mark.parametrize("columns", [80, 200])
def test_help_shows_every_setting_once_by_section(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = train_help().partition("\n\nrun\n")[2].splitlines()
    assert max(map(len, lines)) <= 100
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    names = [each.name for each in settings.settings_below(TrainConfig) if each.kind]
    assert sorted(shown) == sorted(names)
    sections = [name.split(".")[0] if "." in name else "" for name in shown]
    assert sections[0] == "", "the run's own come first"
    blocks = [name for name, before in zip(sections, [None, *sections], strict=False) if name != before]
    assert blocks[0] == blocks[-1] == "", (
        "the run's own settings are the first paragraph, and those rarely needed the last"
    )
    assert len(blocks[1:]) == len(set(blocks)), "each section is one paragraph"
    assert shown[:4] == ["run", "steps", "epochs", "micro_batch_size"]
    assert blocks[1:6] == ["model", "data", "optimizer", "batch", "budget"]
    assert (blocks[-1], shown[-5:]) == ("", ["recompute", "strands", "stage", "sync_buffers", "deal"]), (
        "what is rarely needed comes last"
    )
    at = lines.index("  --clip_grad_norm                  a number or null; default 1.0")
    assert lines[at + 1] == "      gradients are scaled down to this norm; null: off"
    assert any(line.startswith("batch: The global batch") for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_is_as_wide_as_the_terminal_but_never_too_wide_to_read(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    usage, _, settings_of_a_run = train_help().partition("\n\nrun\n")
    assert usage.startswith("penstock train")
    widest = max(map(len, settings_of_a_run.splitlines()))
    assert 0.8 * min(columns, 100) < widest <= min(columns, 100)


def test_help_of_wrap_names_what_is_needed_first_in_lines_that_can_be_read() -> None:
    said = penstock.wrap.__doc__ or ""
    assert max(map(len, said.splitlines())) <= 116
    order = list(inspect.signature(penstock.wrap).parameters)
    assert order[:4] == ["model", "optimizer", "budget", "loss_fn"]
    assert order[-5:] == ["recompute", "strands", "stage", "sync_buffers", "deal"]
    explained = re.findall(r"^    (\w+): ", said.partition("Keyword arguments:")[2], re.MULTILINE)
    assert explained == order[1:]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([("speculate", "true"), ("clip_grad_norm", "null")], "no step waits for a norm"),
        ([("speculate", "false"), ("clip_grad_norm", "null")], "no step waits for a norm"),
        ([("delay", "0.5"), ("schedule", "horizontal")], "--delay=0.5 needs schedule='vertical': others go"),
        (
            [("delay", "0.5"), ("schedule", "1f1b"), ("pipeline", "2")],
            "--delay=0.5 needs schedule='vertical': others go",
        ),
        ([("schedule", "1f1b")], "--schedule='1f1b' is an order of the ranks of a pipeline, and there is none: set"),
        ([("schedule", "interleaved-1f1b")], "--schedule='interleaved-1f1b' is an order of the ranks of a pipeline"),
        (
            [("schedule", "zero-bubble")],
            "--schedule='zero-bubble' is an order of the ranks of a pipeline, and there is",
        ),
        (
            [("schedule", "zero-bubble"), ("pipeline", "2"), ("compile", "true")],
            "--schedule='zero-bubble' and compile: it runs a block's backward in two parts",
        ),
        ([("strands", "0")], "--strands=0: must be from 1 to 1024"),
        ([("delay", "0"), ("schedule", "own.schedule")], "--delay has no effect with a schedule of your own"),
        (
            [("speculate", "true"), ("clip_grad_norm", "1"), ("schedule", "own.schedule")],
            "--speculate has no effect with a schedule of your own",
        ),
    ],
)
def test_what_a_schedule_decides_cannot_be_set_beside_it(
    config_file: Path, flags: list[tuple[str, str]], says: str
) -> None:
    assert says in _refused(config_file, *flags)


def test_steps_may_be_delayed_and_speculate_where_that_does_something(config_file: Path) -> None:
    config = settings.load(config_file, [("delay", "0.25"), ("speculate", "false"), ("precision", "fp16")])
    assert (config.delay, config.speculate) == (0.25, False)


def test_a_meaning_may_go_on_in_the_next_line() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Long:
        """Settings.

        | field | meaning |
        |---|---|
        | ``first`` | begins here
        and ends here |
        | ``second`` | short |
        """

        first: int
        second: int

    assert [each.meaning for each in settings.settings_below(Long)] == ["begins here and ends here", "short"]


def test_a_run_with_hundreds_of_sources_reads_what_it_has_written(config_file: Path) -> None:
    """A list within the limits of what somebody writes, with paths that are not ASCII."""
    sources = ", ".join(f"{{path: 水/{n:04}.jsonl, kind: text}}" for n in range(1600))
    config = settings.load(config_file, [("data.sources", f"[{sources}]")])
    written = settings.dump(config)
    assert settings.load_text(written, "config.yaml") == config
    assert "  - path: 水/0000.jsonl\n    kind: text\n  - path: 水/0001.jsonl\n" in written


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = [
        ("run", "'~/r'"),
        ("budget.disk", "['~/a', '{run}/b']"),
        ("data.tokenizer", "'~/t'"),
        ("data.chat_template", "'~/c'"),
        ("data.prepared", "'~/p'"),
        ("model", "{init: true, config: '~/m/config.json'}"),
        ("schedule", "'~/s'"),
    ]
    config = settings.load(config_file, flags)
    data, home = config.data, str(tmp_path)
    found = [config.run, *map(str, config.budget.disk_paths), data.tokenizer, data.chat_template, data.prepared]
    assert found == [f"{home}/{name}" for name in ("r", "a", "r/b", "t", "c", "p")]
    assert (config.model.config, config.schedule) == (f"{home}/m/config.json", tmp_path / "s")
    assert settings.load(config_file, [("model", "'~/m'")]).model.path == f"{home}/m"
    assert Budget(device=1 << 30, host=1 << 30, disk="~/a").disk_paths == (tmp_path / "a",)
    assert settings.load_text(settings.dump(config), "config.yaml") == config
