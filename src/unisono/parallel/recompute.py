"""Recompute activations in backward instead of keeping them: whole blocks (Chen et al., 2016), or in each block what is
dear to keep and quickly computed, such as attention between its projections (Korthikanti et al., 2022).

The randomness of a block is an argument (`models/noise.py`), so recomputing draws the same masks, and the result
is bit-identical.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.parallel.cut import Stage
from unisono.parallel.site import Site, Stages
from unisono.plan.away import Again, again_of
from unisono.spec.errors import UsageError


def wants(what: Callable[[Again], int]) -> Callable[[Site], bool]:
    """Whether a plan computes anything of this kind again, in its longest stage."""
    return lambda site: what(again_of(site.plan, max(map(len, site.blocks)))) > 0


def recompute_blocks(stages: Stages, site: Site) -> None:
    """Of each stage its first blocks, as many as the plan says."""
    for stage in stages.values():
        blocks = list(stage.blocks.values())
        for block in blocks[: again_of(site.plan, len(blocks)).full]:
            _recompute(block)


def recompute_parts(stages: Stages, site: Site) -> None:
    """Of the blocks after those, what the model's anatomy names. Raises UsageError P17 where it names nothing."""
    for stage in stages.values():
        many = again_of(site.plan, len(stage.blocks))
        parts = [
            part
            for name in list(stage.blocks)[many.full :][: many.selective]
            for part in _parts(stage, name, site)
        ]
        if many.selective and not parts:
            what = "recompute=selective: the model names nothing that is dear to keep and quickly computed"
            fix = "recompute=full, or `again` in the model's anatomy"
            raise UsageError(what, where="plan.recompute, model.kind", fix=fix, code="P17")
        for part in parts:
            _recompute(part)


def _parts(stage: Stage, block: str, site: Site) -> Iterator[nn.Module]:
    prefix = f"blocks.{block}"
    for name, module in stage.blocks[block].named_modules(prefix=prefix):
        if site.anatomy.is_again(name):
            yield module


def _recompute(module: nn.Module) -> None:
    """Wrap a module's forward in place; its names and hooks stay as they are."""
    module.forward = partial(  # type: ignore[method-assign]
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
    )
