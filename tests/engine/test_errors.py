"""Bad input gets an error that says what to do, and nothing is lost by it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.config import Precision
from penstock.engine.progress import Progress
from penstock.errors import ConfigError, ModelError, ScheduleError, StoreError
from penstock.optim.facade import StreamedOptimizer
from penstock.optim.precision import LossScale
from penstock.store.records import read_document, write_document
from tests import warm
from tests.models import MODELS, PLAIN, VOCABULARY, Case, MicroBatch, Plain, causal_lm, llama
from tests.tape_reference import SEED
from tests.training import assert_same_state, budget, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE, LLAMA = PLAIN, MODELS["llama"]
STEPS = steps_of(CASE, 3, lengths=(12, 8))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[penstock.Engine]:
    with wrap(CASE, budget(tmp_path / "store")) as made:
        yield made


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Engine]:
    """An engine after a step, on which several tests try what it is to outlive ``unharmed``."""
    with wrap(CASE, budget(tmp_path_factory.mktemp("stepped"))) as made:
        made.step(STEPS[0])
        yield made


@contextmanager
def unharmed(engine: penstock.Engine) -> Iterator[None]:
    """Whatever is tried inside, the engine's state is the same afterwards, and it goes on working."""
    before, step = state_of(engine), engine.step_count
    yield
    assert engine.step_count == step
    assert_same_state(state_of(engine), before)
    assert engine.step(STEPS[0]).step == step + 1


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_grad_norm": 0.0}, r"clip_grad_norm=0\.0: must be positive, or null \(None\) for no clipping"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan"),
        (
            {"schedule": "diagonal"},
            "schedule='diagonal': must be one of 'vertical', 'horizontal', '1f1b'",
        ),
        ({"schedule": "1f1b"}, "schedule='1f1b' is an order of the ranks of a pipeline, and there is none: set pipe"),
        ({"precision": "fp8"}, "precision='fp8': must be one of fp32, bf16, fp16"),
        ({"io_threads": 0}, "io_threads=0: must be at least 1"),
        (
            {"optimizer": penstock.AdamW(overrides=(penstock.Override(match="nothing", lr=0.0),))},
            "match='nothing' is the first match of no trained parameter",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap(CASE, budget(tmp_path / "store"), **settings)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("precision", "dtype", "way_out"),
    [
        ("bf16", torch.float32, "give precision='fp32'"),
        ("fp16", torch.float32, "give precision='fp32'"),
        ("fp32", torch.bfloat16, r"call model.float\(\) and give precision='fp32'"),
        ("fp32", torch.float64, r"call model.float\(\) and give precision='fp32'"),
    ],
)
def test_a_batch_norm_that_torch_cannot_compute_on_a_processor_is_named(
    precision: Precision, dtype: torch.dtype, way_out: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    with pytest.raises(ConfigError, match=rf"precision='{precision}': 1 is a batch norm, .*: {way_out}"):
        penstock.wrap(
            model,
            optimizer=penstock.AdamW(lr=1e-3),
            budget=penstock.Budget(device="1MiB", host="1MiB", durability="none"),
            precision=precision,
            device="cpu",
            plan=None,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "a lot"}, "'a lot' is not a size"),
        ({"device": "12 parsec"}, "'12 parsec' is not a size"),
        ({"host": -1}, "-1 is not a size"),
        ({"weights": "tape"}, r"budget\.weights='tape': must be one of device, host, disk"),
        ({"gradients": "device"}, r"budget\.gradients='device': must be one of host, disk"),
        ({"disk": None, "state": "disk"}, r"budget\.state='disk' needs budget\.disk"),
        ({"disk": []}, r"budget\.disk is an empty list"),
    ],
    ids=str,
)
def test_budgets_that_mean_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.Budget(**{"device": "1MiB", "host": "1MiB", "disk": "/nowhere"} | settings)


@pytest.mark.parametrize(
    ("precision", "places"),
    [
        ("bf16", {"weights": "disk", "state": "device"}),
        ("fp32", {"weights": "disk", "state": "device"}),
    ],
)
def test_pins_that_exclude_each_other(precision: str, places: dict[str, Any], tmp_path: Path) -> None:
    with (
        wrap(CASE, budget(tmp_path / "store", **places), precision=precision) as engine,
        pytest.raises(ConfigError, match=r"budget\.weights='\w+' with budget\.state='\w+' cannot work"),
    ):
        engine.step(STEPS[0])


def test_a_schedule_for_another_number_of_micro_batches(engine: penstock.Engine, tmp_path: Path) -> None:
    engine.step(STEPS[0])
    own = engine.plan.schedule
    with (
        wrap(CASE, budget(tmp_path / "other"), schedule=own) as other,
        pytest.raises(ScheduleError, match="for 2 micro-batches, not 1"),
    ):
        other.step(STEPS[0][:1])


# ---- the model


def test_a_model_without_blocks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"no repeated blocks were found in Sequential.*blocks=\[\.\.\.\]"):
        wrap(CASE, budget(tmp_path / "store"), model=model)
    assert not (tmp_path / "store").exists()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
def test_gradient_checkpointing_of_the_models_own(tmp_path: Path) -> None:
    model = llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"gradient checkpointing is switched on.*gradient_checkpointing_disable"):
        wrap(CASE, budget(tmp_path / "store"), model=model)


def test_a_model_that_returns_no_loss(tmp_path: Path) -> None:
    with wrap(LLAMA, budget(tmp_path / "store"), loss_fn=None) as engine:
        with pytest.raises(ConfigError, match="no loss: give micro-batches with 'labels', or pass loss_fn"):
            engine.step([{"input_ids": mb["input_ids"]} for mb in STEPS[0]])
        with unharmed(engine):
            pass


@pytest.mark.parametrize(("returned", "kind"), [(lambda o: o.logits, "Tensor"), (lambda o: (None, 1), "tuple")])
def test_a_model_that_returns_something_else(returned: Any, kind: str, tmp_path: Path) -> None:
    model = LLAMA.build()
    model.register_forward_hook(lambda module, args, output: returned(output))
    with (
        wrap(LLAMA, budget(tmp_path / "store"), model=model, loss_fn=None) as engine,
        pytest.raises(ConfigError, match=f"pass loss_fn to wrap.*what it returned is a {kind} without a tensor"),
    ):
        engine.step(STEPS[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda logits: logits, r"tensor of shape \(2, 12, 96\)"),
        (lambda logits: logits.mean().to(torch.complex64), r"complex tensor of shape \(\)"),
    ],
)
def test_a_loss_that_is_not_one_real_number(
    change: Callable[[torch.Tensor], torch.Tensor], what: str, tmp_path: Path
) -> None:
    def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        return change(model(**micro_batch).logits)

    with (
        wrap(LLAMA, budget(tmp_path / "store"), loss_fn=loss_fn) as engine,
        pytest.raises(ModelError, match=f"loss must be a real tensor of one element, but loss_fn returned a {what}"),
    ):
        engine.step(STEPS[0])


def test_an_error_of_the_models_own_surfaces_as_itself(stepped: penstock.Engine) -> None:
    with unharmed(stepped), pytest.raises(IndexError):
        stepped.evaluate([{"input_ids": torch.full((1, 4), 10**6), "labels": torch.zeros(1, 4, dtype=torch.long)}])


@pytest.mark.parametrize("value", [object(), torch.zeros(2), {1}, 1j, torch.float32, b"x", {"a": torch.zeros(())}])
def test_a_setting_of_the_optimizer_that_no_commit_holds(value: object, stepped: penstock.Engine) -> None:
    with unharmed(stepped):
        group = stepped.optimizer.param_groups[0]
        group["hook"] = value
        with pytest.raises(ConfigError, match=r"param_groups: hook=.* a commit holds what JSON holds"):
            stepped.step(STEPS[1])
        del group["hook"]


@pytest.mark.parametrize("value", [float("nan"), -1e-8, None, torch.zeros(2), 1j])
def test_a_setting_of_the_optimizer_out_of_its_range(value: object, stepped: penstock.Engine) -> None:
    with unharmed(stepped):
        group = stepped.optimizer.param_groups[0]
        before, group["eps"] = group["eps"], value
        with pytest.raises(ConfigError, match=r"param_groups: eps=.*: must be a"):
            stepped.step(STEPS[1])
        group["eps"] = before


def test_a_commit_has_the_names_of_any_number_of_parameters() -> None:
    names = [f"layers.{i}.mlp.experts.gate_up_proj.lora_A.default.weight" for i in range(2000)]
    optimizer = StreamedOptimizer(penstock.AdamW(), [(name, nn.Parameter(torch.zeros(1))) for name in names])
    progress = Progress(seed=0, trained=names, optimizer=optimizer, scale=LossScale())
    (group,) = progress.record()["param_groups"]
    assert group["param_names"] == names
    optimizer.param_groups[0]["note"] = "x" * (1 << 17)
    with pytest.raises(ConfigError, match="param_groups: note: 131,074 bytes of JSON, and a commit takes 65,536"):
        progress.record()


# ---- micro-batches


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no micro-batches: give a list of at least one"),
        (STEPS[0][0], "takes a list of micro-batches .* not dict"),
        ((mb for mb in STEPS[0]), "takes a list of micro-batches .* not generator"),
        ([STEPS[0][0]["input_ids"]], "micro-batch 0 is a Tensor: it must be a mapping"),
        ([{}], "micro-batch 0 holds no tensor"),
        ([{"x": [torch.zeros(2, device="meta")]}], r"micro-batch 0: 'x\.0' is on the meta device, without values"),
        ([{"x": torch.nested.nested_tensor([torch.ones(2)])}], "micro-batch 0: 'x' is a nested tensor without shapes"),
        ([{"input_ids": torch.zeros(0, 5)}], "micro-batch 0 holds no tensor with elements"),
        (
            [STEPS[0][0], {"input_ids": STEPS[0][1]["input_ids"]}],
            "micro-batch 1 differs from micro-batch 0 in 'labels'",
        ),
        ([STEPS[0][0], STEPS[0][1] | {3: 1, "more": 1}], "micro-batch 1 differs from micro-batch 0 in 'more', 3"),
        (
            [STEPS[0][0], STEPS[0][1] | {"labels": torch.full((2, 8), -100)}],
            "micro-batch 1 has no label that counts",
        ),
    ],
    ids=[
        "empty",
        "mapping",
        "generator",
        "tensor",
        "nothing",
        "meta",
        "nested",
        "no_elements",
        "keys",
        "any_keys",
        "labels",
    ],
)
def test_micro_batches_that_make_no_step(bad: Any, message: str, stepped: penstock.Engine) -> None:
    with unharmed(stepped):
        for call in (stepped.step, stepped.evaluate):
            with pytest.raises(ModelError, match=message):
                call(bad)


def test_micro_batches_that_make_no_first_step(engine: penstock.Engine) -> None:
    """Of which nothing is known yet: neither shapes nor which labels count."""
    first, second = STEPS[0]
    others = ({"input_ids": second["input_ids"]}, second | {"labels": torch.full_like(second["labels"], -100)})
    with unharmed(engine):
        for bad in ([], *([first, other] for other in others)):
            for call in (engine.step, engine.evaluate):
                with pytest.raises(ModelError, match=r"no micro-batches|differs from|no label that counts"):
                    call(bad)


class Hasty(nn.Module):
    """Leaves its last block out for short inputs: another way through the model than the one that was planned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: 3 if x.shape[0] > 2 else 2]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("clip", [1.0, None])
def test_micro_batches_that_take_another_way(overlap: bool, clip: float | None, tmp_path: Path) -> None:
    where, steady = budget(tmp_path / "store"), [{"x": torch.ones(4, 8)}] * 2
    settings: dict[str, Any] = {"loss_fn": lambda m, mb: m(**mb), "overlap": overlap, "clip_grad_norm": clip}
    with wrap(CASE, where, model=Hasty(), **settings) as engine:
        engine.step(steady)
        before = state_of(engine)
        with pytest.raises(ModelError, match="micro-batch 1") as refusal:
            engine.step([{"x": torch.ones(4, 8)}, {"x": torch.ones(2, 8)}])
        assert any("in op" in note for note in refusal.value.__notes__)
        assert_same_state(state_of(engine), before)
        assert engine.step(steady).step == 2


def test_a_plan_for_other_modes_is_not_gone_back_to_where_a_new_one_could_not_be_made(tmp_path: Path) -> None:
    """Its first micro-batch fails in the probe."""
    fails = [False]

    def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        if fails[0]:
            raise OverflowError
        return CASE.loss_fn(model, micro_batch)

    with wrap(CASE, budget(tmp_path / "store"), loss_fn=loss_fn) as engine:
        engine.step(STEPS[0])
        before = engine.plan
        engine.model.eval()
        fails[0] = True
        with pytest.raises(OverflowError):
            engine.step(STEPS[1])
        fails[0] = False
        assert engine.step(STEPS[1]).step == 2
        assert engine.plan is not before


class Choosy(nn.Module):
    """Cuts its embedding off from the loss where the data say so; ``mended``: it adds nothing of it there instead."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = bool(x[0, 0] > 0)
        x = self.embed(x)
        if cut:
            x = x.detach() + 0 * self.embed.weight.sum() if self.mended else x.detach()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("mended", [False, True])
def test_a_group_with_a_gradient_only_for_some_data_is_refused_and_the_way_out_is_one(
    mended: bool, tmp_path: Path
) -> None:
    cut, uncut = [{"x": torch.ones(4, 8)}], [{"x": -torch.ones(4, 8)}]
    with wrap(CASE, budget(tmp_path), model=Choosy(mended=mended), loss_fn=lambda m, mb: m(**mb)) as engine:
        engine.step(cut)
        before = state_of(engine)
        if mended:
            engine.step(uncut)
            return
        with pytest.raises(ModelError, match=r"embed.* received a gradient in stage 0 .*0 \* parameter\.sum\(\)"):
            engine.step(uncut)
        assert_same_state(state_of(engine), before)
        engine.step(cut)


# ---- the engine


def test_a_closed_engine(tmp_path: Path) -> None:
    engine = wrap(CASE, budget(tmp_path / "store"))
    engine.close()
    engine.close()
    for call in (
        lambda: engine.step(STEPS[0]),
        lambda: engine.evaluate(STEPS[0]),
        lambda: list(engine.master_parameters()),
        lambda: engine.save(tmp_path / "snapshot"),
        lambda: engine.load(tmp_path / "snapshot"),
    ):
        with pytest.raises(ConfigError, match="this engine is closed: build the model anew, and wrap that"):
            call()


def test_there_is_no_plan_before_the_first_step_nor_of_a_closed_engine(engine: penstock.Engine) -> None:
    with pytest.raises(ConfigError, match="no plan before the first step, nor after one for which none could be made"):
        engine.plan  # noqa: B018 - the access is what is tested
    engine.step(STEPS[0])
    engine.close()
    with pytest.raises(ConfigError, match="this engine is closed"):
        engine.plan  # noqa: B018 - as above


# ---- the disk


def test_a_disk_directory_whose_parent_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is the drive mounted"):
        wrap(CASE, budget(tmp_path / "not" / "there"))


def test_a_disk_directory_that_is_in_use(engine: penstock.Engine, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"in use by process \d+, which is this one: close what has it open"):
        wrap(CASE, budget(tmp_path / "store"))
    code = (
        "import sys; from pathlib import Path; from tests.models import MODELS; "
        "from tests.training import budget, wrap; wrap(MODELS['skips'], budget(Path(sys.argv[1])))"
    )
    other = warm.run(["-c", code, tmp_path / "store"])
    assert other.returncode != 0
    assert f"in use by process {os.getpid()}: wait for it to end" in other.stderr.splitlines()[-1]
    with unharmed(engine):
        pass


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of one step."""
    store = tmp_path_factory.mktemp("closed") / "store"
    train(CASE, budget(store), STEPS[:1])
    return store


def shallow() -> nn.Module:
    """The model with a layer less."""
    model = Plain()
    del model.layers[-1]
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": Plain(tied=True)}, "made for another model"),
        ({"precision": "bf16"}, "made for another model: .*precision"),
        ({"optimizer": penstock.Lion()}, "made for another model: .*optimizer"),
        ({"optimizer": penstock.Adam()}, "made for another model: .*optimizer"),
        ({"model": shallow()}, "made for another model"),
    ],
    ids=["architecture", "precision", "moments", "optimizer", "layers"],
)
def test_a_store_of_another_run(settings: dict[str, Any], message: str, closed: Path) -> None:
    before = {path: path.read_bytes() for path in closed.iterdir() if path.is_file()}
    with pytest.raises(StoreError, match=message):
        wrap(CASE, budget(closed), **settings)
    assert {path: path.read_bytes() for path in closed.iterdir() if path.is_file()} == before


def test_a_store_started_with_another_seed(closed: Path) -> None:
    where = budget(closed)
    with pytest.raises(ConfigError, match=r"started with seed=7, not 8.*Pass seed=7"):
        wrap(CASE, where, seed=8)
    with wrap(CASE, where) as engine:
        assert engine.step_count == 1


def test_a_store_of_an_unknown_format(tmp_path: Path) -> None:
    where = budget(tmp_path / "store")
    train(CASE, where, STEPS[:1])
    manifest = tmp_path / "store" / "manifest.json"
    body = read_document(manifest, "store")
    body["layout"]["format"] = 99
    write_document(manifest, "store", body)
    with pytest.raises(StoreError, match="format 99, this version of penstock reads format 3"):
        wrap(CASE, where)


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"model": shallow()}, "groups"), ({"precision": "bf16"}, "precision")],
    ids=["layers", "precision"],
)
def test_a_snapshot_of_another_run(
    settings: dict[str, Any], what: str, stepped: penstock.Engine, tmp_path: Path
) -> None:
    stepped.save(tmp_path / "snapshot")
    with wrap(CASE, budget(tmp_path / "two"), **settings) as engine, unharmed(engine):
        with pytest.raises(StoreError, match=f"made with another {what} than this engine"):
            engine.load(tmp_path / "snapshot")
        with pytest.raises(StoreError, match="is not a snapshot"):
            engine.load(tmp_path / "nothing")


def test_a_snapshot_of_a_run_with_other_settings(stepped: penstock.Engine, tmp_path: Path) -> None:
    """Refused before anything is overwritten."""
    overrides = (penstock.Override(match="bias", weight_decay=0.0),)
    stepped.save(tmp_path / "snapshot")
    for name, loading, message in (
        ("seed", {"seed": 2}, f"started with seed={SEED}, not 2"),
        ("groups", {"optimizer": penstock.AdamW(overrides=overrides)}, "had 1 param groups .* and has 2 now"),
    ):
        with (
            wrap(CASE, budget(tmp_path / name), **loading) as engine,
            unharmed(engine),
            pytest.raises((ConfigError, StoreError), match=message),
        ):
            engine.load(tmp_path / "snapshot")


def test_a_damaged_snapshot_changes_nothing(tmp_path: Path, engine: penstock.Engine) -> None:
    engine.step(STEPS[0])
    engine.save(tmp_path / "snapshot")
    engine.step(STEPS[1])
    with (tmp_path / "snapshot" / "penstock.snapshot").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damage")
    with unharmed(engine), pytest.raises(StoreError, match="damaged"):
        engine.load(tmp_path / "snapshot")


def test_a_snapshot_is_not_overwritten_unasked(tmp_path: Path, engine: penstock.Engine) -> None:
    engine.save(tmp_path / "snapshot")
    engine.step(STEPS[0])
    with pytest.raises(StoreError, match="exists: give another path, remove it, or say overwrite=True"):
        engine.save(tmp_path / "snapshot")
    engine.save(tmp_path / "snapshot", overwrite=True)
    engine.load(tmp_path / "snapshot")
    assert engine.step_count == 1


def test_a_pin_of_gradients_that_never_wait_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budget\.gradients='disk' has no effect"):
        wrap(CASE, budget(tmp_path / "store", gradients="disk"), clip_grad_norm=None)
    assert not (tmp_path / "store").exists()


def test_outputs_of_an_evaluation_that_are_kept_without_being_read_are_not_nan(tmp_path: Path) -> None:
    """Hidden states go from block to block and are let go of: kept, they are an error; copied, they are right."""
    kept: list[torch.Tensor] = []

    def keeps(model: nn.Module, micro_batch: MicroBatch, *, copy: bool) -> torch.Tensor:
        output = model(**micro_batch, output_hidden_states=True)
        kept[:] = [hidden.clone() if copy else hidden for hidden in output.hidden_states]
        loss: torch.Tensor = output.loss
        return loss

    expected = LLAMA.model().eval()
    with torch.no_grad():
        wanted = expected(**STEPS[0][0], output_hidden_states=True).hidden_states
    with wrap(LLAMA, budget(tmp_path / "a"), loss_fn=partial(keeps, copy=True)) as engine:
        engine.evaluate(STEPS[0][:1])
        torch.testing.assert_close(kept, list(wanted))
    with (
        wrap(LLAMA, budget(tmp_path / "b"), loss_fn=partial(keeps, copy=False)) as engine,
        unharmed(engine),
        pytest.raises(ModelError, match=r"that one block hands to the next was kept.*hidden_states\[1\].clone"),
    ):
        engine.evaluate(STEPS[0])


class Sometimes(nn.Module):
    """Code outside of all blocks that reads a large frozen part for some micro-batches alone: those that begin with 1.
    ``always``: it takes the way out that the error names."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.aside = nn.Linear(16, 16384).requires_grad_(False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        if input_ids[0, 0] == 1:
            x = x + self.aside(x)[..., :16]
        elif self.always:
            x = x + sum(0 * parameter.sum() for parameter in self.aside.parameters())
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("always", [False, True])
def test_frozen_parameters_that_only_some_data_reach_are_named_and_the_way_out_works(
    always: bool, tmp_path: Path
) -> None:
    case = Case(build=partial(Sometimes, always=always), micro_batch=causal_lm, blocks=2, loss_fn=lambda m, mb: m(**mb))
    without, reaching = (
        [{name: ids.index_fill(1, torch.tensor(0), first) for name, ids in STEPS[0][0].items()}] for first in (2, 1)
    )
    with wrap(case, budget(tmp_path / "store"), plan=None) as engine:
        engine.step(without)
        if always:
            assert engine.step(reaching).step == 2
            return
        with pytest.raises(ModelError, match=r"parameter 'aside.weight' is read in stage 3.*let it add 0 \* x\.sum"):
            engine.step(reaching)
        assert engine.step(without).step == 2
