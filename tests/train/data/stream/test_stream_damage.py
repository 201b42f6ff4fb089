"""What is wrong with a shard or a store is said by shard and byte, or waited out; nothing is skipped unasked."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.data.stream import shards
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")
pytestmark = pytest.mark.timeout(120)
SHAPE = (3, 6, 6)


class Flaky:
    """How many requests the store in memory answers with 503."""

    refusals = 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    system = memory.MemoryFileSystem
    read = system.cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if Flaky.refusals:
            Flaky.refusals -= 1
            raise OSError(errno.EBUSY, "503 Slow Down")
        return read(self, path, start=start, end=end, **more)

    monkeypatch.setattr(system, "cat_file", cat_file)
    monkeypatch.setattr("unisono_contrib.train.data.stream.store._FIRST_PAUSE", 0.001)
    monkeypatch.setattr(Flaky, "refusals", 0)
    system.store.clear()
    return Flaky


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Corpus]:
    def load_it(source: str, *, kind: str = "convnet", **keys: Any) -> Corpus:
        data = {"cache": str(tmp_path / "cache"), "workers": 1, "val_fraction": 0.0, **keys}
        model = ModelConfig(kind="convnet", image=SHAPE) if kind == "convnet" else ModelConfig(context=8)
        return load(DataConfig(source=source, **data), model)

    return load_it


def every(corpus: Corpus) -> list[int]:
    inputs, _ = corpus.train.fetch(np.arange(len(corpus.train)))
    return sorted(shards.number_of(x) for x in inputs.numpy())


def tars(folder: Path, count: int = 12) -> tuple[str, Path]:
    pattern = shards.written(folder, shards.picture_tars(count, 2), "tar")
    return f"tar:{pattern}", folder / "001.tar"


@pytest.mark.parametrize("cut", [512 * 3 + 100, 512 * 4, -10240 + 512])
def test_a_tar_that_is_cut_off_is_named_by_its_byte(
    tmp_path: Path, opened: Callable[..., Corpus], cut: int
) -> None:
    source, last = tars(tmp_path / "t")
    body = last.read_bytes()
    last.write_bytes(body[:cut].rstrip(b"\0") if cut < 0 else body[:cut])
    error = refused("D14", lambda: opened(source))
    assert error.where.startswith(f"{last}:") and "cut off" in error.what
    corpus = opened(source, skip_bad=True)
    assert corpus.notes and str(last) in corpus.notes[0]
    assert every(corpus) == [*range(len(corpus.train))]


def test_a_broken_header_and_bad_fields_are_named_and_left_out_if_asked(
    tmp_path: Path, opened: Callable[..., Corpus]
) -> None:
    samples = [(f"{i}", {"png": shards.picture(i)[0], "cls": b"1"}) for i in range(6)]
    samples[1] = ("1", {"png": samples[1][1]["png"], "cls": b"one"})
    samples[2] = ("2", {"cls": b"1"})
    samples[3] = ("3", {"png": b"no picture", "cls": b"1"})
    body = bytearray(shards.archive(samples))
    at = body.index(b"4.png\0")
    body[at + 60] ^= 255
    place = tmp_path / "t" / "000.tar"
    source = f"tar:{shards.written(place.parent, [bytes(body)], 'tar')}"
    assert "class is no number" in refused("D14", lambda: opened(source)).what
    corpus = opened(source, skip_bad=True)
    assert every(corpus) == [0, 5] and corpus.notes[0].startswith(
        "5 bad samples"
    )  # of 4 its header and its rest


def test_a_picture_that_cannot_be_decoded_is_named_when_it_is_read(
    tmp_path: Path, opened: Callable[..., Corpus]
) -> None:
    samples = [(f"{i}", {"png": shards.picture(i)[0], "cls": b"1"}) for i in range(3)]
    samples[1] = ("1", {"png": b"no picture", "cls": b"1"})
    body = shards.archive(samples)
    corpus = opened(f"tar:{shards.written(tmp_path / 't', [body], 'tar')}")
    error = refused("D14", lambda: every(corpus))
    assert error.where == f"{tmp_path / 't' / '000.tar'}:{body.index(b'no picture')}"


def test_a_bad_line_of_json_is_named_by_its_byte(tmp_path: Path, opened: Callable[..., Corpus]) -> None:
    good = shards.lines(shards.texts(3))
    source = f"jsonl:{shards.written(tmp_path / 'j', [good + b'{broken' + bytes([10]) + good], 'jsonl')},stream=true"
    error = refused("D14", lambda: opened(source, kind="gpt"))
    assert error.where == f"{tmp_path / 'j' / '000.jsonl'}:{len(good)}"
    assert opened(source, kind="gpt", skip_bad=True).notes[0].startswith("1 bad samples")


@pytest.mark.parametrize("ending", ["parquet", "mds", "tar.gz", "jsonl.gz"])
def test_what_is_no_shard_is_refused(tmp_path: Path, opened: Callable[..., Corpus], ending: str) -> None:
    name = ending.partition(".")[0]
    body = b"\x03\0\0\0 neither a table nor an archive" * 3
    pattern = shards.written(tmp_path / "x", [body], ending)
    if name == "parquet":
        pytest.importorskip("pyarrow")
    if name == "mds":
        columns = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
        shard = {"format": "mds", "compression": None, "raw_data": {"basename": "000.mds"}, **columns}
        (tmp_path / "x" / "index.json").write_text(json.dumps({"shards": [shard]}))
        pattern = str(tmp_path / "x")
    more = ",stream=true" if name in ("jsonl", "parquet") else ",kind=text"
    error = refused("D14", lambda: opened(f"{name}:{pattern}{more}", kind="gpt"))
    assert error.where.startswith(f"{tmp_path / 'x'}")
    (tmp_path / "x" / "index.json").write_text("{}")
    if name == "mds":
        refused("D13", lambda: opened(f"{name}:{pattern}{more}", kind="gpt"))


@pytest.mark.parametrize("how", ["longer", "touched", "gone"])
def test_a_local_shard_that_changes_during_a_run_is_an_error(
    tmp_path: Path, opened: Callable[..., Corpus], how: str
) -> None:
    source, last = tars(tmp_path / "t")
    corpus = opened(source)
    if how == "longer":
        last.write_bytes(last.read_bytes() + bytes(512))
    elif how == "touched":
        os.utime(last, ns=(1, 1))
    else:
        last.unlink()
    error = refused("D02" if how == "gone" else "D19", lambda: every(corpus))
    assert str(last) in error.where


@pytest.mark.parametrize("how", ["another", "shorter", "gone"])
def test_a_shard_of_a_store_that_changes_during_a_run_is_an_error(
    opened: Callable[..., Corpus], store: type[Flaky], how: str, tmp_path: Path
) -> None:
    system = fsspec.filesystem("memory")
    for i, body in enumerate(shards.picture_tars(12, 2)):
        system.pipe_file(f"/b/{i}.tar", body)
    corpus = opened("tar:memory://b/{0..1}.tar")
    body = system.cat_file("/b/1.tar")
    if how == "gone":
        system.rm_file("/b/1.tar")
    else:
        system.pipe_file("/b/1.tar", body[:-512] if how == "shorter" else body.replace(b"\x07", b"\x08"))
    error = refused("D02" if how == "gone" else "D19", lambda: every(corpus))
    assert error.where == "memory://b/1.tar"
    if how != "gone":  # a new run sees that it is another shard
        assert opened("tar:memory://b/{0..1}.tar", skip_bad=True).fingerprint != corpus.fingerprint


def test_a_storm_of_refusals_is_waited_out_until_patience_ends(
    opened: Callable[..., Corpus], store: type[Flaky], tmp_path: Path
) -> None:
    system = fsspec.filesystem("memory")
    for i, body in enumerate(shards.picture_tars(12, 2)):
        system.pipe_file(f"/b/{i}.tar", body)
    store.refusals = 3
    corpus = opened("tar:memory://b/{0..1}.tar,patience=20")
    store.refusals = 3
    assert every(corpus) == [*range(12)] and store.refusals == 0
    hasty = opened("tar:memory://b/{0..1}.tar,patience=0.01", cache=str(tmp_path / "another"))
    store.refusals = 10**6
    error = refused("D18", lambda: every(hasty))
    assert "503 Slow Down" in error.what and error.where.startswith("memory://b/")
    store.refusals = 0
    assert every(hasty) == [*range(12)]


def test_a_full_disk_is_done_without_and_said_once(
    tmp_path: Path, opened: Callable[..., Corpus], store: type[Flaky], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    system = fsspec.filesystem("memory")
    for i, body in enumerate(shards.picture_tars(12, 3)):
        system.pipe_file(f"/b/{i}.tar", body)
    corpus = opened("tar:memory://b/{0..2}.tar")
    real = Path.mkdir

    def full(self: Path, *args: Any, **more: Any) -> None:
        if "parts" in self.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        real(self, *args, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    assert every(corpus) == [*range(12)]
    assert capsys.readouterr().err.count("takes nothing") == 1
    monkeypatch.setattr("tempfile.mkdtemp", lambda *a, **k: full(Path("parts")))
    refused("D15", lambda: every(opened("tar:memory://b/{0..2}.tar")))


def test_shards_that_are_not_there_and_urls_that_mean_nothing(
    tmp_path: Path, opened: Callable[..., Corpus]
) -> None:
    refused("D02", lambda: opened(f"tar:{tmp_path}/{{0..3}}.tar"))
    refused("D02", lambda: opened("tar:memory://none/*.tar"))
    refused("D02", lambda: opened("tar:memory://none/0.tar"))
    refused("C02", lambda: opened("tar:nosuch://none/0.tar"))
    (tmp_path / "empty").mkdir()
    refused("D04", lambda: opened(f"tar:{tmp_path / 'empty'}"))
