"""Training with compact moments beside that with fp32 ones: held-out losses of each form beside those of its fp32 form.

    python -m bench.loss_parity

A Llama of 10M parameters learns the sources of Python's standard library (``bench.corpus``), a thousand steps from
each of three seeds, in fp32 on one core, by the optimizer's own kernels. A seed gives all forms the same first weights
and the same batches in the same order. Required of each compact form: its mean held-out loss after the last step is
above that of its fp32 form by no more than the spread of the fp32 form's seeds, and by no more than 0.5%.

A run takes ten to twenty minutes of one quiet core and is kept, one line of ``bench/results/loss_parity.jsonl``; only
those are done that are not there yet for these settings, this text and this optimizer. Started twice at once, the
command shares the runs. At its end it draws ``docs/loss_parity.svg`` and makes the table, from all that is kept.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import penstock
from bench.corpus import library_texts, read
from bench.harness import RESULTS, ROOT, SCRATCH, BenchError, results_file, run_in, write_section
from bench.turns import table
from penstock.config.optimizer import Moments, OptimizerSpec

AT_MOST = 0.005
"""How much of its fp32 form's loss a compact form's may be above it."""
SEEDS = (0, 1, 2)
KEPT = RESULTS / "loss_parity.jsonl"
PICTURE = ROOT / "docs" / "loss_parity.svg"
RUN_MODULE = "bench.loss_parity_run"


@dataclass(frozen=True, kw_only=True)
class Form:
    """An optimizer with its moments in one form. ``against``: the form with fp32 moments, a key of ``FORMS``; None:
    this is one."""

    optimizer: Callable[[], OptimizerSpec]
    against: str | None = None


def _adamw(moments: Moments) -> penstock.AdamW:
    return penstock.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, decay_norms_and_biases=False, moments=moments)


def _muon(moments: Moments) -> OptimizerSpec:
    """With AdamW's rate, which ``match_rms_adamw`` lets it have."""
    return penstock.Muon(
        lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", adamw=_adamw("fp32"), moments=moments
    )


FORMS: Mapping[str, Form] = {
    "AdamW fp32": Form(optimizer=lambda: _adamw("fp32")),
    "AdamW int8": Form(optimizer=lambda: _adamw("int8"), against="AdamW fp32"),
    "AdamW bf16": Form(optimizer=lambda: _adamw("bf16"), against="AdamW fp32"),
    "Muon fp32": Form(optimizer=lambda: _muon("fp32")),
    "Muon int8": Form(optimizer=lambda: _muon("int8"), against="Muon fp32"),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all forms have in common: a step sees ``batch`` windows of ``length`` tokens."""

    model: str = "llama-10m"
    vocabulary: int = 2048
    length: int = 128
    batch: int = 4
    steps: int = 1000
    warmup: int = 100
    final: float = 0.1
    """The learning rate at the end of its cosine decay, as a part of its largest."""
    evaluate_every: int = 100
    held_out_windows: int = 256

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.length


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run to do."""

    form: str
    seed: int
    setting: Setting

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Task":
        fields = json.loads(text)
        return Task(setting=Setting(**fields.pop("setting")), **fields)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has been done, one line of the file. ``losses``, ``held_out``: by step, in nats per token.

    ``data``: ``Corpus.digest``. ``unigram``: as there.
    """

    form: str
    seed: int
    setting: Mapping[str, object]
    optimizer: str
    data: str
    unigram: float
    parameters: int
    tokens: int
    seconds: float
    versions: Mapping[str, str]
    commit: str
    machine: str
    losses: Sequence[tuple[int, float]]
    held_out: Sequence[tuple[int, float]]

    @property
    def last(self) -> float:
        """Held-out loss after the last step."""
        return self.held_out[-1][1]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Run":
        fields = json.loads(text)
        losses, held_out = ([(step, loss) for step, loss in fields.pop(name)] for name in ("losses", "held_out"))
        return Run(losses=losses, held_out=held_out, **fields)


def kept(path: Path, setting: Setting, data: str, forms: Mapping[str, Form]) -> dict[str, dict[int, Run]]:
    """The runs in a file that count, by form and seed: those of these settings, this text and these optimizers."""
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[str, dict[int, Run]] = {form: {} for form in forms}
    for run in map(Run.from_json, lines):
        if (
            run.form in forms
            and (run.setting, run.data) == (asdict(setting), data)
            and run.optimizer == repr(forms[run.form].optimizer())
        ):
            found[run.form][run.seed] = run
    return found


@contextmanager
def _mine(form: str, seed: int) -> Iterator[bool]:
    """True if nobody else is at this run; as long as this lasts, nobody else will be."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with (SCRATCH / f"loss_parity-{form.replace(' ', '-')}-{seed}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def do_missing(setting: Setting, data: str, at_most: int | None) -> None:
    """Do the runs that are not kept, seed by seed, so that forms can be compared after each. ``at_most``: so many.

    Raises:
        BenchError: a run failed.
    """
    done = 0
    for seed in SEEDS:
        for form in FORMS:
            if done == at_most:
                return
            with _mine(form, seed) as mine:
                if not mine or seed in kept(KEPT, setting, data, FORMS)[form]:
                    continue
                print(f"{form}, seed {seed}", flush=True)
                task = Task(form=form, seed=seed, setting=setting)
                run = Run.from_json(run_in(None, RUN_MODULE, task.to_json(), show=True).splitlines()[-1])
                with KEPT.open("a") as file:
                    file.write(run.to_json() + "\n")
                done += 1


# ---- what it says


def last_losses(runs: Mapping[int, Run]) -> list[float]:
    return [runs[seed].last for seed in sorted(runs)]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A compact form beside its fp32 form, over the seeds that both have. Losses in nats per token.

    ``above``: the mean's distance, as a part of the fp32 form's mean. ``spread``: largest less smallest of the fp32
    form's, as a part of its mean.
    """

    above: float
    spread: float

    @staticmethod
    def of(compact: Sequence[float], fp32: Sequence[float]) -> "Verdict":
        mean = statistics.mean(fp32)
        return Verdict(above=statistics.mean(compact) / mean - 1, spread=(max(fp32) - min(fp32)) / mean)

    @property
    def passes(self) -> bool:
        return self.above <= min(self.spread, AT_MOST)


def verdicts(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, Verdict]:
    """The results of each compact form of which all seeds are there, and of its fp32 form."""
    found = {}
    for name, form in FORMS.items():
        if form.against and set(SEEDS) <= runs[name].keys() & runs[form.against].keys():
            found[name] = Verdict.of(last_losses(runs[name]), last_losses(runs[form.against]))
    return found


def describe(runs: Mapping[str, Mapping[int, Run]], setting: Setting) -> str:
    """The section of the results file: what was trained, each form's losses, and the verdict on each compact form."""
    done = [run for by_seed in runs.values() for run in by_seed.values()]
    judged = verdicts(runs)
    header = ["form", "held-out loss of each seed", "mean", "spread", "deviation"]
    header += ["above fp32, each seed", "above fp32, means", "within"]
    rows = [_row(name, by_seed, runs, judged.get(name)) for name, by_seed in runs.items() if by_seed]
    what = (
        f"`python -m bench.loss_parity`: {setting.model}, {done[0].parameters / 1e6:.1f}M parameters, fp32, state in "
        f"memory; {setting.steps} steps of {setting.batch}x{setting.length} tokens, {setting.tokens / 1e6:.2f}M in "
        f"all, none twice; {setting.warmup} steps of warm-up, cosine decay to {setting.final:g}; "
        f"{setting.held_out_windows}x{setting.length} tokens held out, of files of their own; text "
        f"{done[0].data[:16]}, {done[0].unigram:.2f} nats per token by frequencies alone; "
        f"{statistics.median(run.seconds for run in done) / 60:.0f} minutes a run; "
        f"{'; '.join(sorted({run.machine for run in done}))}"
    )
    within = (
        f"Within: the mean is above the fp32 form's by no more than {AT_MOST:.1%}, nor than the spread of that form's "
        "seeds."
    )
    optimizers = [
        f"- {name}: `{FORMS[name].optimizer()}`"
        for name, by_seed in runs.items()
        if by_seed and FORMS[name].against is None
    ]
    return "\n".join([what, "", table(header, rows), "", within, "", *optimizers])


def _row(
    name: str, by_seed: Mapping[int, Run], runs: Mapping[str, Mapping[int, Run]], judged: Verdict | None
) -> list[str]:
    losses = last_losses(by_seed)
    pairs = [of.last / beside.last - 1 for of, beside in _pairs(name, runs)]
    return [
        name,
        ", ".join(f"{by_seed[seed].last:.4f}" if seed in by_seed else "not run" for seed in SEEDS),
        f"{statistics.mean(losses):.4f}",
        f"{max(losses) - min(losses):.4f}",
        f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "",
        ", ".join(f"{pair:+.2%}" for pair in pairs),
        f"**{judged.above:+.2%}**" if judged else "",
        ("yes" if judged.passes else "**NO**") if judged else "",
    ]


def _pairs(name: str, runs: Mapping[str, Mapping[int, Run]]) -> list[tuple[Run, Run]]:
    """A compact form's run and its fp32 form's, of each seed that both have."""
    against = FORMS[name].against
    if against is None:
        return []
    return [(runs[name][seed], runs[against][seed]) for seed in sorted(runs[name].keys() & runs[against].keys())]


def draw(runs: Mapping[str, Mapping[int, Run]], path: Path) -> None:
    """The curves as a picture: held-out losses, and each compact form's distance to the fp32 form of its seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "penstock", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, distances = figure.subplots(1, 2)
        for i, (name, by_seed) in enumerate((name, by_seed) for name, by_seed in runs.items() if by_seed):
            style = "--" if FORMS[name].against else "-"
            steps = [step for step, _ in next(iter(by_seed.values())).held_out]
            of_step = list(zip(*([loss for _, loss in run.held_out] for run in by_seed.values()), strict=True))
            losses.plot(steps, [statistics.mean(each) for each in of_step], color=f"C{i}", lw=1.4, ls=style, label=name)
            low, high = [min(each) for each in of_step], [max(each) for each in of_step]
            losses.fill_between(steps, low, high, color=f"C{i}", alpha=0.2, lw=0)
            for j, (of, beside) in enumerate(_pairs(name, runs)):
                above = [100 * (a / b - 1) for (_, a), (_, b) in zip(of.held_out, beside.held_out, strict=True)]
                distances.plot(steps, above, color=f"C{i}", lw=1, marker="os^"[j % 3], ms=3, label=None if j else name)
        losses.set(xlabel="step", ylabel="held-out loss, nats per token", title="Mean of the seeds, and their range")
        losses.legend(frameon=False)
        distances.axhline(0, color="gray", lw=0.8)
        distances.axhline(100 * AT_MOST, color="gray", lw=0.8, ls="--", label="allowed at the end")
        distances.set(
            xlabel="step",
            ylabel="above the fp32 form's held-out loss, %",
            title="Distance to fp32 moments, seed by seed",
        )
        distances.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="do at most so many runs now; 0: only the table and the picture")
    arguments = parser.parse_args()
    setting = Setting()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    corpus = read(
        library_texts(), vocabulary=setting.vocabulary, length=setting.length, held_out=setting.held_out_windows
    )
    try:
        do_missing(setting, corpus.digest, arguments.runs)
    except BenchError as error:
        print(f"bench.loss_parity: {error}", file=sys.stderr)
        return 2
    runs = kept(KEPT, setting, corpus.digest, FORMS)
    if not any(runs.values()):
        print("bench.loss_parity: no run is kept of this text and these settings", file=sys.stderr)
        return 2
    body = describe(runs, setting)
    print(body)
    draw(runs, PICTURE)
    print(f"recorded in {write_section('loss_parity', body, results_file())} and {PICTURE}")
    return 0 if all(verdict.passes for verdict in verdicts(runs).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
