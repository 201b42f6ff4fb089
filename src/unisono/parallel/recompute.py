"""Recompute a block's activations in backward instead of keeping them (Chen et al., 2016).

The randomness of a block is an argument (`models/noise.py`), so recomputing draws the same masks, and the result
is bit-identical.
"""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Wrap each block's forward in place; names and hooks of the blocks stay as they are."""
    for block in blocks:
        block.forward = partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
