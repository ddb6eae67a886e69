"""``transformers.Trainer`` whose processes take batches together: as a pipeline the run of one process, to the bit, and
so TRL's; with sequences that they share the same run but for the rounding of sums."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer as PlainTrainer

from penstock.errors import ConfigError, ModelError
from penstock.hf import SFTTrainer, Trainer, joint
from penstock.ranks.group import ALONE, Ranks
from tests.library_runs import arguments, check_same, in_memory, llama, shown
from tests.ranks.launched import Launched
from tests.ranks.trained import DATA, HELD_OUT, PACKED, accuracy, trainer, tuned

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_processes_that_take_batches_together_have_the_run_of_one(ranks: int, tmp_path: Path) -> None:
    """Of four, two pipelines are beside each other, and two pairs share sequences; they pack documents, too."""
    for own in (tmp_path / "pipeline", tmp_path / "spans"):
        own.mkdir()
    ended = Launched(ranks, ["-m", "tests.ranks.trained_together", tmp_path], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [0] * ranks, ended

    one = trainer(tmp_path / "one", 4)
    one.train()
    one.save_model(str(tmp_path / "one" / "out"))
    piped = json.loads((tmp_path / "pipeline" / "found.json").read_text())
    assert of_library([tuple(line) for line in piped["shown"]])[:-1] == of_library(shown(one))[:-1]  # since resumed
    check_same_files(tmp_path / "pipeline" / "out", tmp_path / "one" / "out")
    np.testing.assert_array_equal(np.array(piped["predicted"], np.float32), one.predict(HELD_OUT).predictions)
    one.end()

    of_trl = [*piped["preferred"].values()]
    if ranks == 4:
        alone = tuned(SFTTrainer, tmp_path / "alone", 4, PACKED, engine=in_memory(strands=2))
        alone.save_model(str(tmp_path / "alone" / "out"))
        alone.end()
        check_same_files(tmp_path / "pipeline" / "trl" / "out", tmp_path / "alone" / "out")
        of_trl.append(piped["packed"])
    for mine, wanted in of_trl:
        check_same([tuple(line) for line in mine], [tuple(line) for line in wanted])

    for file in ("found.json", "trl/found.json"):
        shared = json.loads((tmp_path / "spans" / file).read_text())
        check_same([tuple(line) for line in shared["own"]], [tuple(line) for line in shared["plain"]])
    mine, wanted = (load_file(tmp_path / "spans" / of / "model.safetensors") for of in ("out", "plain/out"))
    torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=2e-5)


def of_library(lines: list[Any]) -> list[Any]:
    """What does not depend on how the library deals out what it evaluates."""
    return [line for line in lines if line[1] == "eval_accuracy" or not line[1].startswith("eval")]


def check_same_files(mine: Path, wanted: Path) -> None:
    assert (mine / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()


class Some(Ranks):
    """One of several ranks that are asked one after the other: what each says is kept for those behind it."""

    def __init__(self, rank: int, size: int, stages: int, cp: int, said: dict[str, list[Any]]) -> None:
        self.rank, self.size, self.stages, self.cp, self._said = rank, size, stages, cp, said

    @property
    def sharing(self) -> Ranks:
        beside = self.size // self.stages
        return self if self.stages == 1 else Some(self.rank % beside, beside, 1, self.cp, {})

    @property
    def pipe(self) -> Ranks:
        beside = self.size // self.stages
        return Some(self.rank // beside, self.stages, self.stages, 1, {}) if self.stages > 1 else ALONE

    def gather_objects(self, what: str, value: Any) -> list[Any]:
        return self._said[what].pop(0)


@pytest.mark.parametrize(
    ("size", "stages", "cp"), [(4, 4, 1), (4, 2, 1), (4, 1, 2), (4, 1, 4), (8, 2, 2), (8, 2, 1), (8, 1, 2)]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_each_rank_is_told_what_came_of_its_own_batches(size: int, stages: int, cp: int, at_once: bool) -> None:
    """Ranks take the batches of their group in the order of one process, and those with the loss give them back."""
    each, beside = 3, size // stages
    groups = beside // cp
    dealt = [[(rank, i) for i in range(each)] for rank in range(size)]
    whole = [one for own in dealt for one in own]
    told = [pickle.dumps(own) for own in dealt]
    taken = [joint.theirs(Some(rank, size, stages, cp, {"batches": [told]}), dealt[rank]) for rank in range(size)]
    for rank in range(size):
        group = rank % beside // cp
        assert taken[rank] == whole[group * len(whole) // groups : (group + 1) * len(whole) // groups]
    came = [[f"of {one} on {rank}" for one in taken[rank]] for rank in range(size)]
    has_loss = [rank < beside for rank in range(size)]
    step = len(taken[0]) if at_once else 1
    rounds = [
        [(rank % beside // cp, came[rank][i : i + step] if has_loss[rank] else []) for rank in range(size)]
        for i in range(0, len(taken[0]), step)
    ]
    for rank in range(size):
        ranks = Some(rank, size, stages, cp, {"what has come of batches": list(rounds)})
        found = joint.given_back(ranks, came[rank], at_once=at_once)
        wanted = [[f"of {one} on {r}" for r in range(size) if has_loss[r] and one in taken[r]] for one in dealt[rank]]
        assert found == wanted
        assert {len(of_one) for of_one in found} == {cp}


def test_ranks_with_unlike_numbers_of_batches_are_refused() -> None:
    with pytest.raises(ModelError, match="processes have 1 and 2 micro-batches of a step"):
        joint.theirs(Some(0, 2, 2, 1, {"batches": [[pickle.dumps([0]), pickle.dumps([1, 2])]]}), [0])


@pytest.mark.parametrize("layout", ["copies", "pipeline", "cp"])
def test_one_process_that_is_to_share_the_model_is_refused(layout: str, tmp_path: Path) -> None:
    said = f"{layout}=2 is of several processes, and this is one: start them with torchrun --nproc-per-node N, or leave"
    alone = Trainer(llama(), arguments(tmp_path), train_dataset=DATA, engine=in_memory(**{layout: 2}))
    with pytest.raises(ConfigError, match=said):
        alone.train()
    with pytest.raises(ConfigError, match="copies=2 with 2 ranks: each copy of the state is cut over as many ranks"):
        joint.mesh_of(in_memory(copies=2), 2, "cpu")
    with pytest.raises(ConfigError, match=f"{layout}=0: must be at least 1"):
        in_memory(**{layout: 0})


def test_losses_of_whole_sequences_are_refused_where_processes_share_each(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *args: object, **more: object) -> torch.Tensor:
            raise AssertionError

    for cls, given, settings, named in (
        (Own, {}, {}, "Own.compute_loss"),
        (Trainer, {"compute_loss_func": lambda *_, **__: None}, {}, "compute_loss_func"),
        (Trainer, {}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        (Trainer, {}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0, which goes by a sequence's length"),
    ):
        with pytest.raises(ConfigError, match=f"cp=2 cannot be had with {named}"):
            cls(llama(), arguments(tmp_path, **settings), train_dataset=DATA, engine=in_memory(cp=2), **given)
    sharing = Trainer(llama(), arguments(tmp_path), eval_dataset=HELD_OUT, engine=in_memory(cp=2))
    with pytest.raises(ConfigError, match=r"cp=2: .* leave compute_metrics out"):
        Trainer(llama(), arguments(tmp_path), engine=in_memory(cp=2), compute_metrics=accuracy)
    with pytest.raises(ConfigError, match=r"cp=2: .* evaluate the loss alone"):
        sharing.prediction_step(sharing.model, HELD_OUT[0], prediction_loss_only=False)
    assert PlainTrainer.compute_loss is Trainer.compute_loss


def test_what_is_told_of_a_batch_is_its_own_bytes_and_what_cannot_be_told_is_named() -> None:
    table = torch.zeros(1000, 1000)
    told = joint.to_tell({"input_ids": table[2:4], "names": ["a", "b"]})
    assert len(pickle.dumps(told)) < 10_000
    assert joint.theirs(ALONE, [told])[0]["names"] == ["a", "b"]
    with pytest.raises(ModelError, match=r"has a value that cannot be told .* let the data collator leave it out"):
        joint.theirs(ALONE, [{"look": lambda: None}])
