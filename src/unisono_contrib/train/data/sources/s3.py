"""Shards in an S3 bucket, by their URL alone: the ending says what they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono_contrib.train.data.stream.source import ShardSource

if TYPE_CHECKING:
    from unisono_contrib.train.data.stream.formats import ShardFile
    from unisono_contrib.train.data.stream.store import ShardStore

_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


class BucketShards(ShardSource):
    """`s3://BUCKET/{000..049}.tar`: shards of tar, parquet or jsonl, or a folder of MDS, in S3; needs s3fs."""

    name: ClassVar[str] = "s3"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(
        min_length=1, description="//BUCKET/{000..049}.tar, .parquet, .jsonl, or a folder of MDS shards"
    )
    kind: Literal["pictures", "text"] | None = Field(  # type: ignore[assignment]
        default=None, description="what a sample is; text in .parquet and .jsonl, else pictures when absent"
    )

    @property
    def gives(self) -> str:  # type: ignore[override]
        is_table = self.path.endswith((".parquet", *_LINES))
        kind = self.kind or ("text" if is_table else "pictures")
        return "tokens" if kind == "text" else "pictures"

    def _shards(self, store: "ShardStore") -> "Sequence[ShardFile]":
        from unisono_contrib.train.data.stream.formats import shards_of
        from unisono_contrib.train.data.stream.formats.mds import mosaic_shards

        url = f"s3:{self.path}"
        endings = {"jsonl": _LINES, "parquet": (".parquet",), "tar": (".tar", ".tar.gz", ".tgz", ".tar.zst")}
        kind = next((kind for kind, ends in endings.items() if self.path.endswith(ends)), "")
        return shards_of(store, url, kind, endings[kind]) if kind else mosaic_shards(store, url)
