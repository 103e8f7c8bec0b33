"""Where an actor is in its training step."""

from __future__ import annotations

import torch
from torch import nn

from torpor.rules.base import Actor
from torpor.rules.steps import StepWatch


class Wrapped(nn.Module):
    """As data parallelism wraps a model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def _watched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[StepWatch, object]:
    watch = StepWatch()
    return watch, watch.attach(Actor({"model": model}, {str(i): o for i, o in enumerate(optimizers)}))


def test_a_plain_model_begins_a_step_with_its_first_gradient() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, _ = _watched(model, optimizer)
    assert not watch.in_a_step
    assert not watch.after_a_step
    loss = model(torch.ones(4)).sum()
    assert not watch.in_a_step
    loss.backward()
    assert watch.in_a_step
    optimizer.step()
    assert watch.after_a_step
    assert not watch.in_a_step


def test_a_wrapped_model_begins_it_with_the_forward_unless_no_gradient_follows() -> None:
    model = Wrapped()
    watch, _ = _watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model(torch.ones(4))
    assert not watch.in_a_step
    model(torch.ones(4))
    assert watch.in_a_step


def test_a_step_ends_when_all_optimizers_that_have_parameters_have_stepped() -> None:
    model = nn.Linear(4, 4)
    first, second = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    watch, _ = _watched(model, first, second, empty)
    model(torch.ones(4)).sum().backward()
    first.step()
    first.step()
    assert watch.in_a_step
    second.step()
    assert watch.after_a_step


def test_a_plain_module_gets_no_hook_that_would_keep_it_from_being_captured() -> None:
    model = nn.Linear(4, 4)
    _watched(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not model._backward_hooks


def test_two_rules_share_one_watch_until_both_have_let_go() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, first_undo = _watched(model, optimizer)
    second_undo = watch.attach(Actor({"model": model}, {"optimizer": optimizer}))
    hooks = model.weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    model(torch.ones(4)).sum().backward()
    first_undo()
    assert watch.in_a_step
    second_undo()
    assert not watch.in_a_step
    assert not hooks


def test_after_the_undo_nothing_is_seen() -> None:
    model = Wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, undo = _watched(model, optimizer)
    model(torch.ones(4)).sum().backward()
    undo()
    assert not watch.in_a_step
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert not watch.in_a_step
    assert not watch.after_a_step
