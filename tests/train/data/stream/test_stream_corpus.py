"""Shards of any format hold the same samples, and no world, worker or cache decides their order."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.data.stream import shards
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.timeout(120)
SHAPE = (3, 6, 6)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Corpus]:
    def load_it(source: str, *, val_fraction: float = 0.0, **keys: Any) -> Corpus:
        model = {key: keys.pop(key) for key in ("kind", "image", "context") if key in keys}
        data = {"cache": str(tmp_path / "cache"), "workers": 1, **keys}
        return load(DataConfig(source=source, val_fraction=val_fraction, **data), ModelConfig(**model))

    return load_it


def pictures(corpus: Corpus) -> list[tuple[int, int]]:
    """(number, class) of each, in the order of shards."""
    inputs, targets = corpus.train.fetch(np.arange(len(corpus.train)))
    return [(shards.number_of(x), int(y)) for x, y in zip(inputs.numpy(), targets, strict=True)]


def in_memory(name: str, bodies: Any, ending: str) -> str:
    system = fsspec.filesystem("memory")
    bodies = list(bodies)
    for i, body in enumerate(bodies):
        system.pipe_file(f"/{name}/{i:03d}.{ending}", body)
    return f"memory://{name}/{{000..{len(bodies) - 1:03d}}}.{ending}"


def tables(rows: list[list[dict[str, Any]]], group: int) -> list[bytes]:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bodies = []
    for each in rows:
        out = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(each), out, row_group_size=group)
        bodies.append(out.getvalue().to_pybytes())
    return bodies


def mosaic(folder: Path, columns: list[tuple[str, str, int | None]], parts: list[list[list[bytes]]]) -> str:
    """Shards as MDSWriter writes them: a table of offsets, then the columns of each sample, sizes first."""
    folder.mkdir()
    listed = []
    for i, samples in enumerate(parts):
        config = json.dumps({"columns": columns}).encode()
        bodies = []
        for sample in samples:
            sizes = [len(v) for v, (_, _, size) in zip(sample, columns, strict=True) if size is None]
            bodies.append(np.array(sizes, "<u4").tobytes() + b"".join(sample))
        first = 4 + 4 * (len(bodies) + 1) + len(config)
        ends = first + np.concatenate(([0], np.cumsum([len(body) for body in bodies])))
        head = np.array([len(bodies), *ends], "<u4").tobytes()
        (folder / f"shard.{i:05d}.mds").write_bytes(head + config + b"".join(bodies))
        names, encodings, sizes = (list(each) for each in zip(*columns, strict=True))
        listed.append(
            {
                "format": "mds", "compression": None, "raw_data": {"basename": f"shard.{i:05d}.mds"},
                "column_names": names, "column_encodings": encodings, "column_sizes": sizes,
            }
        )  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return str(folder)


def test_pictures_of_every_format_are_the_same(tmp_path: Path, opened: Callable[..., Corpus]) -> None:
    model = {"kind": "convnet", "image": SHAPE}
    made = [shards.picture(i) for i in range(30)]
    wanted = [(i, label) for i, (_, label) in enumerate(made)]
    tars = list(shards.picture_tars(30, 3))
    rows = [
        [{"image": {"bytes": body, "path": ""}, "label": label} for body, label in made[i : i + 10]]
        for i in (0, 10, 20)
    ]
    labelled = [
        [[body, int(label).to_bytes(8, "little")] for body, label in made[i::1][:15]] for i in (0, 15)
    ]
    sources = [
        f"tar:{shards.written(tmp_path / 'tar', tars, 'tar')}",
        f"tar:{shards.written(tmp_path / 'gz', map(gzip.compress, tars), 'tar.gz')}",
        f"tar:{tmp_path / 'tar'}",
        f"tar:{in_memory('pictures', tars, 'tar')}",
        f"parquet:{shards.written(tmp_path / 'parquet', tables(rows, 4), 'parquet')},kind=pictures",
        f"parquet:{in_memory('tables', tables(rows, 4), 'parquet')},kind=pictures",
        f"mds:{mosaic(tmp_path / 'mds', [('image', 'png', None), ('label', 'int', 8)], labelled)}",
    ]
    for source in sources:
        corpus = opened(source, **model)
        assert pictures(corpus) == wanted, source
        assert corpus.classes == 4 and corpus.sample_shape == SHAPE
    assert opened(sources[0], **model).fingerprint == opened(sources[3], **model).fingerprint


def test_windows_of_text_are_those_of_a_text_that_is_read_before(
    tmp_path: Path, opened: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono_contrib.train.data.stream.formats.jsonl.PART", 300)
    documents = shards.texts(60)
    shards.written(tmp_path / "whole", [shards.lines(documents)], "jsonl")
    whole = f"jsonl:{tmp_path / 'whole' / '000.jsonl'}"
    cut = [documents[i : i + 20] for i in (0, 20, 40)]
    tars = [
        shards.archive([(f"{i:03d}", {"txt": text.encode()}) for i, text in enumerate(each)]) for each in cut
    ]
    sources = [
        f"jsonl:{in_memory('lines', map(shards.lines, cut), 'jsonl')}",
        f"jsonl:{shards.written(tmp_path / 'gz', [gzip.compress(shards.lines(each)) for each in cut], 'jsonl.gz')},"
        "stream=true",
        f"tar:{shards.written(tmp_path / 'tars', tars, 'tar')},kind=text",
        f"parquet:{in_memory('texts', tables([[{'text': t} for t in each] for each in cut], 7), 'parquet')}",
        f"mds:{mosaic(tmp_path / 'mds', [('text', 'str', None)], [[[t.encode()] for t in each] for each in cut])},"
        "kind=text",
    ]
    for context, some in ((4, sources[:1]), (90, sources)):
        read = opened(whole, context=context, val_fraction=0.1)
        for source in some:
            streamed = opened(source, context=context, val_fraction=0.1)
            for one, other in ((read.train, streamed.train), (read.val, streamed.val)):
                every = np.arange(len(one))
                assert len(other) == len(one), source
                mixed = np.random.default_rng(0).permutation(every)
                for mine, theirs in zip(one.fetch(mixed), other.fetch(mixed), strict=True):
                    assert torch.equal(mine, theirs), source


def test_chats_are_packed_within_parts_and_only_answers_count(
    tmp_path: Path, opened: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono_contrib.train.data.stream.formats.jsonl.PART", 400)
    lines = [json.dumps({"prompt": f"{i} plus 1? ", "completion": f"it is {i + 1}"}) for i in range(60)]
    pattern = shards.written(tmp_path / "chats", ["\n".join(lines[i::3]).encode() for i in range(3)], "jsonl")
    corpus = opened(f"jsonl:{pattern},stream=true", context=64, val_fraction=0.1)
    train, val = corpus.train, corpus.val
    assert len(train) > 5 and len(val) > 0
    every = np.arange(len(train))
    inputs, targets = train.fetch(every)
    counted = train.counted(every)  # type: ignore[attr-defined]
    assert counted.tolist() == (targets != -100).sum(1).tolist() and counted.min() > 0
    ids = train.documents(every)  # type: ignore[attr-defined]
    assert ids.shape == inputs.shape and int(ids.max()) >= 1
    alone = opened(f"jsonl:{pattern},stream=true", context=64, packing="none")
    words = sorted(bytes(y[y >= 0].tolist()).rstrip(b"\0") for y in alone.train.fetch(np.arange(60))[1])
    assert words == sorted(f"it is {i + 1}".encode() for i in range(60))


def order(corpus: Corpus, ranks: int, steps: range, batch: int = 12) -> list[list[int]]:
    """The first input of each sample, per step, as so many ranks read them."""
    seen = []
    feeds = [Permuted(corpus.train, 3, batch, 1) for _ in range(ranks)]
    for step in steps:
        cuts = np.array_split(np.arange(batch), ranks)
        leaves = [m for f, c in zip(feeds, cuts, strict=True) for m in f.fetch(step, range(c[0], c[-1] + 1))]
        seen.append([hash(leaf.inputs.numpy().tobytes()) for leaf in leaves])
    for feed in feeds:
        feed.close()
    return seen


@pytest.mark.parametrize("kind", ["pictures", "text"])
def test_no_world_worker_or_cache_changes_the_order(
    tmp_path: Path, opened: Callable[..., Corpus], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono_contrib.train.data.stream.order.WINDOW", 3)
    if kind == "pictures":
        source, model = (
            f"tar:{in_memory('o', shards.picture_tars(60, 9), 'tar')}",
            {"kind": "convnet", "image": SHAPE},
        )
    else:
        lines = [shards.lines(shards.texts(12, i)) for i in range(9)]
        source, model = f"jsonl:{in_memory('p', lines, 'jsonl')}", {"context": 32}
    steps = 3 * len(opened(source, **model).train) // 12
    alone = order(opened(source, **model), 1, range(steps))
    tiny = opened(f"{source},cache_gb=1e-6", cache=str(tmp_path / "tiny"), **model)
    again: list[list[int]] = []
    for ranks, until in ((4, steps // 4), (2, steps // 2), (3, 3 * steps // 4), (4, steps)):
        again += order(tiny, ranks, range(len(again), until))
    assert again == alone
    parts = tmp_path / "tiny" / "parts"
    assert sum(each.is_dir() and not each.name.startswith(".") for each in parts.iterdir()) <= 2


def test_mixtures_hold_shards(tmp_path: Path, opened: Callable[..., Corpus]) -> None:
    lines = [shards.lines(shards.texts(12, i)) for i in range(4)]
    one, two = (f"jsonl:{in_memory(name, lines[i : i + 2], 'jsonl')}" for i, name in ((0, "a"), (2, "b")))
    corpus = opened(f"mixture:3*{one} + 1*{two}", context=16)
    assert corpus.shares is not None and corpus.shares(0, 1000) == {one: 750, two: 250}
    assert order(corpus, 1, range(8)) == order(corpus, 4, range(8))


def test_more_classes_than_named_and_characters_are_refused(
    tmp_path: Path, opened: Callable[..., Corpus]
) -> None:
    source = f"tar:{in_memory('c', shards.picture_tars(8, 1), 'tar')}"
    refused("D12", lambda: opened(f"{source},classes=3", kind="convnet", image=SHAPE))
    assert opened(f"{source},classes=9", kind="convnet", image=SHAPE).classes == 9
    lines = in_memory("d", [shards.lines(shards.texts(3))], "jsonl")
    refused("D11", lambda: opened(f"jsonl:{lines}", tokenizer="char", context=8))
    refused("D12", lambda: opened(source, context=8))
