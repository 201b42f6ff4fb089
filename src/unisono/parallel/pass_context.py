"""What the passes over a model share: what is asked for, and what one leaves for the next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.parallel.cut import Stage, block_number
from unisono.parallel.offload.store import Store
from unisono.parallel.parts import Cut, Dealt
from unisono.parallel.shard import Whole
from unisono.plan import Plan
from unisono.plan.blocks import Away, BlockOptions, away_of
from unisono.plan.grid import Grid
from unisono.spec.layout import Anatomy

Stages = Mapping[int, Stage]  # of one rank, by number


@dataclass(slots=True)
class PassContext:
    """What the passes that build one rank's part share.

    shapes: full shape of every logical name, in the model's own order. blocks, placement: the blocks and the row of
    each stage of the pipeline. values(name): the full initial tensor; None: the caller fills the model afterwards.
    samples: in a micro-batch. leafwise: the gradient of each micro-batch is wanted by itself. virtual: shards by which
    every layer is computed, 1: layers as they are. cuts: by name, what `tp` took of a parameter. dealt: by name, this
    rank's part of one of experts, or its block on a grid. masters: by name, of parameters that are rounded where
    modules hold them. sharding: by stage. store: where what is put away lies. lenders: of the parts whose weights are.
    each: how every block of the whole model is played. frozen: names of parameters that do not learn."""

    plan: Plan
    mesh: Mesh
    anatomy: Anatomy
    shapes: Mapping[str, tuple[int, ...]]
    blocks: Sequence[range]
    placement: Sequence[int]
    values: Callable[[str], Tensor] | None
    dtype: torch.dtype
    device: torch.device
    store: Store
    samples: int
    each: Sequence[BlockOptions]
    leafwise: bool = False
    virtual: int = 1
    compiled: bool = False
    cuts: dict[str, Cut] = field(default_factory=dict)
    dealt: dict[str, Dealt] = field(default_factory=dict)
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    sharding: dict[int, Whole] = field(default_factory=dict)
    lenders: dict[nn.Module, Any] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    def whole(self, name: str) -> bool:
        """Whether `tp` leaves the block whole that holds a module of this logical name."""
        number = block_number(name)
        return number is not None and self.each[number].whole

    def away(self, name: str) -> Away:
        """What lies elsewhere of the part that holds a module or parameter of this logical name."""
        number = block_number(name)
        return away_of(self.plan) if number is None else self.each[number].away

    def kept_away(self, name: str) -> Away:
        """What of a parameter lies elsewhere. A tied parameter lies elsewhere where all of its uses do."""
        owner = self.owners.get(name, name)
        uses = [self.away(use) for use in (owner, *(a for a, of in self.owners.items() if of == owner))]
        return Away(all(use.optimizer for use in uses), all(use.params for use in uses))

    def puts_away(self, what: Callable[[Away], bool]) -> bool:
        """Whether anything of this kind lies elsewhere, in any part of the model."""
        return any(map(what, (away_of(self.plan), *(block.away for block in self.each))))

    @property
    def length(self) -> int:
        """Positions that `tp` deals between blocks; 0 if there are none."""
        return 0 if isinstance(self.plan.tp, Grid) else self.anatomy.sequence // self.plan.cp

    @property
    def states(self) -> Group:
        """Whoever deals out parameters and their states: also ranks of `cp`, which have gradients to add up that ranks
        of `shard` scatter, unless virtual shards have added them up before."""
        return self.mesh.shard if self.virtual > 1 else self.mesh.states

    @property
    def carried(self) -> torch.dtype:
        """The dtype in which floating numbers cross from stage to stage."""
        return torch.bfloat16 if self.plan.arithmetic.narrow else self.dtype

    @property
    def owners(self) -> dict[str, str]:
        """Alias → owner of tied weights."""
        return dict(self.anatomy.ties)

    @property
    def apart(self) -> bool:
        """Whether the uses of a tied weight collect gradients of their own."""
        # Else autograd would add the uses up in the dtype of the parameter.
        narrow = self.plan.arithmetic.narrow
        # And FSDP2 takes no parameter of two blocks.
        inside = any(name.startswith("blocks.") for tie in self.anatomy.ties for name in tie)
        return self.plan.shard == 1 or len(self.blocks) > 1 or self.leafwise or narrow or inside
