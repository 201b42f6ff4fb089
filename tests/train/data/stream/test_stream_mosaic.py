"""Shards that mosaicml-streaming wrote (see `write_mosaic`) hold for us what it put into them."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.data.stream import shards, write_mosaic
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load

pytestmark = pytest.mark.timeout(120)
KEPT = Path(__file__).with_name("mosaic")
WAYS = [*write_mosaic.WAYS]


@pytest.fixture(params=["kept", "written now"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Those in this repository, and those of the library that is installed."""
    if request.param == "kept":
        return KEPT
    if importlib.util.find_spec("streaming") is None:
        pytest.skip(
            "MDSWriter itself is not tried: pip install mosaicml-streaming; its shards in mosaic/ are"
        )
    write_mosaic.main(tmp_path / "mosaic")
    return tmp_path / "mosaic"


def opened(source: str, cache: Path, pictures: bool = False) -> Corpus:
    model = ModelConfig(kind="convnet", image=(3, 6, 6)) if pictures else ModelConfig(context=8)
    return load(DataConfig(source=source, cache=str(cache), workers=1, val_fraction=0.0), model)


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_that_were_written(folder: Path, tmp_path: Path, way: str) -> None:
    if way.startswith("zstd"):
        pytest.importorskip("zstandard", reason="pip install 'unisono[data]'")
    assert len(json.loads((folder / f"text-{way}" / "index.json").read_text())["shards"]) > 1
    wanted = "\0".join(map(write_mosaic.text, range(write_mosaic.COUNT)))
    shards.written(tmp_path / "whole", [shards.lines([*map(write_mosaic.text, range(12))])], "jsonl")
    whole, read = (
        opened(source, tmp_path / "cache").train.fetch(np.arange(len(wanted.encode()) // 8))
        for source in (f"jsonl:{tmp_path / 'whole'}", f"mds:{folder / f'text-{way}'},kind=text")
    )
    assert all(map(torch.equal, whole, read))
    assert bytes(read[0].reshape(-1).tolist()).decode("utf-8", "ignore").startswith(wanted[:60])


@pytest.mark.parametrize("way", ["plain", "zstd"])
def test_pictures_are_those_that_were_written(folder: Path, tmp_path: Path, way: str) -> None:
    corpus = opened(f"mds:{folder / f'pictures-{way}'}", tmp_path / "cache", pictures=True)
    inputs, targets = corpus.train.fetch(np.arange(write_mosaic.COUNT))
    assert [*map(shards.number_of, inputs.numpy())] == [*range(write_mosaic.COUNT)]
    assert targets.tolist() == [i % 4 for i in range(write_mosaic.COUNT)]


def test_shards_of_which_only_the_plain_half_is_here_are_read(tmp_path: Path) -> None:
    """As a cache of theirs has them, in which compressed shards are unpacked and removed."""
    shutil.copytree(KEPT / "pictures-plain", tmp_path / "m")
    shutil.copy(KEPT / "pictures-zstd" / "index.json", tmp_path / "m")
    assert len(opened(f"mds:{tmp_path / 'm'}", tmp_path / "cache", pictures=True).train) == write_mosaic.COUNT
    for shard in (tmp_path / "m").glob("*.mds"):
        shard.unlink()
    error = refused("D02", lambda: opened(f"mds:{tmp_path / 'm'}", tmp_path / "cache", pictures=True))
    assert error.where.endswith("shard.00000.mds.zstd")


def test_damage_and_compressions_that_are_not_read_are_named(tmp_path: Path) -> None:
    shutil.copytree(KEPT / "text-gz", tmp_path / "m")
    broken = tmp_path / "m" / "shard.00001.mds.gz"
    broken.write_bytes(broken.read_bytes()[:-20])
    error = refused("D14", lambda: opened(f"mds:{tmp_path / 'm'},kind=text", tmp_path / "cache"))
    assert error.where == f"{broken}:0" and "cannot be decompressed" in error.what
    index = tmp_path / "m" / "index.json"
    index.write_text(index.read_text().replace('"gz"', '"br"'))
    error = refused("D13", lambda: opened(f"mds:{tmp_path / 'm'},kind=text", tmp_path / "cache"))
    assert "compression br" in error.what
