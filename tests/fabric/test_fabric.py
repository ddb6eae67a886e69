"""Lightning Fabric's own loops on the engine: what they compute eagerly is recorded, and comes out the same."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import penstock
from penstock.errors import StoreError
from penstock.fabric import Deferred, PenstockStrategy
from penstock.fabric.deferred import nodes
from penstock.tape import trees
from tests import models
from tests.library_runs import CLOSE, VOCABULARY, check_kept_whole, check_same_weights, examples, llama
from tests.overrides import foreign_overrides

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ACCUMULATE, CLIP = 4, 2, 0.5


def strategy(disk: Path | None = None, **settings: Any) -> PenstockStrategy:
    places = {} if disk is None else {"disk": disk, "weights": "disk", "state": "disk"}
    budget = penstock.Budget(device="64MiB", host="64MiB", **places)  # type: ignore[arg-type]
    return PenstockStrategy(**{"budget": budget, "plan": None} | settings)


def fabric_on(disk: Path | None = None, **settings: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, strategy=strategy(disk, **settings))


def plain_fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    rates = [1e-2 * (1 + i) for i in range(len(optimizer.param_groups))]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=STEPS + 1)


def cyclic(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=1e-3, max_lr=2e-2, step_size_up=2)


def averaging(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=3)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The norms' weights do not decay, and learn at a rate of their own. There are no biases for two groups more."""
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    biases: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0, "lr": 3.0} for _ in range(2)]
    groups = [biases[0], {"params": others}, biases[1], {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def train(
    fabric: Fabric,
    *,
    first: int = 0,
    last: int = STEPS,
    resume: Path | None = None,
    save: Path | None = None,
    scheduled: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] = falling,
) -> tuple[list[tuple[float, float]], Any]:
    """A loop as users write it, on either strategy: (loss, norm) of each step, and the model."""
    model = llama()
    optimizer = two_groups(model)
    schedule = scheduled(optimizer)  # made before setup
    model, optimizer = fabric.setup(model, optimizer)
    data = DataLoader(examples(2 * STEPS * ACCUMULATE), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    batches = list(fabric.setup_dataloaders(data))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "done": 0}
    if resume is not None:
        fabric.load(resume, state)
        assert state["done"] == first
    seen = []
    for step in range(first, last):
        losses = []
        for index, batch in enumerate(batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]):
            with fabric.no_backward_sync(model, enabled=index < ACCUMULATE - 1):
                loss = model(**batch).loss
                fabric.backward(loss / ACCUMULATE)
            losses.append(loss.detach())
        norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seen.append((torch.stack(losses).mean().item(), float(norm)))
    if save is not None:
        fabric.save(save, state | {"done": last})
    return seen, model


def test_a_loop_trains_to_the_numbers_of_fabrics_own(tmp_path: Path) -> None:
    expected, plain = train(plain_fabric())
    fabric = fabric_on(tmp_path / "store", clip_grad_norm=CLIP)
    found, _ = train(fabric)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **CLOSE)
    assert any(norm > CLIP for _, norm in expected)
    check_same_weights(fabric.strategy.engine, plain.module)
    fabric.strategy.engine.close()


def test_moments_are_kept_in_the_form_that_the_strategy_is_told() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return models.llama(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1)

    batch = collate(examples(2))
    found: dict[str, list[float]] = {}
    for moments in ("fp32", "int8"):
        fabric, losses = fabric_on(moments=moments), []
        module = model()
        given: Any = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module, given = fabric.setup(module, given)
        for _ in range(3):
            loss = module(**batch).loss
            fabric.backward(loss)
            given.step()
            given.zero_grad()
            losses.append(loss.item())
        fabric.strategy.engine.close()  # type: ignore[attr-defined]
        found[moments] = losses
        budget = penstock.Budget(device="64MiB", host="64MiB")
        adamw = penstock.AdamW(lr=1e-2, moments=moments)  # type: ignore[arg-type]
        with penstock.wrap(model(), optimizer=adamw, budget=budget, plan=None, clip_grad_norm=None) as engine:
            expected = [engine.step([batch]).loss for _ in range(3)]
        torch.testing.assert_close(losses, expected, **CLOSE)
    assert found["fp32"] != found["int8"]


@pytest.mark.parametrize("scheduled", [one_cycle, pytest.param(cyclic, marks=pytest.mark.campaign), averaging])
def test_what_schedules_of_torch_write_into_param_groups_counts(scheduled: Any, tmp_path: Path) -> None:
    """Learning rates and betas; and what they keep there for themselves changes nothing."""
    expected, _ = train(plain_fabric(), scheduled=scheduled)
    found, _ = train(fabric_on(clip_grad_norm=CLIP), scheduled=scheduled)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **CLOSE)
    first, _ = train(fabric_on(clip_grad_norm=CLIP), last=2, save=tmp_path / "saved", scheduled=scheduled)
    second, _ = train(fabric_on(clip_grad_norm=CLIP), first=2, resume=tmp_path / "saved", scheduled=scheduled)
    assert first + second == found


def test_a_schedule_that_is_made_after_setup_sees_the_defaults_of_the_optimizer_that_was_given() -> None:
    """transformers' ``polynomial`` and ``cosine_with_min_lr`` begin with ``defaults["lr"]``: no group need have it."""
    given = two_groups(model := llama())
    given.param_groups[1]["lr"] = 1e-3
    fabric = fabric_on()
    _, optimizer = fabric.setup(model, given)
    assert optimizer.defaults["lr"] == given.defaults["lr"] == 1e-2
    fabric.strategy.engine.close()


def test_a_run_goes_on_with_another_of_torchs_ways_to_compute_the_same(tmp_path: Path) -> None:
    """``fused`` and ``foreach`` change nothing here, and were taken for damage of what was saved."""
    for ways in ({}, {"fused": True}, {"foreach": False}):
        fabric, model = fabric_on(), llama()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.5, **ways))
        state = {"model": model, "optimizer": optimizer}
        if not ways:
            optimizer.param_groups[0]["lr"] = 0.25
            fabric.save(tmp_path / "saved", state)
        fabric.load(tmp_path / "saved", state)
        assert optimizer.param_groups[0]["lr"] == 0.25
        fabric.strategy.engine.close()


def test_an_optimizer_may_know_the_names_of_its_parameters() -> None:
    losses = []
    for named in (True, False):
        fabric, model = fabric_on(), llama()
        given: Any = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=1e-2)
        module, given = fabric.setup(model, given)
        for _ in range(2):
            loss = module(**collate(examples(2))).loss
            fabric.backward(loss)
            given.step()
            given.zero_grad()
        losses.append(loss.item())
        fabric.strategy.engine.close()  # type: ignore[attr-defined]
    assert losses[0] == losses[1]


def test_a_loop_that_is_resumed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, _ = train(fabric_on(clip_grad_norm=CLIP))
    first, _ = train(fabric_on(clip_grad_norm=CLIP), last=2, save=tmp_path / "saved")
    second, _ = train(fabric_on(clip_grad_norm=CLIP), first=2, resume=tmp_path / "saved")
    assert first + second == whole


def test_a_checkpoint_that_cannot_be_written_over_another_one_leaves_that_whole(tmp_path: Path) -> None:
    fabric = fabric_on(clip_grad_norm=CLIP)
    saved = tmp_path / "saved"
    _, model = train(fabric, last=1, save=saved)
    state = {"model": model, "optimizer": fabric.strategy.engine.optimizer, "done": 2}
    before = {path.name for path in saved.iterdir()}
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        fabric.save(saved, state | {"more": lambda: None})
    assert {path.name for path in saved.iterdir()} == before
    first, _ = train(fabric_on(clip_grad_norm=CLIP), first=1, last=2, save=saved, resume=saved)
    assert sorted(path.name for path in saved.iterdir()) == ["penstock.snapshot", "state-2.pt"]
    assert first == train(fabric_on(clip_grad_norm=CLIP), last=2)[0][1:]


def test_a_second_checkpoint_of_the_same_step_takes_the_place_of_the_first_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, saved = fabric_on(clip_grad_norm=CLIP), tmp_path / "saved"
    _, model = train(fabric, last=1, save=saved)
    engine = fabric.strategy.engine
    state = {"model": model, "optimizer": engine.optimizer}

    def loaded() -> Any:
        fabric.load(saved, found := {**state, "done": 0})
        return found["done"]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "save", _fails)
        with pytest.raises(StoreError, match="the disk is full"):
            fabric.save(saved, state | {"done": 7})
    assert loaded() == 1
    for done in (8, 9):
        engine.position = {"document": done}
        fabric.save(saved, state | {"done": done})
        assert engine.position == {"document": done}
        assert loaded() == done
        assert engine.position == {"document": done}
        assert len(list(saved.iterdir())) == 2


def _fails(*_: Any, **__: Any) -> None:
    raise StoreError("the disk is full")


class Classifier(nn.Module):
    """A plain module, whose loop computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(16, 5)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(batch["tokens"])
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1)), hidden


def classify(fabric: Fabric) -> list[list[float]]:
    torch.manual_seed(0)
    model = Classifier()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    seen = []
    for step in range(4):
        batch = {"tokens": torch.randint(0, VOCABULARY, (4, 7 + step % 2), generator=generator)}
        target = torch.randint(0, 5, (4,), generator=generator)
        logits, hidden = model(batch)[0], model(batch)[1]
        with torch.no_grad():
            calm = logits.softmax(-1) * 0.5 + 0.1  # of which no gradient may come
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), target) + (logits.softmax(-1) - calm).square().sum()
        loss += 1e-3 * (hidden**2).mean() - 2.0
        if isinstance(loss, Deferred):
            with pytest.raises(penstock.ModelError, match=r"known after optimizer.step"):
                float(loss)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs = model(batch)
        model.train()
        seen.append([loss.item(), *(float(output.double().sum()) for output in outputs)])
    return seen


def test_whatever_a_loop_computes_from_the_outputs_is_computed_in_the_step() -> None:
    """Two calls of the model in one loss, a part without gradients, and outputs of an evaluation."""
    found, expected = classify(fabric_on()), classify(plain_fabric())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def batch() -> dict[str, torch.Tensor]:
    return collate(examples(2))


def set_up(**settings: Any) -> tuple[Fabric, Any, Any]:
    fabric = fabric_on(**settings)
    model = llama()
    return (fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters())))


def test_what_is_to_be_computed_goes_through_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, model, optimizer = set_up()

    def run() -> None:
        fabric.backward(model(**batch()).loss)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(**batch())

    check_kept_whole(fabric.strategy.engine, run, monkeypatch)


def test_a_loop_that_is_dropped_leaves_its_store_to_the_next(tmp_path: Path) -> None:
    def step() -> int:
        fabric, model = fabric_on(tmp_path), llama()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        fabric.backward(model(**collate(examples(1))).loss)
        optimizer.step()
        return fabric.strategy.engine.step_count

    assert [step(), step()] == [1, 2]


@pytest.mark.parametrize("whose", ["optimizer", "model", "model as it was given"])
def test_zero_grad_forgets_what_was_collected(whose: str) -> None:
    fabric, model, optimizer = set_up()
    zero_grad = {"optimizer": optimizer, "model": model}.get(whose, model.module).zero_grad
    fabric.backward(model(**batch()).loss)
    optimizer.step()
    zero_grad()
    fabric.backward(model(**batch()).loss)
    zero_grad()
    with pytest.raises(penstock.ModelError, match="no loss was given"):
        optimizer.step()


def test_a_model_of_a_plain_fabric_drops_its_own_gradients() -> None:
    fabric, net = plain_fabric(), nn.Linear(2, 2)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert net.weight.grad is not None
    model.zero_grad()
    assert net.weight.grad is None


def test_keys_that_are_equal_and_mean_different_things_are_two() -> None:
    """True makes a dimension, and 1 takes one away."""
    fabric, model, optimizer = set_up()
    logits = model(**batch()).logits
    taken, made = logits[1].square().sum(), logits[True].square().sum()
    fabric.backward(taken + made + logits[1].sum() * 0)
    optimizer.step()
    assert float(made) > float(taken)


def test_the_norm_is_known_without_a_limit() -> None:
    """``max_norm=inf`` is how loops ask for the norm alone."""
    fabric, model, optimizer = set_up()
    for _ in range(2):
        fabric.backward(model(**batch()).loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert float(norm) == pytest.approx(fabric.strategy.engine.last_step.grad_norm, rel=1e-6)


def test_a_step_that_is_skipped_is_an_error_where_its_norm_was_asked_for_and_only_there() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy(), precision="16-true")
    model, optimizer = fabric.setup(net := llama(), torch.optim.AdamW(net.parameters()))
    for asked in (True, False):
        fabric.backward(model(**batch()).loss * (1.0 if asked else 1e9))
        if asked:
            fabric.clip_gradients(model, optimizer, max_norm=float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.strategy.engine.last_step.skipped
    fabric.backward(model(**batch()).loss * 1e9)
    fabric.clip_gradients(model, optimizer, max_norm=float("inf"))
    with pytest.raises(penstock.NonFiniteError, match="nothing was updated"):
        optimizer.step()


def test_a_number_that_was_no_part_of_the_loss_is_not_made_up() -> None:
    fabric, model, optimizer = set_up()
    output = model(**batch())
    accuracy = (output.logits.argmax(-1) == 3).float().mean()
    fabric.backward(output.loss)
    optimizer.step()
    assert output.loss > 0
    with pytest.raises(penstock.ModelError, match="gone with its micro-batch"):
        accuracy.item()


def test_a_gradient_that_is_not_finite_ends_the_loop_that_asks_for_it() -> None:
    fabric, model, optimizer = set_up(clip_grad_norm=1.0)
    before = {name: tensor.clone() for name, tensor in fabric.strategy.engine.master_parameters()}
    loss = model(**batch()).loss
    fabric.backward(loss * torch.tensor(1e30) * 1e30 * 0.0 + torch.sqrt(loss * 0.0))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(penstock.NonFiniteError):
        optimizer.step()
    after = {name: tensor.clone() for name, tensor in fabric.strategy.engine.master_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sums_over_many_steps_are_numbers_and_not_chains() -> None:
    """As loops keep them, and never read before the end."""
    seen = []
    for fabric in (plain_fabric(), fabric_on()):
        model = llama()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        total, mean = torch.zeros(()), 0.0
        for _ in range(12):
            micro_batch = batch()
            loss = model(micro_batch.pop("input_ids"), **micro_batch).loss  # the loop takes its batch apart
            total = total + loss.detach()
            mean = mean + loss.detach() / 12
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(total, Deferred):
            assert len(nodes(total)) < 8  # what the last step has left, and not all twelve
        seen.append([float(total), float(mean)])
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]), **CLOSE)


@dataclasses.dataclass
class Tokens:
    tokens: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [dict, BatchEncoding, lambda found: Tokens(**found)], ids=["dict", "hf", "dataclass"])
def test_a_batch_in_any_container_is_a_micro_batch(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has its tensors: it plans for their shapes, moves them, and sees that none is changed before."""
    fabric = fabric_on()
    model = Classifier()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given: list[Any] = []
    step = fabric.strategy.engine.step
    monkeypatch.setattr(fabric.strategy.engine, "step", lambda mbs, **more: (given.extend(mbs), step(mbs, **more))[1])
    tokens = torch.randint(0, VOCABULARY, (4, 7))
    loss = model(kind({"tokens": tokens}))[0].square().mean()
    fabric.backward(loss)
    optimizer.step()
    assert any(tensor is tokens for tensor in trees.tensors(given[0]))
    assert loss > 0
    optimizer.zero_grad()
    fabric.backward(model(kind({"tokens": tokens}))[0].square().mean())
    tokens.fill_(0)
    with pytest.raises(penstock.ModelError, match="changed in place"):
        optimizer.step()


def test_a_number_of_an_earlier_step_scales_the_loss_of_the_next() -> None:
    """As loops that weigh a loss by what it was; such a number is no part of the next micro-batch."""
    seen = []
    for fabric in (plain_fabric(), fabric_on()):
        model = llama()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        before, losses = torch.ones(()), []
        for _ in range(3):
            loss = model(**batch()).loss
            fabric.backward(loss / before)
            before = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(before)
        seen.append([float(loss) for loss in losses])
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]), **CLOSE)


def test_private_methods_of_fabric_are_overridden_in_compat_alone() -> None:
    assert foreign_overrides(PenstockStrategy) == set()
