"""Parameters in bf16 without masters: each update is rounded up or down at random (Gupta et al., Deep learning with
limited numerical precision, 2015).

A number between two neighbours in bf16 becomes the upper one as often as it is nearer to it, so that its mean over many
draws is the number itself, and updates smaller than a rounding step are not lost. The draw is a function of seed, step,
the parameter's name and the element's index in the whole tensor: every plan draws the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.models.noise import Dropout, Noise, site_of
from unisono.parallel.params import Slot, add_up_in
from unisono.parallel.pass_context import PassContext, Stages
from unisono.spec.layout import Places

KEPT = torch.bfloat16
_BELOW = 16  # bits of an fp32 number that bf16 has not


@dataclass(slots=True)
class Dither:
    """The source of an update's random draws. seed: of the run. owners: alias → owner of tied weights, which are
    rounded alike. step: updates made before this one."""

    seed: int
    owners: Mapping[str, str] = field(default_factory=dict)
    step: int = 0

    def kept(self, slot: Slot, x: Tensor) -> Tensor:
        """What a parameter on this rank can hold of what it has become."""
        return x if slot.master.dtype == x.dtype else self.rounded(x, slot.name, slot.start, slot.shape)

    @torch.no_grad()
    def rounded(self, x: Tensor, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A box of a parameter in fp32 → in bf16. name, shape: of the whole tensor. start: where the box begins."""
        if not x.numel():
            return x.to(KEPT)
        noise = self._draws(x, name, start, shape)
        bits = x.contiguous().view(torch.int32)
        up = ((bits + noise) >> _BELOW << _BELOW).view(torch.float32)
        return torch.where(x.isfinite(), up, x).to(KEPT)

    def _draws(self, x: Tensor, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Uniform integers below 2^16, as large as x."""
        draws = Dropout(0.0, site_of(f"{self.owners.get(name, name)}, rounded"))
        draws.places = {
            1 + dim: Places(full, ((at, size),))
            for dim, (full, at, size) in enumerate(zip(shape, start, x.shape, strict=True))
        }
        step = torch.tensor([self.step], dtype=torch.int64, device=x.device)
        box = torch.Size((1, *(x.shape or (1,))))
        return (draws.bits(box, Noise(self.seed, step)) >> _BELOW).to(torch.int32).view(x.shape)


@torch.no_grad()
def keep_narrow(stages: Stages, context: PassContext) -> None:
    """Put every parameter into bf16, in place; gradients stay in the dtype of this rank."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by storage, which uses of a tied weight share; and is held
    for stage in stages.values():
        for live in stage.parameters():
            was = live.detach()
            live.data = known.setdefault(was.untyped_storage()._cdata, (was, was.to(KEPT)))[1]
            if live.requires_grad:
                add_up_in(live, context.dtype)
