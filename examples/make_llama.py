"""A folder with the config.json of a small Llama, such as `transformers` writes: there is nothing to download.

python examples/make_llama.py            # llama/config.json
python examples/make_llama.py mixtral    # mixtral/config.json
"""

import sys
from pathlib import Path

from transformers import AutoConfig

SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


def main(family: str = "llama") -> None:
    AutoConfig.for_model(family, **SIZES).save_pretrained(Path(family))
    print(f"{family}/config.json")


main(*sys.argv[1:])
