"""Writes a small file of chats, sums in words and numbers, to try fine-tuning with:

python examples/make_chats.py chats.jsonl
"""

import json
import random
import sys
from pathlib import Path


def chats(count: int = 2000, seed: int = 0) -> list[dict]:
    """Questions about sums and their answers, one or two a chat."""
    draw = random.Random(seed)

    def turn() -> list[dict]:
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        answer = (
            f"{a + b}"
            if draw.random() < 0.5
            else f"{a} + {b} = {a + b}, which is {'odd' if (a + b) % 2 else 'even'}."
        )
        return [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": answer}]

    return [{"messages": turn() + (turn() if draw.random() < 0.3 else [])} for _ in range(count)]


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else "chats.jsonl"
    Path(out).write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
