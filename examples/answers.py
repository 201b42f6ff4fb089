"""An evaluation of one's own: how many answers of the model are right, word for word.

unisono train examples/chats.toml --train.evaluate examples/answers.py:exact
"""

import random


def exact(model) -> dict[str, float]:
    """Asks for twenty sums, and reads the likeliest tokens of each answer until the line ends.

    Every rank calls this with the same questions, and each gets all outputs.
    """
    import torch

    draw, right = random.Random(1), 0
    sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(20)]
    texts = [model.encode(f"user: What is {a} + {b}?\nassistant: ") for a, b in sums]
    answers = [""] * len(texts)
    for _ in range(8):
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        last = torch.tensor([len(text) - 1 for text in texts])
        for row, token in enumerate(model(tokens, at=last).argmax(-1).tolist()):
            texts[row].append(token)
            answers[row] += model.decode([token])
    for (a, b), answer in zip(sums, answers, strict=True):
        right += answer.split("\n")[0] == str(a + b)
    return {"exact": right / len(sums)}


if __name__ == "__main__":
    print(__doc__)
