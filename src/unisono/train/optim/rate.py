"""The learning rate of a step, counted in optimiser steps of the whole run, never per process."""

import math

from unisono.config import TrainConfig


def rate(train: TrainConfig, step: int) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to `lr`, then cosine, linear or constant to `min_lr`
    at the last step (Loshchilov & Hutter, 2017)."""
    floor = train.lr / 10 if train.min_lr is None else train.min_lr
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    span = max(1, train.steps - 1 - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    if train.lr_schedule == "linear":
        return train.lr + (floor - train.lr) * done
    return floor + (train.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
