"""The address of proofs of other stacks, which lie in `unisono_contrib.library.stacks`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.stacks import TrainingStep as TrainingStep
    from unisono_contrib.library.stacks import check_stack as check_stack
    from unisono_contrib.library.stacks import check_updates as check_updates

__getattr__ = door(__name__)
