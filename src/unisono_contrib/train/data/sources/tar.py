"""Tar shards, as webdataset writes them, in a folder or an object store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono_contrib.train.data.stream.source import ShardSource

if TYPE_CHECKING:
    from unisono_contrib.train.data.stream.formats import ShardFile
    from unisono_contrib.train.data.stream.store import ShardStore


class TarShards(ShardSource):
    """Tar shards with pictures (.jpg, .png and .cls) or texts (.txt, .json), read while the run trains."""

    name: ClassVar[str] = "tar"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(min_length=1, description="files or URLs with {000..049} or *")

    def _shards(self, store: "ShardStore") -> "Sequence[ShardFile]":
        from unisono_contrib.train.data.stream.formats import shards_of

        return shards_of(store, self.path, "tar", (".tar", ".tar.gz", ".tgz", ".tar.zst"))
