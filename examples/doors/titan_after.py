"""A training script in the shape of torchtitan's minimal trainer (Liang et al., 2024)."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from small_gpt import GPT, GPTConfig
from torch.utils.data import DataLoader, IterableDataset

import unisono

IGNORE_INDEX = -100


@dataclass
class JobConfig:
    steps: int = 8
    warmup_steps: int = 2
    global_batch_size: int = 8
    seq_len: int = 16
    lr: float = 1e-2
    max_norm: float = 1.0
    seed: int = 7
    dump_folder: str = "outputs"


class TextDataset(IterableDataset):
    """Lines of a file as bytes; labels of what is filled up are left out of the loss."""

    def __init__(self, path, seq_len):
        self.lines, self.seq_len = path.read_bytes().splitlines(), seq_len

    def __iter__(self):
        while True:
            for line in filter(None, self.lines):
                line = line[: self.seq_len + 1].ljust(2)
                row = torch.zeros(self.seq_len + 1, dtype=torch.long)
                row[: len(line)] = torch.tensor(list(line))
                labels = row[1:].clone()
                labels[len(line) - 1 :] = IGNORE_INDEX
                yield {"input": row[:-1]}, labels


class OptimizersContainer:
    """An optimiser for each part of the model."""

    def __init__(self, model_parts, lr):
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=lr) for part in model_parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def parallelize_fn(model, job_config):
    return model


def cross_entropy_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


class Trainer:
    def __init__(self, job_config):
        self.job_config, self.step, self.history = job_config, 0, []
        torch.manual_seed(job_config.seed)
        text = TextDataset(Path(__file__).with_name("small_gpt.py"), job_config.seq_len)
        self.dataloader = DataLoader(text, batch_size=job_config.global_batch_size)
        with torch.device("meta"):
            model = GPT(GPTConfig(block_size=job_config.seq_len))
        self.model = parallelize_fn(model, job_config)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
        self.optimizers = OptimizersContainer([self.model], job_config.lr)
        self.job = unisono.init()
        self.job.prepare(self.model, self.optimizers.optimizers)
        self.dataloader = self.job.deal(self.dataloader)
        self.lr_schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / job_config.warmup_steps))
            for o in self.optimizers.optimizers
        ]

    def train_step(self, data_iterator):
        self.optimizers.zero_grad()
        input_dict, labels = next(data_iterator)
        self.job.weigh((labels != IGNORE_INDEX).sum().item())
        loss = cross_entropy_loss(self.model(input_dict["input"]), labels)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job_config.max_norm)
        self.optimizers.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        loss_value = self.job.mean(loss)
        self.history.append(loss_value)
        self.job.ranks.print(f"step: {self.step}  loss: {loss_value:.4f}  grad_norm: {float(grad_norm):.4f}")

    def train(self):
        data_iterator = iter(self.dataloader)
        while self.step < self.job_config.steps:
            self.step += 1
            self.train_step(data_iterator)
        self.job.save(self.job_config.dump_folder)


trainer = Trainer(JobConfig())
trainer.train()
