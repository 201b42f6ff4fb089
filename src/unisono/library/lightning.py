"""The address of Lightning's strategy, which lies in `unisono_contrib.library.lightning`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.lightning import UnisonoStrategy as UnisonoStrategy

__getattr__ = door(__name__)
