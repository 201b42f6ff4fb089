"""Proofs of other stacks: `unisono.check_stack("deepspeed", MyStep)`. A file for each stack; those with `_` are tools.

_step: what the user writes · _one_device: what one device makes of it · _watch, _adapter: a rank under a stack ·
_rank: what processes run · _check: the public calls · _cause: why an update is wrong
"""

from unisono_contrib.library.stacks._check import check_stack, check_updates
from unisono_contrib.library.stacks._step import TrainingStep

__all__ = ["TrainingStep", "check_stack", "check_updates"]
