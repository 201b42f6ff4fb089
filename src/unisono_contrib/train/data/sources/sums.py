"""Sums of two numbers, `3+5=8`: a task whose answers can be checked, and that needs no file."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus

LETTERS = "\n+0123456789="


class Sums(DataSource):
    """All sums of two numbers of so many digits at most, in a mixed order. What counts is the answer and the end of the
    line. With `pairs`, each is followed by a wrong answer to the same sum."""

    name: ClassVar[str] = "sums"
    main: ClassVar[str] = "digits"
    gives: ClassVar[str] = "tokens"
    worded: ClassVar[bool] = True

    digits: Annotated[int, Field(ge=1, le=3)] = Field(default=1, description="of each number at most")
    pairs: bool = Field(default=False, description="a right answer, then a wrong one, for DPO")

    def facts(self, tokenizer: str) -> Facts:
        return Facts(vocab=len(LETTERS) if tokenizer == "char" else super().facts(tokenizer).vocab)

    def texts(self) -> list[tuple[str, str]]:
        """(prompt, answer) of each document."""
        import numpy as np

        from unisono.train.data.order import mix, sample_ids

        count = 10**self.digits
        mixed = sample_ids(0, 0, count * count, count * count)
        texts = list[tuple[str, str]]()
        wrong = mix(mixed.astype(np.uint64)) % np.uint64(2 * count - 2)
        for number, off in zip(mixed.tolist(), wrong.tolist(), strict=True):
            a, b = divmod(number, count)
            texts.append((f"{a}+{b}=", f"{a + b}\n"))
            if self.pairs:  # any other result that two such numbers can have
                texts.append((f"{a}+{b}=", f"{(a + b + 1 + off) % (2 * count - 1)}\n"))
        return texts

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        import numpy as np

        from unisono.train.data.dataset import Corpus, require_samples
        from unisono.train.data.load import check_vocab, fingerprint
        from unisono.train.data.packing import PackedWindows
        from unisono.train.data.texts import packing_of, text_of

        if data.tokenizer not in ("byte", "char"):
            what = f"sums are written in bytes or characters, not by {data.tokenizer}"
            raise UsageError(
                what, where="data.tokenizer", fix='data.tokenizer = "byte" or "char"', code="D11"
            )
        vocab = self.facts(data.tokenizer).vocab or 0
        encode = text_of(data.tokenizer, np.zeros(0, np.uint8), vocab, LETTERS).encode
        texts = self.texts()
        tokens = np.array(encode("".join(f"{prompt}{answer}" for prompt, answer in texts)), dtype=np.uint8)
        sizes = np.array([(len(prompt), len(answer)) for prompt, answer in texts], dtype=np.int64)
        marks = np.repeat(np.tile(np.array([0, 1], np.uint8), len(texts)), sizes.reshape(-1))
        check_vocab(model, vocab)
        several = packing_of(data, model, True) == "documents"
        each, ends = 1 + self.pairs, np.cumsum(sizes.sum(1))
        cut = len(texts) - int(len(texts) // each * data.val_fraction) * each
        parts = [
            PackedWindows.of(tokens, ends, marks, model.window, several, span)[0]
            for span in (range(cut), range(cut, len(texts)))
        ]
        require_samples(len(parts[0]), 1, self.name, "a smaller data.val_fraction")
        text = text_of(data.tokenizer, tokens, vocab, LETTERS)
        return Corpus(
            train=parts[0],
            val=parts[1],
            vocab=vocab,
            classes=vocab,
            sample_shape=(model.window,),
            decode=text.decode,
            encode=text.encode,
            fingerprint=fingerprint(tokens, ends),
            origin=self.name,
        )
