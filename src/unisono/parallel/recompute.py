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
from unisono.parallel.pass_context import PassContext, Stages
from unisono.spec.errors import UsageError


def wants(mode: str) -> Callable[[PassContext], bool]:
    """Whether any block of the whole model is computed again in this mode, so that all ranks have the same passes."""
    return lambda context: any(block.recompute == mode for block in context.each)


def recompute_blocks(stages: Stages, context: PassContext) -> None:
    """Compute blocks again as a whole in backward, where the plan says so."""
    for stage in stages.values():
        for name, block in stage.blocks.items():
            if context.each[int(name)].recompute == "full":
                _recompute(block)


def recompute_parts(stages: Stages, context: PassContext) -> None:
    """Compute again in backward what the model's anatomy names of other blocks. Raises UsageError P17 where it names
    nothing."""
    for stage in stages.values():
        names = [name for name in stage.blocks if context.each[int(name)].recompute == "selective"]
        parts = [part for name in names for part in _parts(stage, name, context)]
        if names and not parts:
            what = "recompute=selective: the model names nothing that is dear to keep and quickly computed"
            fix = "recompute=full, or `again` in the model's anatomy"
            raise UsageError(what, where="plan.recompute, model.kind", fix=fix, code="P17")
        for part in parts:
            _recompute(part)


def _parts(stage: Stage, block: str, context: PassContext) -> Iterator[nn.Module]:
    prefix = f"blocks.{block}"
    for name, module in stage.blocks[block].named_modules(prefix=prefix):
        if context.anatomy.is_again(name):
            yield module


def _recompute(module: nn.Module) -> None:
    """Wrap a module's forward in place; its names and hooks stay as they are."""
    module.forward = partial(  # type: ignore[method-assign]
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
    )
