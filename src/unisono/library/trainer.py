"""The address of the adapter for `transformers.Trainer`, which lies in `unisono_contrib.library.trainer`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.trainer import trainer as trainer

__getattr__ = door(__name__)
