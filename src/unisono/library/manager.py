"""The address of torchft's manager over our supervisor, which lies in `unisono_contrib.library.manager`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.manager import ManagedOptimizer as ManagedOptimizer
    from unisono_contrib.library.manager import Manager as Manager

__getattr__ = door(__name__)
