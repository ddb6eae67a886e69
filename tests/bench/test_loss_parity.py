"""``bench.loss_parity``: all forms of a seed train alike on text that is not held out, and a loss above is said."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from bench.corpus import Corpus, is_held_out, read, split
from bench.loss_parity import FORMS, SEEDS, Run, Setting, Verdict, describe, draw, kept, verdicts
from bench.loss_parity_run import order, train

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [f"package/module_{i}.py" for i in range(64)]
HELD_OUT = [name for name in NAMES if is_held_out(name)]


def _texts() -> dict[str, str]:
    """A file of each name, with 40 lines that no other has."""
    return {name: "".join(sha256(f"{name} {j}".encode()).hexdigest() + "\n" for j in range(40)) for name in NAMES}


def _run(form: str, seed: int, loss: float, setting: Setting) -> Run:
    return Run(
        form=form,
        seed=seed,
        setting=asdict(setting),
        optimizer=repr(FORMS[form].optimizer()),
        data="text",
        unigram=6.0,
        parameters=10**7,
        tokens=setting.tokens,
        seconds=60.0,
        versions={},
        commit="unknown",
        machine="none",
        losses=[(10, 5.0)],
        held_out=[(5, 5.0), (10, loss)],
    )


def test_files_are_held_out_by_name_and_those_much_like_training_text_are_dropped() -> None:
    texts = _texts()
    train_names, held_out = split(texts)
    assert 0 < len(held_out) < len(train_names)
    assert held_out == HELD_OUT
    assert not set(train_names) & set(held_out)
    assert split(dict(texts)) == (train_names, held_out)
    fewer = {name: text for name, text in texts.items() if name != train_names[0]}
    assert split(fewer) == (train_names[1:], held_out)

    copied, beside = held_out[0], texts[train_names[0]].splitlines(keepends=True)
    alike = texts | {copied: texts[copied] + "".join(beside[:11])}  # 11 of 51 lines
    assert split(alike) == (train_names, held_out[1:])
    less = texts | {copied: texts[copied] + "".join(beside[:10])}  # 10 of 50
    assert split(less) == (train_names, held_out)


def test_windows_are_the_same_each_time_and_none_of_them_is_in_both_parts() -> None:
    corpus, again = (read(_texts(), vocabulary=300, length=16, held_out=8) for _ in range(2))
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert corpus.digest == again.digest
    assert corpus.held_out.shape == (8, 16)
    assert not {tuple(ids) for ids in corpus.train.tolist()} & {tuple(ids) for ids in corpus.held_out.tolist()}
    changed = _texts() | {NAMES[0]: "another text, of as many letters as that one had"}
    assert read(changed, vocabulary=300, length=16, held_out=8).digest != corpus.digest
    with pytest.raises(ValueError, match="9999 held-out windows of 16 tokens: there are"):
        read(_texts(), vocabulary=300, length=16, held_out=9999)


def test_a_seed_gives_all_forms_the_same_weights_and_batches() -> None:
    assert order(50, 1).tolist() == order(50, 1).tolist() != order(50, 2).tolist()
    assert sorted(order(50, 1).tolist()) == list(range(50))
    tokens = torch.randint(256, (20, 16), generator=torch.Generator().manual_seed(0))
    corpus = Corpus(train=tokens[:16], held_out=tokens[16:20], unigram=5.0, digest="")
    setting = Setting(model="llama-tiny", length=16, steps=4, batch=4, warmup=2, evaluate_every=1)
    said: list[str] = []
    curves = {
        (form, seed): train(FORMS[form].optimizer(), setting, seed, corpus, say=said.append)
        for form, seed in (("AdamW fp32", 0), ("AdamW int8", 0), ("AdamW fp32", 1))
    }
    fp32, int8, other = curves.values()
    assert [step for step, _ in fp32[1]] == [1, 2, 3, 4]
    assert len(said) == 12
    assert fp32[1][0] == pytest.approx(int8[1][0], abs=1e-5)  # moments are codes after the first step, not in it
    assert fp32[1][-1] != int8[1][-1]
    assert abs(fp32[1][0][1] - other[1][0][1]) > 1e-3
    with pytest.raises(ValueError, match="20 windows in all steps: there are 16 to train on"):
        train(FORMS["AdamW fp32"].optimizer(), replace(setting, steps=5), 0, corpus, say=said.append)


def test_only_runs_of_these_settings_this_text_and_this_optimizer_count(tmp_path: Path) -> None:
    setting = Setting(steps=10)
    run = _run("AdamW int8", 2, 3.0, setting)
    others = [
        replace(run, setting=asdict(Setting(steps=11)), seed=0),
        replace(run, data="another text", seed=0),
        replace(run, optimizer="another optimizer", seed=0),
        replace(run, form="another form", seed=0),
    ]
    file = tmp_path / "runs.jsonl"
    assert not any(kept(file, setting, "text", FORMS).values())
    file.write_text("".join(each.to_json() + "\n" for each in [*others, run]))
    found = kept(file, setting, "text", FORMS)
    assert found == {form: {2: run} if form == "AdamW int8" else {} for form in FORMS}


@pytest.mark.parametrize(
    ("compact", "passes"),
    [
        ((3.00, 3.01, 3.02), True),
        ((2.90, 2.91, 2.92), True),
        ((3.01, 3.02, 3.03), True),  # 0.33% above, where seeds differ by 0.66%
        ((3.03, 3.02, 3.03), False),  # 0.55% above
    ],
)
def test_a_compact_form_may_be_above_by_half_a_percent_and_by_no_more_than_seeds_differ(
    compact: tuple[float, ...], passes: bool
) -> None:
    assert Verdict.of(compact, (3.00, 3.01, 3.02)).passes is passes
    assert not Verdict.of((3.002, 3.002, 3.002), (3.0, 3.0, 3.001)).passes


def test_the_table_and_the_picture_have_what_was_run_and_say_what_was_not(tmp_path: Path) -> None:
    setting = Setting(steps=10)

    def by_seed(form: str, *losses: float) -> Mapping[int, Run]:
        return {seed: _run(form, seed, loss, setting) for seed, loss in zip(SEEDS, losses, strict=False)}

    runs = {form: by_seed(form) for form in FORMS}
    runs |= {
        "AdamW fp32": by_seed("AdamW fp32", 3.0, 3.01, 3.02),
        "AdamW int8": by_seed("AdamW int8", 3.03, 3.04, 3.05),
        "AdamW bf16": by_seed("AdamW bf16", 3.0),
    }
    assert verdicts(runs).keys() == {"AdamW int8"}
    rows = {line.split(" | ")[0].lstrip("| "): line for line in describe(runs, setting).splitlines() if "|" in line}
    assert rows.keys() == {"form", "---", "AdamW fp32", "AdamW int8", "AdamW bf16"}
    assert "| 3.0400 | 0.0200 | 0.0100 | +1.00%, +1.00%, +0.99% | **+1.00%** | **NO** |" in rows["AdamW int8"]
    assert "| 3.0000, not run, not run |" in rows["AdamW bf16"]
    draw(runs, tmp_path / "picture.svg")
    assert "</svg>" in (tmp_path / "picture.svg").read_text()
