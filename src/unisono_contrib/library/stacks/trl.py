"""TRL's SFTTrainer, and with `wrap` any of its Trainers. options: SFTConfig.

`batch` returns a list of examples, mappings with `input_ids` and what else the collator reads, such as
`completion_mask`; `loss` is the user's formula over such a list.
"""

from typing import Any

from unisono_contrib.library.stacks._step import numbers_of
from unisono_contrib.library.stacks.transformers import Transformers, in_order


class Trl(Transformers):
    """Examples of ids, without a tokenizer: `place.batches` is the list of all. `packing` would hand them out in
    another order, so that steps are others than those of one device; `padding_free` keeps it."""

    library = extra = "trl"
    draws = None

    def rows(self) -> list[Any]:
        place = self.place
        return [x for n in numbers_of(0, place.groups, place.micros * self.steps) for x in self.step.batch(n)]

    def habits(self) -> dict[str, Any]:
        # Autocast to bfloat16 is SFTConfig's default, and hides mistakes of a percent.
        return {
            "completion_only_loss": "completion_mask" in self.place.batches[0],
            "bf16": False,
            "max_length": None,
        }

    def wrapped(self) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

        return in_order(SFTTrainer)(
            model=self.bare, args=self.arguments(SFTConfig), train_dataset=Dataset.from_list(list(self.place.batches)),
            processing_class=tokenizer(), optimizers=self.optimizers(),
        )  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer of nothing but a padding token, which is what a Trainer asks of it for ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
