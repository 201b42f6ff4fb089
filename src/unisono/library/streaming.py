"""The address of the loader of shards for a loop of one's own, which lies in `unisono_contrib.library.streaming`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.library.streaming import StreamingLoader as StreamingLoader

__getattr__ = door(__name__)
