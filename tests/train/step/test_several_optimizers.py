"""Several optimisers that act as one: what is read from and written to the one is read and written by its parts."""

import torch
from torch import nn

from unisono.train.step.several_optimizers import SeveralOptimizers


def test_a_state_that_is_replaced_is_the_one_that_its_part_steps_with() -> None:
    """As when a checkpoint is read: the state of the whole is filled, and the parts step."""
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    parts = torch.optim.SGD([one], lr=0.1, momentum=0.9), torch.optim.AdamW([other], lr=0.1)
    optimizer = SeveralOptimizers(parts)
    optimizer.state[one] = {"momentum_buffer": torch.full((3,), 5.0)}
    optimizer.state[other] = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.zeros(3),
        "exp_avg_sq": torch.ones(3),
    }
    one.grad, other.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert torch.equal(one.detach(), torch.full((3,), 1 - 0.1 * 0.9 * 5.0))
    assert optimizer.state[other]["step"] == 8
    assert all(part.state is optimizer.state for part in optimizer.parts)
