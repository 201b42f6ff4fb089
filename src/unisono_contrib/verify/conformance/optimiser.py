"""What every optimiser owes: the state it names is the state it keeps, and its law is what it does."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.spec.training import Optimiser, UpdateSizes

_LR, _DECAY = 0.1, 0.1


def faults(member: Optimiser, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with an optimiser, a sentence each; none for one that may be used.

    1. `state` has the names and shapes of what the live optimiser makes in its first step, and a step from it is that
    step. 2. `kept` counts it. 3. The law, if there is one, holds the live step within its error. 4. Decay is where
    `couples` says: in the gradient, or beside what the gradient does. With `norms` it is scaled with the step, which
    the law says.
    """
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    bare, primed = (_live(member, weight, _DECAY) for weight in weights)
    primed.state[weights[1]] = member.state(weights[1])
    for optimiser, weight in zip((bare, primed), weights, strict=True):
        weight.grad = grads[0].clone()
        optimiser.step()
    state = {k: v for k, v in bare.state[weights[0]].items() if isinstance(v, torch.Tensor)}
    named = member.state(weights[1])
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in named.items()}:
        yield f"it names the state {sorted(named)} and keeps {sorted(state)}"
    if not torch.equal(*weights):
        yield "its first step from the state that it names is another than from none"
    if member.kept != sum(v.shape == start.shape for v in state.values()):
        yield f"it says that it keeps {member.kept} numbers of each parameter and keeps another number"
    before, held = weights[0].detach().clone(), {k: v.double().clone() for k, v in state.items()}
    weights[0].grad = grads[1].clone()
    bare.step()
    seen = {
        key: (bare.state[weights[0]][key].double(), torch.zeros_like(held[key])) for key in member.observed
    }
    law = member.law(
        UpdateSizes(_LR, _DECAY, 1, 2.0**-48, seen), before, held, grads[1], torch.zeros_like(start)
    )
    for key, (value, error) in law.items():
        live = weights[0].detach() if key == "param" else bare.state[weights[0]][key]
        if bool(((live.double() - value).abs() > error).any()):
            yield f"its law says another {key} than its step makes"
    if not member.norms:
        yield from _decay_faults(member, start, grads[0])


class _Products:
    """What an optimiser that observes layers is shown in each update: that all directions are alike."""

    def __init__(self, member: Optimiser) -> None:
        self.member = member

    def gather(self, params: Iterable[nn.Parameter], owners: object) -> dict[nn.Parameter, dict[str, Tensor]]:
        """As `train.step.layer_products.LayerProducts` does."""
        sizes = {p: {key: len(self.member.state(p)[key]) for key in self.member.observed} for p in params}
        return {p: {key: torch.eye(n).to(p) for key, n in of.items()} for p, of in sizes.items()}


def _live(member: Optimiser, weight: nn.Parameter, decay: float) -> torch.optim.Optimizer:
    live = member.bind([{"params": [weight], "weight_decay": decay}], _LR, False)
    if member.observed:
        live.products = _Products(member)  # type: ignore[attr-defined]
    return live


def _decay_faults(member: Optimiser, start: Tensor, grad: Tensor) -> Iterator[str]:
    """Two updates with decay, beside two without one: of gradients that the decay was added to, or of weights that it
    was taken from."""
    ours, bare = (nn.Parameter(start.clone()) for _ in range(2))
    live, plain = _live(member, ours, _DECAY), _live(member, bare, 0.0)
    for _ in range(2):
        ours.grad = grad.clone()
        bare.grad = grad + _DECAY * bare.detach() if member.couples else grad.clone()
        with torch.no_grad():
            bare.mul_(1.0 if member.couples else 1.0 - _LR * _DECAY)
        live.step()
        plain.step()
    if not torch.allclose(ours, bare, rtol=1e-6, atol=1e-9):
        yield f"its weight decay is {'no part' if member.couples else 'a part'} of the gradient"
