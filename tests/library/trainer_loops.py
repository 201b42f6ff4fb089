"""transformers.Trainer as its users call it, alone and under a plan of ours. Imported by the tests."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import clear_environment
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import unisono

COUNT = 21


class Rows(torch.utils.data.Dataset):
    """Token rows of several lengths, of which the first tokens are no targets."""

    def __init__(self, classes: bool, count: int = COUNT) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.rows = []
        for _ in range(count):
            size = int(torch.randint(4, 9, (1,), generator=drawn))
            ids = torch.randint(2, 32, (8,), generator=drawn)
            mask = (torch.arange(8) < size).long()
            labels = torch.where((torch.arange(8) < 2) | (mask == 0), -100, ids)
            if classes:
                labels = ids[0] % 3
            self.rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.rows[i]


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(
            BertConfig(vocab_size=32, num_labels=3, **small, **quiet)
        ).double()
    config = LlamaConfig(vocab_size=32, tie_word_embeddings=kind == "tied", **small)
    model = LlamaForCausalLM(config).double()
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        beside = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return get_peft_model(model, beside, autocast_adapter_dtype=False).double()
    return model


def accuracy(found: Any) -> dict[str, float]:
    best = found.predictions.argmax(-1)
    return {"hits": float((best == found.label_ids).sum()), "rows": float(len(found.label_ids))}


def train(
    kind: Any, folder: str, name: str = "llama", *, resume: str | bool = False, stop: int = -1, **options: Any
) -> dict[str, Any]:
    model = model_of(name)
    args = TrainingArguments(**{
        "output_dir": folder, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "use_cpu": True,
        "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch", "max_grad_norm": 0.5, "warmup_steps": 2,
    } | options)  # fmt: skip
    made = kind(
        model=model, args=args, train_dataset=Rows(name == "bert"), eval_dataset=Rows(name == "bert", 10),
        compute_metrics=accuracy,
    )  # fmt: skip
    made.train(resume_from_checkpoint=resume or None)
    made.save_model(str(Path(folder) / "out"))
    (file,) = (Path(folder) / "out").glob("*model.safetensors")
    weights = load_file(file)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_hits", "eval_rows", "step")
    return {
        "log": [{k: float(v) for k, v in line.items() if k in kept} for line in made.state.log_history],
        "weights": {k: v.flatten().tolist() for k, v in weights.items()},
        "config": "".join(path.read_text() for path in (Path(folder) / "out").glob("config.json")),
    }


def alone(ctx: Any, **options: Any) -> dict[str, Any]:
    with clear_environment():  # which says that there are ranks
        return train(Trainer, **options)


def on_ranks(ctx: Any, plan: str, **options: Any) -> dict[str, Any]:
    return train(unisono.trainer(Trainer, job=unisono.init(plan, context=ctx)), **options)


def loop(job: Any) -> None:
    """To be proven."""
    args = TrainingArguments(
        output_dir="unused", per_device_train_batch_size=4, use_cpu=True, max_steps=3, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    unisono.trainer(Trainer, job=job)(model=model_of("llama"), args=args, train_dataset=Rows(False)).train()
