"""The address of the loader of quantised folders, which lies in `unisono_contrib.train.export.quantised`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.train.export.quantised import load_quantised as load_quantised

__getattr__ = door(__name__)
