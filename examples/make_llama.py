"""A folder of a small Llama, such as `transformers` writes them, with nothing to download: config.json, a tokenizer in
which a byte is a token, and a chat template. It holds no weights, so a run draws them.

python examples/make_llama.py            # llama/
python examples/make_llama.py mixtral    # mixtral/
"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 264, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
MARKS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes, then the marks of a chat."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    words.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    words.add_special_tokens(MARKS)
    longest = SIZES["max_position_embeddings"]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=MARKS[0], pad_token=MARKS[0], chat_template=CHAT, model_max_length=longest
    )  # fmt: skip


def main(family: str = "llama") -> None:
    words = tokenizer()
    end = words.eos_token_id
    config = AutoConfig.for_model(family, **SIZES, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    config.save_pretrained(family)
    words.save_pretrained(family)
    print(f"{family}/: config.json, a tokenizer of {len(words)} tokens, a chat template")


if __name__ == "__main__":
    main(*sys.argv[1:])
