"""What the engine cannot do for a loop on Fabric is refused where the loop asks for it, with what to do instead."""

from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric

import penstock
from tests.fabric.test_fabric import batch, fabric_on, set_up, strategy
from tests.library_runs import llama

pytestmark = pytest.mark.usefixtures("one_thread")


def misuse_parameters_in_the_loss() -> None:
    """As weight decay by hand: they are placeholders, of which there would be no gradient either."""
    fabric, model, _ = set_up()
    fabric.backward(model(**batch()).loss + 1e-3 * sum(p.square().sum() for p in model.parameters()))


def misuse_a_parameter_as_an_argument() -> None:
    _, model, _ = set_up()
    F.linear(model(**batch()).logits, model.module.lm_head.weight.t())


def misuse_gradients_of_a_part() -> None:
    fabric, model, _ = set_up()
    fabric.backward(model(**batch()).loss)
    model.lm_head.zero_grad()


def misuse_a_loss_twice() -> None:
    fabric, model, optimizer = set_up()
    loss = model(**batch()).loss
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward(loss)


def misuse_outputs_of_the_step_before() -> None:
    fabric, model, optimizer = set_up()
    output = model(**batch())
    fabric.backward(output.loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward(model(**batch()).loss + (output.logits**2).mean())


def misuse_a_call_from_before_the_step() -> None:
    fabric, model, optimizer = set_up()
    early = model(**batch()).loss
    fabric.backward(model(**batch()).loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward(early)


def misuse_loading_before_the_step() -> None:
    fabric, model, optimizer = set_up()
    fabric.backward(model(**batch()).loss)
    fabric.load("never-read", {"model": model, "optimizer": optimizer})


def misuse_a_call_from_before_a_checkpoint_of_the_same_step() -> None:
    fabric, model, optimizer = set_up()
    with TemporaryDirectory() as folder:
        fabric.save(folder, {"model": model, "optimizer": optimizer})
        early = model(**batch()).loss
        fabric.load(folder, {"model": model, "optimizer": optimizer})
    fabric.backward(early)


def misuse_saving_onto_a_file() -> None:
    fabric, model, optimizer = set_up()
    fabric.save(__file__, {"model": model, "optimizer": optimizer})


def misuse_in_place() -> None:
    fabric, model, _ = set_up()
    loss = model(**batch()).loss
    loss.div_(2)
    fabric.backward(loss)


def misuse_in_place_of_a_tensor() -> None:
    _, model, _ = set_up()
    losses = torch.zeros(3)
    losses[0] = model(**batch()).loss.detach()


def misuse_sum_in_place() -> None:
    _, model, _ = set_up()
    total = torch.zeros(())
    total += model(**batch()).loss.detach()


def misuse_out() -> None:
    _, model, _ = set_up()
    torch.add(model(**batch()).loss, 1.0, out=torch.zeros(()))


def misuse_backward_of_the_loss() -> None:
    _, model, _ = set_up()
    model(**batch()).loss.backward()


def misuse_one_buffer_for_all() -> None:
    fabric, model, optimizer = set_up()
    buffer = batch()
    for _ in range(2):
        buffer["labels"].copy_(batch()["labels"])
        fabric.backward(model(**buffer).loss)
    optimizer.step()


def misuse_another_mode_at_the_step() -> None:
    fabric, model, optimizer = set_up()
    fabric.backward(model(**batch()).loss)
    model.eval()
    optimizer.step()


def misuse_no_zero_grad() -> None:
    fabric, model, optimizer = set_up()
    for _ in range(2):
        fabric.backward(model(**batch()).loss)
        optimizer.step()


def misuse_setup_alone() -> None:
    fabric_on().setup(llama())


def misuse_optimizer_alone() -> None:
    model = llama()
    fabric_on().setup_optimizers(torch.optim.AdamW(model.parameters()))


def misuse_two_optimizers() -> None:
    model = llama()
    fabric_on().setup(model, torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters()))


def misuse_optimizer_of_another_kind() -> None:
    model = llama()
    fabric_on().setup(model, torch.optim.Adagrad(model.parameters()))


def misuse_parameters_left_out() -> None:
    model = llama()
    fabric_on().setup(model, torch.optim.AdamW(model.lm_head.parameters()))


def misuse_groups_that_differ() -> None:
    model = llama()
    groups = [{"params": [p], "betas": (0.9, 0.9 + i / 1000)} for i, p in enumerate(model.parameters())]
    fabric_on().setup(model, torch.optim.AdamW(groups))


def misuse_frozen_parameters_in_the_optimizer() -> None:
    model = llama()
    model.lm_head.requires_grad_(False)
    fabric_on().setup(model, torch.optim.AdamW(model.parameters()))


def misuse_hooks_of_the_optimizer_that_was_given() -> None:
    given = torch.optim.AdamW((model := llama()).parameters())
    given.register_step_post_hook(print)
    fabric_on().setup(model, given)


def misuse_a_parameter_twice() -> None:
    """torch changes it twice in a step, and warns."""
    model = llama()
    with pytest.warns(UserWarning, match="duplicate"):
        given = torch.optim.AdamW([*model.parameters(), *model.lm_head.parameters()])
    fabric_on().setup(model, given)


def misuse_the_optimizer_that_was_given() -> None:
    fabric, model = fabric_on(), llama()
    given = torch.optim.AdamW(model.parameters())
    model, _ = fabric.setup(model, given)
    fabric.backward(model(**batch()).loss)
    given.step()


def misuse_clip_without_being_told() -> None:
    fabric, model, optimizer = set_up()
    fabric.backward(model(**batch()).loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def misuse_limited_and_asked_for_the_norm_alone() -> None:
    fabric, model, optimizer = set_up(clip_grad_norm=1.0)
    fabric.clip_gradients(model, optimizer, max_norm=float("inf"))


def misuse_told_and_not_clipped() -> None:
    fabric, model, optimizer = set_up(clip_grad_norm=1.0)
    fabric.backward(model(**batch()).loss)
    optimizer.step()


def misuse_clip_for_each_micro_batch() -> None:
    fabric, model, optimizer = set_up(clip_grad_norm=1.0)
    for _ in range(2):
        fabric.backward(model(**batch()).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def misuse_clip_by_value() -> None:
    fabric, model, optimizer = set_up()
    fabric.clip_gradients(model, optimizer, clip_val=1.0)


def misuse_foreign_loss() -> None:
    fabric, _, _ = set_up()
    fabric.backward(torch.zeros((), requires_grad=True))


def misuse_evaluation_with_gradients() -> None:
    _, model, _ = set_up()
    model.eval()(**batch())


def misuse_no_grad_in_training() -> None:
    _, model, _ = set_up()
    with torch.no_grad():
        model(**batch())


def misuse_unpacking() -> None:
    _, model, _ = set_up()
    _loss, _logits = model(**batch(), return_dict=False)


def misuse_autocast() -> None:
    _, model, _ = set_up()
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch())


def misuse_a_compiled_model() -> None:
    """Nothing of it would be compiled but how the loop is recorded."""
    model: Any = torch.compile(llama(), backend="eager")
    fabric_on().setup(model, torch.optim.AdamW(model.parameters()))


def misuse_state_dict() -> None:
    _, model, _ = set_up()
    model.state_dict()


def misuse_saving_the_model_alone() -> None:
    fabric, model, _ = set_up()
    fabric.save("never-written", {"model": model})


def misuse_loading_without_objects() -> None:
    fabric, _, _ = set_up()
    fabric.load("never-read")


def misuse_two_devices() -> None:
    Fabric(accelerator="cpu", devices=2, strategy=strategy())


def misuse_double() -> None:
    Fabric(accelerator="cpu", devices=1, precision="64-true", strategy=strategy())


MISUSES = {
    misuse_in_place: r"div_ would have no effect.*loss = loss / 2",
    misuse_in_place_of_a_tensor: "__setitem__ would have no effect",
    misuse_sum_in_place: r"add_ would have no effect.*total = total \+ loss",
    misuse_out: "add would have no effect",
    misuse_backward_of_the_loss: r"backward would have no effect.*fabric.backward\(loss\)",
    misuse_one_buffer_for_all: "changed in place",
    misuse_parameters_in_the_loss: "requires a gradient is used beside the model's outputs.*in the model's forward",
    misuse_a_parameter_as_an_argument: "requires a gradient is used beside the model's outputs",
    misuse_gradients_of_a_part: "zero_grad\\(\\) of a part of the model cannot be honoured",
    misuse_a_loss_twice: "a step was taken with already.*call the model again",
    misuse_outputs_of_the_step_before: "a step was taken with already.*call the model again",
    misuse_a_call_from_before_the_step: r"before the last optimizer.step\(\).*call the model again",
    misuse_a_call_from_before_a_checkpoint_of_the_same_step: r"or fabric.load\(\).*call the model again",
    misuse_loading_before_the_step: r"take the step before, or drop them by optimizer.zero_grad",
    misuse_saving_onto_a_file: "is a file, and this checkpoint is a folder",
    misuse_another_mode_at_the_step: "put the model back into the mode that it was in",
    misuse_no_zero_grad: r"call optimizer.zero_grad\(\) after each step",
    misuse_setup_alone: "the model and its optimizer together",
    misuse_optimizer_alone: "the model and its optimizer together",
    misuse_two_optimizers: "2 optimizers were given",
    misuse_optimizer_of_another_kind: r"Adagrad cannot be streamed: use torch.optim.AdamW",
    misuse_parameters_left_out: "the optimizer leaves out 'model.embed_tokens.weight' and",
    misuse_groups_that_differ: "param groups differ in 'betas'",
    misuse_frozen_parameters_in_the_optimizer: "not among the model's trained ones: give it those alone",
    misuse_hooks_of_the_optimizer_that_was_given: "register them with the one that setup returns",
    misuse_a_parameter_twice: "has 'lm_head.weight' more than once",
    misuse_the_optimizer_that_was_given: r"that of the one that fabric.setup\(\) has returned",
    misuse_clip_without_being_told: r"give it PenstockStrategy\(clip_grad_norm=1.0\)",
    misuse_limited_and_asked_for_the_norm_alone: r"give it PenstockStrategy\(clip_grad_norm=None\)",
    misuse_told_and_not_clipped: "call fabric.clip_gradients",
    misuse_clip_for_each_micro_batch: "Call it once, behind the last fabric.backward",
    misuse_clip_by_value: "the engine clips by the norm",
    misuse_foreign_loss: "does not come from the model's training output",
    misuse_evaluation_with_gradients: "to evaluate, call model.eval",
    misuse_no_grad_in_training: "to train, call model.train",
    misuse_unpacking: r"take them as output\[0\], output\[1\]",
    misuse_autocast: "autocast is on",
    misuse_a_compiled_model: r"give it the model as it was, and PenstockStrategy\(compile=True\)",
    misuse_state_dict: "the model's weights are the engine's",
    misuse_saving_the_model_alone: "the model and its optimizer together",
    misuse_loading_without_objects: "fabric.load.. needs state=",
    misuse_two_devices: "torchrun --nproc-per-node 2 SCRIPT",
    misuse_double: "precision='64-true' cannot be honoured",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__.removeprefix("misuse_"))
def test_what_cannot_be_honoured_is_refused(misuse: Any) -> None:
    with pytest.raises((penstock.ConfigError, penstock.ModelError), match=MISUSES[misuse]):
        misuse()


def test_a_model_that_was_refused_since_it_is_compiled_can_be_given_as_it_was() -> None:
    model = llama()
    compiled: Any = torch.compile(model, backend="eager")
    for given in (compiled, model):
        fabric = fabric_on()
        with (
            nullcontext()
            if given is model
            else pytest.raises(penstock.ConfigError, match="give it the model as it was")
        ):
            fabric.setup(given, torch.optim.AdamW(model.parameters()), _reapply_compile=given is compiled)
    fabric.strategy.engine.close()


def test_a_step_that_was_refused_can_be_taken_when_what_was_said_is_done() -> None:
    fabric, model, optimizer = set_up()
    fabric.backward(model(**batch()).loss)
    model.eval()
    with pytest.raises(penstock.ModelError, match="put the model back"):
        optimizer.step()
    model.train()
    optimizer.step()
    assert fabric.strategy.engine.step_count == 1


def test_losses_of_a_step_that_failed_are_there_for_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gradients are in a plain loop; of a step that counts, whose commit has failed, they are gone."""
    fabric, model, optimizer = set_up()
    engine = fabric.strategy.engine
    step = type(engine).step

    def fails_before(*_: Any, **__: Any) -> NoReturn:
        raise penstock.BudgetError("no room")

    def fails_behind(*args: Any, **kwargs: Any) -> NoReturn:
        step(*args, **kwargs)
        raise penstock.StoreError("its commit failed")

    loss = model(**batch()).loss
    fabric.backward(loss)
    for fails, error, taken in ((fails_before, penstock.BudgetError, 0), (fails_behind, penstock.StoreError, 1)):
        monkeypatch.setattr(type(engine), "step", fails)
        with pytest.raises(error):
            optimizer.step()
        assert engine.step_count == taken
    assert float(loss) > 0
    with pytest.raises(penstock.ModelError, match="nothing to do"):
        optimizer.step()
