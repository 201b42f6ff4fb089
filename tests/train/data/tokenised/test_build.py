"""Records become tokens once, by any number of workers, and what is wrong is told by its place."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.train.data.chats import chat, chats, tokenizer
from unisono.spec.errors import UsageError
from unisono.train.data.tokenised import build
from unisono.train.data.tokenised.build import Tokens, tokenised
from unisono.train.data.tokenised.order import DATASET, JSONL, PARQUET, PLAIN, Fields, TokenOrder

pytestmark = pytest.mark.timeout(120)


def silent(text: str) -> None:
    """Nothing is said."""


def documents(made: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(made.tokens, made.ends)[:-1]]


def read(order: TokenOrder, *places: Path, cache: Path, workers: int = 1) -> Tokens:
    return tokenised(order, list(map(str, places)), str(cache), workers, silent)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refused(code: str, work: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        work()
    assert caught.value.code == code, caught.value.render()
    return caught.value


def test_any_number_of_workers_makes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_PART", 1 << 10)
    chats(tmp_path / "a.jsonl", 100)
    one, three = (
        read(TokenOrder(JSONL, "byte"), tmp_path / "a.jsonl", cache=tmp_path / f"cache{n}", workers=n)
        for n in (1, 3)
    )
    assert np.array_equal(one.tokens, three.tokens) and np.array_equal(one.ends, three.ends)
    assert one.marks is not None and three.marks is not None and np.array_equal(one.marks, three.marks)
    assert len(one.ends) == 100
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["messages"]
    text = f"user: {first[0]['content']}\nassistant: {first[1]['content']}\n"
    assert bytes(documents(one)[0]).decode() == text + "\0"
    marked = bytes(np.asarray(one.tokens[: one.ends[0]])[one.marks[: one.ends[0]] > 0].tolist())
    assert marked.decode() == first[1]["content"] + "\n\0"


def test_it_is_done_once_and_again_when_something_changed(tmp_path: Path):
    file, order = lines(tmp_path / "a.jsonl", {"text": "one"}), TokenOrder(JSONL, "byte")
    folder = read(order, file, cache=tmp_path / "cache").folder
    made = folder.stat().st_mtime_ns
    assert read(order, file, cache=tmp_path / "cache").folder == folder and folder.stat().st_mtime_ns == made
    assert read(TokenOrder(JSONL, "char"), file, cache=tmp_path / "cache").folder != folder
    lines(file, {"text": "two"})
    again = read(order, file, cache=tmp_path / "cache")
    assert again.folder != folder and bytes(again.tokens) == b"two\0"


def test_two_at_once_make_it_once(tmp_path: Path):
    chats(tmp_path / "a.jsonl", 50)
    said: list[str] = []

    def one() -> None:
        tokenised(
            TokenOrder(JSONL, "byte"), [str(tmp_path / "a.jsonl")], str(tmp_path / "cache"), 1, said.append
        )

    both = [threading.Thread(target=one) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 1 and sum(text.endswith("s\n") for text in said) == 1


def test_a_bad_record_is_named_by_its_line(tmp_path: Path):
    file = lines(tmp_path / "a.jsonl", {"text": "good"}, "", {"words": "bad"}, "{no json", {"text": "good"})
    order = TokenOrder(JSONL, "byte")
    error = refused("D14", lambda: read(order, file, cache=tmp_path / "cache"))
    assert error.where == f"{file}:3" and "its keys: words" in error.what
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    told: list[str] = []
    made = tokenised(
        TokenOrder(JSONL, "byte", skip_bad=True), [str(file)], str(tmp_path / "cache"), 1, told.append
    )
    assert made.left_out == 2 and bytes(made.tokens) == b"good\0good\0"
    assert f"left out {file}:4: no JSON" in "".join(told)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": []}, "an empty one"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of message 1 is no text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "by the assistant"),
        ([1], "an object with keys is wanted"),
    ],
)
def test_bad_chats(tmp_path: Path, record: object, why: str):
    file = lines(tmp_path / "a.jsonl", record)
    assert why in refused("D14", lambda: read(TokenOrder(JSONL, "byte"), file, cache=tmp_path)).what


def test_a_prompt_is_read_and_its_completion_learnt(tmp_path: Path):
    file = lines(tmp_path / "a.jsonl", {"question": "2+2=", "answer": "4é"})
    made = read(
        TokenOrder(JSONL, "byte", Fields(prompt="question", completion="answer")), file, cache=tmp_path
    )
    assert bytes(made.tokens).decode() == "2+2=4é\0"
    assert made.marks is not None and made.marks.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    whole = read(
        TokenOrder(JSONL, "byte", Fields(prompt="question", completion="answer"), answers=False),
        file,
        cache=tmp_path,
    )
    assert whole.marks is None


def test_characters_are_numbered_when_all_are_known(tmp_path: Path):
    made = read(
        TokenOrder(JSONL, "char"),
        lines(tmp_path / "a.jsonl", {"text": "bé"}, {"text": "a😀"}),
        cache=tmp_path,
    )
    assert made.letters == "\0abé😀" and documents(made) == [[2, 3, 0], [1, 4, 0]]


def test_plain_files_are_one_document_each(tmp_path: Path):
    pytest.importorskip("tokenizers")
    name = tokenizer(tmp_path / "tok")
    long = tmp_path / "long.txt"
    long.write_text("to be or not\n\n  to be\n" * 60_000)
    (tmp_path / "short.txt").write_text("it is")
    made = read(TokenOrder(PLAIN, name), long, tmp_path / "short.txt", cache=tmp_path / "cache")
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    end = theirs.token_to_id("<|endoftext|>")
    assert documents(made) == [
        [*theirs.encode(p.read_text()).ids, end] for p in (long, tmp_path / "short.txt")
    ]
    (tmp_path / "short.txt").write_bytes(b"a\xff")
    assert (
        "UTF-8"
        in refused("D06", lambda: read(TokenOrder(PLAIN, name), tmp_path / "short.txt", cache=tmp_path)).what
    )


def test_a_folders_template_writes_its_chats(tmp_path: Path):
    pytest.importorskip("transformers")
    name = tokenizer(tmp_path / "tok")
    talk = chat("be", "it is")
    talk["messages"] += chat("or", "not")["messages"]
    file = lines(tmp_path / "a.jsonl", talk)
    made = read(TokenOrder(JSONL, name), file, cache=tmp_path / "cache")
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    text = "<|user|>be<|end|><|assistant|>it is<|end|><|user|>or<|end|><|assistant|>not<|end|>"
    assert documents(made) == [theirs.encode(text).ids] and made.marks is not None
    learnt = np.asarray(made.tokens)[made.marks > 0].tolist()
    assert theirs.decode(learnt, skip_special_tokens=False) == "it is<|end|>not<|end|>"


@pytest.mark.slow
def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path):
    pytest.importorskip("transformers")
    odd = "{% for m in messages %}{{ m['content'] if loop.last or m['role'] == 'user' else '-' }}{% endfor %}"
    name = tokenizer(tmp_path / "tok", odd)
    talk = {"messages": chat("a", "b")["messages"] * 2}
    error = refused(
        "D14", lambda: read(TokenOrder(JSONL, name), lines(tmp_path / "a.jsonl", talk), cache=tmp_path)
    )
    assert "writes earlier turns in another way" in error.what


@pytest.mark.slow
def test_tables_and_data_sets_are_read_alike(tmp_path: Path):
    pa, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    import pyarrow.parquet as pq

    rows = [chat("a" * n, "b" * n) | {"other": n} for n in range(1, 8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    want = read(TokenOrder(JSONL, "byte"), lines(tmp_path / "a.jsonl", *rows), cache=tmp_path / "cache")
    for kind, place in ((PARQUET, tmp_path / "a.parquet"), (DATASET, tmp_path / "saved")):
        made = read(TokenOrder(kind, "byte"), place, cache=tmp_path / "cache", workers=2)
        assert made.marks is not None and want.marks is not None
        assert np.array_equal(made.tokens, want.tokens) and np.array_equal(made.marks, want.marks), kind
    refused("D02", lambda: read(TokenOrder(DATASET, "byte"), tmp_path / "nowhere", cache=tmp_path))
    (tmp_path / "b.parquet").write_text("no table")
    refused("D06", lambda: read(TokenOrder(PARQUET, "byte"), tmp_path / "b.parquet", cache=tmp_path))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path):
    file = lines(tmp_path / "a.jsonl", {"text": "x"})
    (tmp_path / "taken").write_text("")
    error = refused("D15", lambda: read(TokenOrder(JSONL, "byte"), file, cache=tmp_path / "taken" / "cache"))
    assert "data.cache" in error.fix


@pytest.mark.parametrize("cache", ["/proc/nohome/cache", "taken", "taken/cache", "/dev/full/x", "a" * 300])
def test_whatever_refuses_the_cache_it_is_the_cache_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
):
    file = lines(tmp_path / "a.jsonl", {"text": "x"})
    (tmp_path / "taken").write_text("")
    monkeypatch.chdir(tmp_path)
    error = refused("D15", lambda: read(TokenOrder(JSONL, "byte"), file, cache=Path(cache)))
    assert error.where == cache and "data.cache" in error.fix


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk here")
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = lines(tmp_path / "a.jsonl", {"text": "x" * 100_000})
    inner = build.Part

    def full(*given: object) -> object:  # the first part's tokens go where nothing fits
        (out,) = (tmp_path / "cache").glob("*.tmp-*")
        (out / "0.tokens").symlink_to("/dev/full")
        return inner(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "Part", full)
    error = refused("D15", lambda: read(TokenOrder(JSONL, "byte"), file, cache=tmp_path / "cache"))
    assert "No space left" in error.what
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_worker_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_WORKER", "no.such.module")
    file = lines(tmp_path / "a.jsonl", {"text": "x"})
    assert refused("D16", lambda: read(TokenOrder(JSONL, "byte"), file, cache=tmp_path)).where == str(file)


def test_mistakes_with_tokenizers(tmp_path: Path):
    file = lines(tmp_path / "a.jsonl", {"text": "x"})
    assert (
        "no tokenizer.json"
        in refused("D11", lambda: read(TokenOrder(JSONL, f"hf:{tmp_path}"), file, cache=tmp_path)).what
    )
    refused("D11", lambda: read(TokenOrder(JSONL, "hf:gpt2"), file, cache=tmp_path))
    pytest.importorskip("tokenizers")
    name = tokenizer(tmp_path / "tok")
    error = refused("D11", lambda: read(TokenOrder(JSONL, name, separator="<none>"), file, cache=tmp_path))
    assert "<none>" in error.what
