"""Models of Hugging Face, tiny ones. Their losses are computed in float32."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.library.catalogue import batches, loop
from unisono.library import Job

SIZES: dict[str, Any] = {"vocab_size": 11, "attn_implementation": "eager"}


def rows(padded: bool) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(11, (21, 6), generator=drawn)
    ends = torch.randint(3, 7, (21,), generator=drawn)
    labels = torch.where(torch.arange(6) < ends[:, None], ids, -100) if padded else ids
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def trained(job: Job, model: Any, padded: bool = False, weigh: bool = False) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches(rows(padded)))
    model.train()
    for batch in data:
        if weigh:
            job.weigh(int((batch["labels"][:, 1:] != -100).sum()))
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=8, **SIZES, **quiet)
    ).double()


@loop(near=1e-5)
def gpt2_of_hugging_face(job: Job) -> Iterator[float]:
    yield from trained(job, gpt2())


@loop("told J10")
def gpt2_with_padded_labels(job: Job) -> Iterator[float]:
    yield from trained(job, gpt2(), padded=True)


@loop(near=1e-5)
def gpt2_with_padded_labels_weighed(job: Job) -> Iterator[float]:
    yield from trained(job, gpt2(), padded=True, weigh=True)


@loop(near=1e-5)
def llama_of_hugging_face(job: Job) -> Iterator[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **SIZES,
    )
    yield from trained(job, LlamaForCausalLM(config).double())


@loop("told J13")
def bert_with_dropout(job: Job) -> Iterator[float]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **SIZES
    )
    yield from trained(job, BertForMaskedLM(config).double())


@loop("told J10")
def mixtral_with_router_loss(job: Job) -> Iterator[float]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=1.0, **SIZES,
    )  # fmt: skip
    yield from trained(job, MixtralForCausalLM(config).float())
