"""Modules that a forward switches between training and evaluation are known, without a look at the others."""

import torch
from torch import nn

from penstock.compat.modules import watched_attributes
from penstock.tape.modes import TrainingFlags


class Wrapper(nn.Module):
    """Has no ``training`` of its own, as what ``torch.compile`` returns for a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        vars(self)["training"] = True  # which nobody sees

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.inner.training if "inner" in vars(self).get("_modules", ()) else True

    @training.setter
    def training(self, value: bool) -> None:
        if "inner" in vars(self).get("_modules", ()):
            self.inner.training = value


def model() -> nn.Sequential:
    wrapped = torch.compile(nn.Linear(2, 2))
    return nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Dropout()), nn.Sequential(nn.Dropout()), wrapped)


def test_modules_that_are_switched_are_found_and_switched_back() -> None:
    whole = model()
    whole[0].eval()
    modules = [*whole.modules()]
    before = [module.training for module in modules]
    flags = TrainingFlags(modules)
    for part in whole:
        part.train(not part.training)
        switched = flags.switched()
        assert switched == {*part.modules()}
        flags.switch(frozenset())
        assert [module.training for module in modules] == before
        flags.switch(switched)
        assert {m for m, was in zip(modules, before, strict=True) if m.training != was} == switched
        flags.switch(frozenset())
    assert flags.seen == {*modules} - {whole}


def test_to_ask_is_no_look_at_an_attribute_of_modules() -> None:
    flags = TrainingFlags(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).modules())
    heard: list[str] = []
    with watched_attributes(lambda _, name: heard.append(name), lambda _, name: heard.append(name)):
        assert not flags.switched()
    assert not heard
