"""The Trainer's loader whose batches are dealt answers for the loader behind it."""

import copy
from types import SimpleNamespace
from typing import Any

from unisono_contrib.library.trainer import DealtPasses


def test_what_it_does_not_have_is_the_loaders() -> None:
    dealt: Any = SimpleNamespace(skip=lambda count: None)
    passes = DealtPasses(dealt, SimpleNamespace(batch_size=8))
    assert passes.batch_size == 8 and copy.copy(passes).batch_size == 8
    assert not hasattr(passes, "sampler")
