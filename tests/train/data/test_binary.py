"""Token files of nanoGPT and Megatron: read in place, and checked against the vocabulary."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unisono.spec.errors import UsageError
from unisono.train.data.binary import open_file
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted

Open = Callable[..., Corpus]


def raw(path: Path, tokens: np.ndarray) -> Path:
    tokens.astype("<u2").tofile(path)
    return path


def megatron(path: Path, documents: list[np.ndarray], code: int, dtype: str) -> Path:
    """The layout as Megatron-LM's indexed dataset writes it."""
    path.write_bytes(b"".join(document.astype(dtype).tobytes() for document in documents))
    sizes = np.array([len(document) for document in documents], dtype="<i4")
    starts = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * np.dtype(dtype).itemsize])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += (
        sizes.tobytes()
        + starts.astype("<i8").tobytes()
        + np.arange(len(documents) + 1, dtype="<i8").tobytes()
    )
    path.with_suffix(".idx").write_bytes(index)
    return path


def refused(code: str, call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.code == code and caught.value.where and caught.value.fix
    return caught.value


def test_raw_file(open_source: Open, tmp_path: Path) -> None:
    file = raw(tmp_path / "tokens.bin", np.arange(50000, 50100))
    corpus = open_source(f"bin:{file}", vocab=50257)
    assert corpus.vocab == 50257 and corpus.decode is None and (len(corpus.train), len(corpus.val)) == (11, 1)
    inputs, targets = corpus.train.fetch(np.array([1]))
    assert inputs.tolist() == [list(range(50008, 50016))] and targets.tolist() == [list(range(50009, 50017))]
    assert corpus.val.fetch(np.array([0]))[0].tolist() == [list(range(50090, 50098))]


def test_the_file_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    tokens = open_file(raw(tmp_path / "tokens.bin", np.arange(100))).tokens
    base = tokens
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap) and not tokens.flags.writeable


def test_folder_with_train_and_val(open_source: Open, tmp_path: Path) -> None:
    raw(tmp_path / "train.bin", np.arange(100))
    raw(tmp_path / "val.bin", np.arange(100, 150))
    corpus = open_source(f"bin:{tmp_path}", vocab=200)
    assert (len(corpus.train), len(corpus.val)) == (12, 6)
    assert corpus.val.fetch(np.array([0]))[0][0, 0] == 100


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_pair_by_any_of_its_names(open_source: Open, tmp_path: Path, code: int, dtype: str) -> None:
    documents = [np.arange(20), np.arange(20, 27), np.arange(27, 100)]
    file = megatron(tmp_path / "my_text_document.bin", documents, code, dtype)
    assert open_file(file).documents == 3
    for name in (file, file.with_suffix(".idx"), file.with_suffix("")):
        corpus = open_source(f"bin:{name}", vocab=100, val_fraction=0.0)
        inputs, _ = corpus.train.fetch(np.arange(len(corpus.train)))
        assert inputs.reshape(-1).tolist() == list(range(96))


def test_mistakes_with_the_index(tmp_path: Path) -> None:
    def pair(name: str, edit: Callable[[bytes], bytes]) -> Path:
        file = megatron(tmp_path / name, [np.arange(20)], 8, "<u2")
        index = file.with_suffix(".idx")
        index.write_bytes(edit(index.read_bytes()))
        return file

    cases = {
        "magic.bin": (lambda b: b"TNTIDX" + b[6:], "not an index"),
        "short.bin": (lambda b: b[:20], "not an index"),
        "version.bin": (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2"),
        "float.bin": (lambda b: b[:17] + b"\x07" + b[18:], "type code 7"),
        "cut.bin": (lambda b: b[:-9], "ends before"),
        "size.bin": (lambda b: b[:34] + struct.pack("<i", 19) + b[38:], "names 38 bytes"),
    }
    for name, (edit, message) in cases.items():
        file = pair(name, edit)
        assert message in refused("D13", lambda file=file: open_file(file)).what


def test_the_vocabulary_is_required_and_kept(open_source: Open, tmp_path: Path) -> None:
    tokens = np.arange(100)
    tokens[43] = 60000
    file = raw(tmp_path / "tokens.bin", tokens)
    assert "60001" in refused("D08", lambda: open_source(f"bin:{file}")).fix
    assert "token 60000 at position 43" in refused("D09", lambda: open_source(f"bin:{file}", vocab=100)).what
    assert open_source(f"bin:{file}", vocab=70000).train.fetch(np.array([5]))[0].max() == 60000


def test_a_bad_token_past_the_first_check_is_found_when_read(
    open_source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.train.data.binary._SCANNED", 8)
    tokens = np.zeros(100, dtype=np.int64)
    tokens[48] = 999
    corpus = open_source(f"bin:{raw(tmp_path / 'tokens.bin', tokens)}", vocab=100)
    corpus.train.fetch(np.array([0, 1, 2, 3, 4, 7]))
    assert "position 48" in refused("D09", lambda: corpus.train.fetch(np.array([1, 6]))).what
    assert "position 48" in refused("D09", lambda: corpus.train.fetch(np.array([5]))).what  # as a target
    feed = Permuted(corpus.train, 0, 11, 11)
    refused("D09", lambda: feed.fetch(0, range(1)))


def test_negative_tokens_are_refused(open_source: Open, tmp_path: Path) -> None:
    file = megatron(tmp_path / "signed.bin", [np.array([1, 2, -3] * 10)], 4, "<i4")
    assert "token -3 at position 2" in refused("D09", lambda: open_source(f"bin:{file}", vocab=10)).what


def test_mistakes_with_files(open_source: Open, tmp_path: Path) -> None:
    odd, empty = tmp_path / "odd.bin", tmp_path / "empty.bin"
    odd.write_bytes(b"abc")
    empty.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "3 bytes" in refused("D07", lambda: open_source(f"bin:{odd}", vocab=10)).what
    refused("D04", lambda: open_source(f"bin:{empty}", vocab=10))
    refused("D02", lambda: open_source(f"bin:{tmp_path / 'gone.bin'}", vocab=10))
    assert "no .bin file" in refused("D02", lambda: open_source(f"bin:{folder}", vocab=10)).likely
    raw(folder / "shard_0.bin", np.zeros(100))
    assert "shard_0.bin" in refused("D02", lambda: open_source(f"bin:{folder}", vocab=10)).fix
    refused("D05", lambda: open_source(f"bin:{folder / 'shard_0.bin'}", vocab=10, context=200))
    refused("D11", lambda: open_source(f"bin:{folder / 'shard_0.bin'}", vocab=10, tokenizer="char"))
