"""Rewards of drawn sequences: exact ones, or a user's own function."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unisono.spec.errors import UsageError, UserCodeError
from unisono.spec.finder import function_in
from unisono.spec.frames import of_user
from unisono_contrib.train.post.sequences import Question

Decode = Callable[[Sequence[int]], str]


def rewards_of(said: str, decode: Decode | None) -> Callable[[Question, list[int]], float]:
    """A function of a question and the tokens drawn for it. said: `[post] reward`. Raises UsageError C03, C06; when it
    is called, UserCodeError."""
    if said == "exact":
        return lambda question, drawn: float(drawn == question.answer)
    if ".py:" not in said:
        raise UsageError(
            f"there is no reward {said!r}",
            where="post.reward",
            fix='"exact", or FILE.py:FUNCTION',
            code="C06",
        )
    if decode is None:
        raise UsageError(
            "a reward function reads text, and the data has none",
            where="post.reward",
            fix="exact",
            code="C06",
        )
    path, _, name = said.rpartition(":")
    function = function_in(said, f"unisono_reward_{Path(path).stem}", "post.reward")

    def reward(question: Question, drawn: list[int]) -> float:
        texts = [decode(tokens) for tokens in (question.prompt, drawn, question.answer)]
        try:
            value = float(function(*texts))
        except Exception as error:
            raise of_user(error, "the reward function", path) from error
        if not math.isfinite(value):
            raise UserCodeError(
                f"the reward of {texts[1]!r} after {texts[0]!r} is {value}",
                where=f"{path}:{name}",
                fix="return a finite number",
            )
        return value

    return reward


def advantages(rewards: Tensor, group: int, divided: bool) -> Tensor:
    """Of rewards float64 [n], group by group: less the group's mean, divided by its standard deviation where asked; 0
    in a group whose rewards are all alike."""
    apart = rewards.view(-1, group)
    centred = apart - apart.mean(1, keepdim=True)
    if divided:
        centred = centred / (apart.std(1, keepdim=True) + 1e-6)
    alike = (apart == apart[:, :1]).all(1, keepdim=True)
    return torch.where(alike, 0.0, centred).flatten()
