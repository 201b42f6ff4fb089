"""Token files of others: raw uint16 as nanoGPT writes, and Megatron's .bin beside its .idx."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.paths import at_home
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class TokenFiles(DataSource):
    """Tokens that were made before (uint16, or as an index says), memory-mapped."""

    name: ClassVar[str] = "bin"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True
    gives: ClassVar[str] = "tokens"

    path: str = Field(min_length=1, description="a token file, or a folder with train.bin and val.bin")

    def look(self) -> None:
        from unisono.train.data import documents

        path = at_home(self.path)
        whole = path.with_name(path.name + ".bin")  # Megatron names the pair without suffix
        documents.look(str(whole) if whole.exists() and not path.exists() else self.path)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data import binary
        from unisono.train.data.load import corpus_of

        if data.tokenizer != "byte":  # the default; anything else was written by hand and would be ignored
            raise UsageError(
                f"a token file needs no tokenizer, and {data.tokenizer!r} is given",
                code="D11",
                where="data.tokenizer",
                fix="leave data.tokenizer out",
            )
        file, held_out = binary.open_tokens(self.path)
        vocab = model.sized(Facts()).vocab
        if vocab is None:
            raise UsageError(
                "a token file does not say how large its vocabulary is",
                code="D08",
                where="model.vocab",
                fix=f"model.vocab = {max(int(file.tokens[: 1 << 22].max()) + 1, 1)} or more (GPT-2: 50257)",
            )
        for part in (file, held_out):
            if part is not None:
                binary.check_tokens(part, vocab)
        cut = len(file.tokens)
        if held_out is None:
            cut -= int(cut * data.val_fraction)
        others = None if held_out is None else (held_out.tokens, str(held_out.path))
        return corpus_of(file.tokens, cut, str(file.path), model, vocab, others=others, mapped=True)
