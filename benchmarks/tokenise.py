"""How fast text becomes tokens in the cache, beside what the tokenizer's own library does with as many processes.

    python benchmarks/tokenise.py --mb 100 --workers 2 --rounds 2

The text is the running Python's library, over and over, a file of it a record of JSON lines. The tokenizer is a BPE of
8192 tokens, trained on some of it. The library's time is of `encode_batch_fast` alone, in processes that have the
texts in memory and do nothing with the tokens; ours is of all: processes started, files read, JSON parsed, tokens
written and joined. Rounds alternate, and the best of each counts. The last line is the ratio of the rates.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.train.data.documents import stdlib
from unisono.train.data.tokenised.build import tokenised
from unisono.train.data.tokenised.order import JSONL, TokenOrder

_BATCH = 1 << 18  # characters


def texts(megabytes: float) -> list[str]:
    """Documents of about so many bytes together."""
    found: list[str] = []
    left, some = megabytes * 1e6, [body.decode("utf-8", "replace") for _, body in stdlib()]
    while left > 0:
        for text in some:
            found.append(text)
            left -= len(text.encode())
            if left <= 0:
                break
    return found


def trained(folder: Path, sample: list[str]) -> Path:
    """A small BPE tokenizer, saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sample, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder


def _batches(documents: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _encode(file: str, documents: list[str], begin: Any, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(file)
    begin.wait()
    began, worked = time.perf_counter(), time.process_time()
    tokens = sum(len(one) for batch in _batches(documents) for one in made.encode_batch_fast(batch))
    out.put((time.perf_counter() - began, time.process_time() - worked, tokens))


def library(folder: Path, documents: list[str], workers: int) -> tuple[float, float, int]:
    """(seconds of the slowest process, of all processors, tokens) of the library alone."""
    context = multiprocessing.get_context("fork")
    begin, out = context.Barrier(workers), context.Queue()
    parts = [documents[i::workers] for i in range(workers)]
    each = [
        context.Process(target=_encode, args=(str(folder / "tokenizer.json"), part, begin, out))
        for part in parts
    ]
    for process in each:
        process.start()
    told = [out.get() for _ in each]
    for process in each:
        process.join()
    return max(one[0] for one in told), sum(one[1] for one in told), sum(one[2] for one in told)


def worked() -> float:
    """Seconds of processors that this process and those that it has ended took."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes of text")
    parser.add_argument("--workers", type=int, default=2, help="processes of each side")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, of which the best counts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, documents = Path(name), texts(given.mb)
        file, size = folder / "text.jsonl", sum(len(text.encode()) for text in documents)
        with file.open("w") as out:
            for text in documents:
                out.write(json.dumps({"text": text}) + "\n")
        trained(folder, documents[:300])
        order = TokenOrder(JSONL, f"hf:{folder}")
        theirs, ours = [], []
        for i in range(given.rounds):
            *seconds, tokens = library(folder, documents, given.workers)
            theirs.append(seconds)
            began, before = time.perf_counter(), worked()
            made = tokenised(
                order, [str(file)], str(folder / f"cache{i}"), given.workers, say=lambda text: None
            )
            ours.append([time.perf_counter() - began, worked() - before])
            assert len(made.tokens) == tokens + len(made.ends), "the tokens are others"
            for whose, (wall, busy) in (("library", theirs[-1]), ("ours", ours[-1])):
                print(f"round {i + 1}, {whose}: {wall:.2f} s, {busy:.2f} s of processors", flush=True)
        wall, busy = ([min(one[k] for one in side) for side in (theirs, ours)] for k in (0, 1))
        rates = [size / seconds / 1e6 for seconds in wall]
        print(
            f"{size / 1e6:.0f} MB, {given.workers} processes: library {rates[0]:.2f} MB/s, ours {rates[1]:.2f} MB/s"
        )
        print(f"ratio of processors' seconds {busy[0] / busy[1]:.3f}, whatever else is running")
        print(f"ratio {rates[1] / rates[0]:.3f}")


if __name__ == "__main__":
    main()
