"""What `unisono train` computes, beside a loop of plain PyTorch that a reader can check line by line: a GPT-2 of
functions, its own windows, schedule, clipping and optimiser. Of ours it takes the initial weights and the order."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.data.order import sample_ids
from unisono.train.state.run_state import pieces_of
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, STEPS = 2, 2, 16, 8, 4, 5
LR, WARMUP, DECAY, CLIP, BETAS, EPS = 1e-2, 2, 0.1, 0.5, (0.9, 0.95), 1e-8
TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "


def net(w, tokens):
    """Logits of GPT-2 (pre-norm, exact gelu, learned positions, tied embeddings)."""
    x = w["stem.tok.weight"][tokens] + w["stem.pos.weight"]
    for n in range(LAYERS):

        def linear(name, y, at=f"blocks.{n}."):
            return y @ w[f"{at}{name}.weight"].T + w[f"{at}{name}.bias"]

        def norm(name, y, at=f"blocks.{n}."):
            return F.layer_norm(y, (WIDTH,), w[f"{at}{name}.weight"], w[f"{at}{name}.bias"])

        cut = (len(tokens), CONTEXT, HEADS, 3, WIDTH // HEADS)  # a head's query, key and value lie together
        q, k, v = linear("attn.qkv", norm("norm1", x)).view(cut).permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        hidden = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + linear("attn.proj", seen.transpose(1, 2).reshape(x.shape))
        x = x + linear("mlp.down", F.gelu(linear("mlp.up", norm("norm2", x))))
    x = F.layer_norm(x, (WIDTH,), w["head.norm.weight"], w["head.norm.bias"])
    return x @ w["stem.tok.weight"].T


def mean_loss(w, windows):
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return F.cross_entropy(net(w, inputs).flatten(0, 1), targets.flatten())


def rate(step):
    """A line up to LR, then half a cosine to a tenth of it in the last step."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return LR * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def windows_of(tokens):
    count = (len(tokens) - 1) // CONTEXT
    return torch.stack([tokens[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])


def plain(w, tokens, held_out, seed):
    """(loss, norm, rate) of each step, the weights after them, the validation loss."""
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    windows = windows_of(tokens)
    groups = [
        {"params": [x for x in w.values() if x.dim() > 1], "weight_decay": DECAY},
        {"params": [x for x in w.values() if x.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    told = []
    for step in range(STEPS):
        ids = sample_ids(seed, step * BATCH, BATCH, len(windows))
        optimizer.zero_grad()
        loss = mean_loss(w, windows[ids])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        told.append((loss.item(), norm.item(), rate(step)))
    others = windows_of(held_out)
    with torch.no_grad():
        validation = mean_loss(w, others[sample_ids(seed + 1, 0, BATCH, len(others))])
    return told, w, validation.item()


@pytest.fixture
def double():
    """Ranks compute in the dtype of the recipe; the process takes its own back."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_five_steps_are_those_of_a_plain_loop(tmp_path, double):
    (tmp_path / "text.txt").write_text(TEXT * 4)
    recipe = Recipe(
        seed=7,
        model=ModelConfig(n_layer=LAYERS, n_head=HEADS, d_model=WIDTH, context=CONTEXT, dropout=0.0),
        data=DataConfig(source=f"text:{tmp_path / 'text.txt'}"),
        train=TrainConfig(
            steps=STEPS, global_batch=BATCH, micro_batch=2, dtype="float64", lr=LR, warmup_steps=WARMUP,
            weight_decay=DECAY, clip=CLIP, betas=BETAS, eps=EPS, eval_batches=1,
        ),
    )  # fmt: skip
    resolved = resolve(recipe, "dp=1", 1)
    corpus, place = load(recipe.data, recipe.model), place_of(0, 1, 0, "gloo", 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(0))
    feed, val = feeds(resolved.recipe, resolved.plan, corpus, place.device)

    def weights():
        named = {box.name: box.tensor.clone() for box in pieces_of(run) if box.saved}
        return {n.removeprefix("model/"): x for n, x in named.items() if n.startswith("model/")}

    begun = weights()
    data = np.frombuffer((TEXT * 4).encode(), dtype=np.uint8)
    cut = len(data) - len(data) // 10
    tokens, held_out = (torch.tensor(part.astype(np.int64)) for part in (data[:cut], data[cut:]))
    told, right, validation = plain(begun, tokens, held_out, recipe.seed)
    reports = list(train(run, feed, STEPS))
    assert [r.norm > CLIP for r in reports] == [norm > CLIP for _, norm, _ in told] and told[0][1] > CLIP
    for report, numbers in zip(reports, told, strict=True):
        assert (report.loss, report.norm, report.lr) == pytest.approx(numbers, rel=1e-12)
    for name, x in weights().items():
        torch.testing.assert_close(x, right[name].detach(), rtol=1e-11, atol=1e-13, msg=name)
    loss, _ = evaluate(run, [val.fetch(0, run.leaves)])
    assert loss == pytest.approx(validation, rel=1e-12)
