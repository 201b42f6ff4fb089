"""Shards of mosaicml-streaming."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono_contrib.train.data.stream.source import ShardSource

if TYPE_CHECKING:
    from unisono_contrib.train.data.stream.formats import ShardFile
    from unisono_contrib.train.data.stream.store import ShardStore


class MosaicShards(ShardSource):
    """A folder or URL with MDS shards and their index.json, of pictures or texts, read while the run trains."""

    name: ClassVar[str] = "mds"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(min_length=1, description="the folder or URL that MDSWriter wrote to")

    def _shards(self, store: "ShardStore") -> "Sequence[ShardFile]":
        from unisono_contrib.train.data.stream.formats.mds import mosaic_shards

        return mosaic_shards(store, self.path)
