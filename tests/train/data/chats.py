"""Small files of chats and a small tokenizer, made for tests."""

import json
import random
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(asked: str, told: str) -> dict[str, Any]:
    """One question, one answer."""
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}


def chats(path: Path, count: int, seed: int = 0) -> str:
    """Chats whose answers have unequal lengths, as `jsonl:PATH`."""
    draw = random.Random(seed)
    rows = [chat("w" * draw.randint(1, 5), "it " * draw.randint(1, 6)) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """A BPE of bytes in a folder, as `hf:FOLDER`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = ByteLevel()  # type: ignore[assignment]
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["to be or not to be, it is it"] * 9, trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return f"hf:{folder}"
