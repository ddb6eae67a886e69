"""What is stepped follows from what has received a gradient, whenever it has."""

import torch
from torch import nn

from penstock.optim.formula import Hyper
from penstock.runtime.context import Update
from penstock.runtime.stepping import Stepping
from penstock.tape.groups import group_parameters


def test_a_parameter_is_stepped_from_the_gradient_on_that_it_receives_in_the_same_update() -> None:
    (group,) = group_parameters(nn.Linear(4, 4, bias=False), [])
    n = group.spec.trainable
    stepping = Stepping([group], {0: [(0, n, 0)]}, 1, torch.float32)
    update = Update(count=1, hypers=(Hyper(kind="sgd", lr=1.0),))
    gradient, master = torch.ones(n), torch.zeros(n)
    stepping.step(update, 0, 0, gradient, master, None, (), None)
    assert not master.any(), "nothing has a gradient"
    update.touched.add(id(group.slices[0].parameter))
    stepping.step(update, 0, 0, gradient, master, None, (), None)
    assert torch.equal(master, -gradient)
    other = Update(count=2, hypers=update.hypers, touched={0})
    stepping.step(other, 0, 0, gradient, master, None, (), None)
    assert torch.equal(master, -gradient), "another update, for which another parameter has a gradient"
