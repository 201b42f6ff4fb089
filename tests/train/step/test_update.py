"""Optimisers: torch's own numbers; and, where asked, the same bits for an element wherever its tensor is cut."""

import pytest
import torch
from torch import nn

from unisono.config import TrainConfig
from unisono.parallel.params import Slot
from unisono.sync import Verdict
from unisono.train.step.numbers import Numbers
from unisono.train.step.update import state_of, update_of


def slots_for(*tensors):
    params = [nn.Parameter(t.clone()) for t in tensors]
    return [Slot(f"p{i}", p, p, tuple(p.shape), (0,) * p.dim()) for i, p in enumerate(params)]


def stepped(train, pieces, grads, even, steps=5):
    slots = slots_for(*pieces)
    update = update_of(train, slots, torch.device("cpu"), even=even)
    for step in range(steps):
        for slot, grad in zip(slots, grads, strict=True):
            slot.master.grad = grad.clone()
        update(step, Verdict.APPLY, Numbers(0.0, 0.0, False))
    return update.optimizer, slots


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("cut", [1, 3, 4, 17, 32])
def test_even_steps_give_an_element_its_bits_wherever_it_is_cut(name, cut):
    torch.manual_seed(0)
    train = TrainConfig(optimizer=name)
    whole, grad = torch.randn(53, 3), torch.randn(53, 3)
    (one, (slot,)), (two, halves) = (
        stepped(train, [whole], [grad], even=True),
        stepped(train, [whole[:cut], whole[cut:]], [grad[:cut], grad[cut:]], even=True),
    )
    assert torch.equal(slot.master, torch.cat([half.master for half in halves]))
    for key, value in state_of(one, slot.master).items():
        if value.dim():
            assert torch.equal(value, torch.cat([state_of(two, half.master)[key] for half in halves])), key


def test_even_steps_are_torchs_steps():
    torch.manual_seed(0)
    whole, grad = torch.randn(7, 3), torch.randn(7, 3)
    train = TrainConfig()
    _, (even,) = stepped(train, [whole], [grad], even=True)
    _, (plain,) = stepped(train, [whole], [grad], even=False)
    torch.testing.assert_close(even.master, plain.master, rtol=1e-6, atol=1e-7)


def test_matrices_decay_and_vectors_do_not():
    train = TrainConfig(weight_decay=0.5)
    _, (matrix, vector) = stepped(
        train, [torch.ones(4, 4), torch.ones(4)], [torch.zeros(4, 4), torch.zeros(4)], False
    )
    assert (matrix.master < 1).all() and (vector.master == 1).all()


def test_state_is_there_before_the_first_step():
    slots = slots_for(torch.ones(3, 5))
    state = state_of(
        update_of(TrainConfig(), slots, torch.device("cpu"), even=True).optimizer, slots[0].master
    )
    assert state["exp_avg"].shape == (3, 5) and not state["exp_avg"].any() and state["step"] == 0
