"""Whatever stands in a record, it is a document or is named by its place; and what is not read of it is told."""

import io
import json
import os
from pathlib import Path

import pytest

from tests.train.data.chats import TEMPLATE, chat, tokenizer
from tests.train.data.tokenised.odd_records import ODD, Odd, made, observed
from tests.train.data.tokenised.test_build import lines, read
from unisono.train.data.tokenised.chats import KeysRead, counted, written
from unisono.train.data.tokenised.cutters import Encoded
from unisono.train.data.tokenised.order import JSONL, Part, TokenOrder
from unisono.train.data.tokenised.worker import Maker, main

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("one", ODD, ids=lambda one: one.name)
def test_a_record_is_a_document_or_is_named(one: Odd, tmp_path: Path) -> None:
    assert observed(one, tmp_path)[1] == []


def test_a_process_that_reads_names_it_as_well(tmp_path: Path) -> None:
    """Two records that once ended the process, and the line of what is not read."""
    pytest.importorskip("tokenizers")
    rows = [chat("to be", "it is") | {"id": n} for n in range(3)]
    file = lines(tmp_path / "a.jsonl", *rows, '{"text": "cut \\ud83d here"}', "[" * 200_000, {"text": "be"})
    order = TokenOrder(JSONL, tokenizer(tmp_path / "tok", ""), skip_bad=True)
    found = read(order, file, cache=tmp_path / "cache")
    assert (found.left_out, len(found.ends)) == (2, 4)
    over = "a token begins before an answer and ends in it: it counts"  # the blank before "it"
    assert found.notes == tuple(
        f"{what}: 3 records, the first {file}:1" for what in ("key id is not read", over)
    )
    assert read(order, file, cache=tmp_path / "cache").notes == found.notes  # from the cache, too


@pytest.mark.parametrize(
    ("starts", "ends", "answers", "marks", "over"),
    [
        ([0, 1, 3], [1, 3, 4], [(2, 4)], [0, 1, 1], True),  # one reaches over the beginning
        ([0, 1, 2], [1, 2, 4], [(1, 3)], [0, 1, 1], False),  # one reaches over the end
        ([0, 1, 2, 3], [1, 2, 3, 4], [(1, 2), (3, 4)], [0, 1, 0, 1], False),
        ([0, 3], [3, 6], [(1, 2), (4, 5)], [1, 1], True),
        ([0, 0, 2, 0], [0, 2, 4, 0], [(2, 4)], [0, 0, 1, 0], False),  # what the tokenizer puts around it
        ([1, 1, 2], [1, 1, 3], [(1, 3)], [1, 1, 1], False),  # blanks that it trims
    ],
)
def test_a_token_with_a_letter_of_an_answer_counts(starts, ends, answers, marks, over) -> None:
    from array import array

    found = counted(Encoded(array("H", [7] * len(starts)), starts, ends), answers)
    assert (list(found[0]), found[1]) == (marks, over)


@pytest.mark.parametrize(("prompt", "completion"), [("Q\n", "\nA"), ("2 + 2 =", " 4"), ("\n\n", "\n\nb")])
def test_a_token_over_the_beginning_of_an_answer_counts_and_is_told(prompt, completion, tmp_path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    merges = [("\n", "\n"), ("\n\n", "\n\n"), ("=", " ")]
    letters = sorted({*"Q\nA2 +=4b"} | {a + b for a, b in merges})
    model = tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, merges)
    whole = tokenizers.Tokenizer(model)
    whole.add_special_tokens(["<|endoftext|>"])
    whole.save(str(tmp_path / "tokenizer.json"))
    row = {"prompt": prompt, "completion": completion}
    found = made(
        tmp_path, lines(tmp_path / "b", row, row).read_bytes(), skip_bad=False, tokenizer=f"hf:{tmp_path}"
    )
    marks = (tmp_path / "out.marks").read_bytes()
    count = len(whole.encode(prompt + completion).ids) + 1
    before = sum(end <= len(prompt) for _, end in whole.encode(prompt + completion).offsets)
    assert list(marks[:count]) == [0] * before + [1] * (count - before)
    assert found["told"] == {"a token begins before an answer and ends in it: it counts": [2, 0]}


def test_an_answer_of_weight_0_is_read_and_not_learnt() -> None:
    def write(messages, begun, tools=None) -> str:
        return "".join(f"<{one['content']}>" for one in messages) + "<" * begun

    talk = [{"role": "assistant", "content": c, "weight": n} for c, n in (("a", 0), ("b", 1), ("c", None))]
    found = written(talk, write)
    assert [found.text[first:end] for first, end in found.answers or ()] == ["b>", "c>"]


def test_a_template_is_given_the_tools_and_what_it_reads_is_not_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reads = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['name'] }}{{ m['content'] }}"
    )
    rows = [chat("to be", "it is") | {"tools": [{"name": "or"}], "meta": 1} for _ in range(2)]
    for row in rows:
        row["messages"][0] |= {"name": "not", "mood": "good"}
    body = lines(tmp_path / "a.jsonl", *rows).read_bytes()
    found = made(tmp_path, body, skip_bad=False, tokenizer=tokenizer(tmp_path / "tok", reads))
    assert found["told"] == {"key mood of messages is not read": [2, 0], "key meta is not read": [2, 0]}
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    want = theirs.encode("[or]<|user|>notto be<|end|><|assistant|>it is<|end|>").ids
    assert found["tokens"] == 2 * len(want)
    without = made(tmp_path, body, skip_bad=False, tokenizer=tokenizer(tmp_path / "tok"))
    assert {"key tools is not read", "key name of messages is not read"} < set(without["told"])  # type: ignore[call-overload]


def test_a_key_that_changes_nothing_is_asked_about_a_few_times_alone() -> None:
    calls: list[int] = []

    def write(messages, begun, tools=None) -> str:
        calls.append(1)
        return "x"

    keys, talk = KeysRead(write), [{"role": "user", "content": "a", "mood": "good"}]
    assert all(keys.ignored(talk, None, True) == ["mood of messages"] for _ in range(100))
    assert len(calls) == 16


def test_a_text_that_the_tokenizer_takes_not_is_left_out_alone(tmp_path: Path) -> None:
    """Whatever it raises: a panic of a library in another language is no Exception."""

    class Panic(BaseException):
        """As such a library raises it."""

    body = lines(tmp_path / "b", {"text": "one"}, {"text": "odd"}, {"text": "two"}).read_bytes()
    (tmp_path / "a.jsonl").write_bytes(body)
    maker = Maker(TokenOrder(JSONL, "byte", skip_bad=True), io.StringIO())
    cut = maker.encode

    def encode(texts, starts, special):
        if "odd" in texts:
            raise Panic("no such letter")
        return cut(texts, starts, special)

    maker.encode = encode
    answer = maker.make(Part(str(tmp_path / "a.jsonl"), 0, len(body), len(body)), str(tmp_path / "out"))
    assert (tmp_path / "out.tokens").read_bytes() == b"one\0two\0"
    assert answer["bad"] == [(len(b'{"text": "one"}\n'), "the tokenizer takes it not: Panic: no such letter")]


def test_whatever_a_library_raises_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def torn(*_: object) -> None:
        raise TypeError("odd bytes")

    monkeypatch.setattr(Maker, "make", torn)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    order = {
        "order": TokenOrder(JSONL, "byte").as_json(),
        "part": ["a.jsonl", 0, 9, 9],
        "out": str(tmp_path / "o"),
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order) + "\n"))
    monkeypatch.setattr("sys.stdout", answers := io.StringIO())
    main()
    error = json.loads(answers.getvalue())["error"]
    assert (error["code"], error["where"]) == ("D16", "a.jsonl") and "TypeError: odd bytes" in error["what"]


def test_rows_of_a_broken_table_are_named(tmp_path: Path) -> None:
    """From the page that is damaged on; those before it stay."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from unisono.train.data.tokenised.chats import BadRecord
    from unisono.train.data.tokenised.order import Fields
    from unisono.train.data.tokenised.records import parquet_records

    file = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n} " * 50 for n in range(100)], "other": range(100)})
    pq.write_table(table, file, row_group_size=50, compression="gzip", use_dictionary=False)
    body = bytearray(file.read_bytes())
    at = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    body[at : at + 200] = b"\xff" * 200
    file.write_bytes(body)
    rows = list(parquet_records(Part(str(file), 1, 2, 0), Fields()))
    assert [row for row, _ in rows] == list(range(50, 100))
    assert isinstance(rows[-1][1], BadRecord) and "cannot be read from here on" in str(rows[-1][1])
    good = list(parquet_records(Part(str(file), 0, 1, 0), Fields()))
    assert good[0] == (0, {"text": "text 0 " * 50, "other": True})
