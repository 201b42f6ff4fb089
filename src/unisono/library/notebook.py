"""The address of the launcher for notebooks, which lies in `unisono_contrib.library.notebook`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.notebook import notebook_launch as notebook_launch

__getattr__ = door(__name__)
