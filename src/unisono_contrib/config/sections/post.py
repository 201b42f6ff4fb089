"""`[post]`: post-training of a language model, by answers, by pairs of answers, or by rewards."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.plan import Plan
from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.section import Section
from unisono.spec.training import Count, Natural, NotNegative, Positive

_ONLY = {
    "grpo": (
        "group", "reward", "kl", "clip", "truncate", "max_staleness", "temperature", "max_new_tokens", "over",
        "advantage", "sft_steps", "samplers",
    ),
    "dpo": ("beta",),
}  # fmt: skip


class PostConfig(Section):
    """Post-training: SFT on answers, DPO on pairs (Rafailov et al., 2023), GRPO on rewards (Shao et al., DeepSeekMath,
    2024). `train.global_batch` counts sequences; means are over all that count in it, however it is divided."""

    name: ClassVar[str] = "post"
    one_run: ClassVar[bool] = True

    kind: Literal["sft", "dpo", "grpo"] = Field(default="grpo", description="what the model learns from")
    group: Count = Field(default=8, description="grpo: sequences drawn for each prompt")
    reward: str = Field(
        default="exact",
        description="grpo: exact, 1 for the data's own answer and else 0; or FILE.py:FUNCTION, of prompt, drawn text"
        " and answer",
    )
    kl: NotNegative = Field(
        default=0.0, description="grpo: what leaving the first weights costs; 0: they are not kept"
    )
    clip: NotNegative = Field(
        default=0.2,
        lt=1.0,
        description="grpo: how far probabilities may move away from the sampler's; 0: any",
    )
    truncate: NotNegative = Field(
        default=2.0, description="grpo: largest importance weight of a token; 0: any"
    )
    max_staleness: Natural = Field(
        default=0, description="grpo: updates that weights may be ahead of those that drew a sequence"
    )
    samplers: Natural = Field(
        default=0, description="grpo: processes beside the ranks that draw; 0: the ranks draw themselves"
    )
    temperature: Positive = Field(default=1.0, description="grpo: by which logits are divided")
    max_new_tokens: Count = Field(default=16, description="grpo: tokens drawn after a prompt at most")
    over: Literal["tokens", "sequences"] = Field(
        default="tokens", description="grpo: what counts alike: each drawn token, or each sequence"
    )
    advantage: Literal["std", "mean"] = Field(
        default="std",
        description="grpo: reward less its group's mean, divided by its standard deviation or not",
    )
    sft_steps: Natural = Field(
        default=0, description="grpo: first steps, which learn from the data's own answers"
    )
    beta: Positive = Field(default=0.1, description="dpo: how fast a gain on the reference is enough")

    @property
    def beside(self) -> tuple[str, ...]:
        return ("sampler",) * (self.samplers if self.kind == "grpo" else 0)

    @property
    def kept(self) -> int:
        return int(self.refers)

    @property
    def refers(self) -> bool:
        """Whether the first weights are kept, to be compared with."""
        return self.kind == "dpo" or (self.kind == "grpo" and self.kl > 0.0)

    @property
    def sequences(self) -> int:
        """Sequences of a global batch that belong together."""
        return {"sft": 1, "dpo": 2, "grpo": self.group}[self.kind]

    @property
    def pins(self) -> tuple[str, ...]:
        return ("post",)

    def problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        chosen = {
            key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default
        }
        for kind, keys in _ONLY.items():
            for key in sorted(chosen & set(keys)) if kind != self.kind else ():
                what = f"post.{key} says nothing where post.kind is {self.kind}"
                yield Problem("C06", what, f"post.{key}, post.kind", f"leave it out, or post.kind = {kind}")
        if self.kind == "grpo" and self.group < 2:
            what = "a group of one sequence has no other to be compared with"
            yield Problem("C06", what, "post.group", "--post.group 8")
        yield from self._size_problems(recipe.train, plan)
        yield from self._plan_problems(recipe, plan)

    def _size_problems(self, train: Any, plan: Plan) -> Iterator[Problem]:
        policy = named("sync", plan.sync)
        if train.global_batch % self.sequences:
            what = (
                f"a global batch of {train.global_batch} sequences is no number of groups of {self.sequences}"
            )
            yield Problem("C06", what, "train.global_batch, post.group", "a multiple of the group")
        elif self.kind == "dpo" and train.micro_batch and train.micro_batch % 2:
            what = f"a micro-batch of {train.micro_batch} sequences cuts a pair in two"
            yield Problem("C06", what, "train.micro_batch, post.kind", "an even train.micro_batch")
        elif (
            plan.pp > 1
            and policy is not None
            and policy.leafwise
            and train.micro_batch not in (None, self.sequences)
        ):
            what = f"sync={plan.sync} computes groups of {self.sequences} one by one, and stages send micro-batches"
            yield Problem("C06", what, "train.micro_batch, post", f"--train.micro_batch {self.sequences}")

    def _plan_problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        """What [post] cannot be played with, and why."""
        policy, schedule, model = named("sync", plan.sync), named("schedule", plan.schedule), recipe.model
        judged = (
            self.kind != "sft"
        )  # by a loss of its own, of sequences that one model drew or is compared with
        sections = ("privacy", "ramp", "federated", *(("ema", "noise_scale") if judged else ()))
        others = [key for key in sections if getattr(recipe, key)]
        for key, on, why, fix in (
            ("model.kind", model.reads not in ("", "tokens"), "has no tokens to draw", "gpt"),
            ("model.dropout", judged and getattr(model, "dropout", 0.0) > 0.0, "makes trainer and sampler two models",
             "0.0"),
            ("train.loss", judged and bool(recipe.train.loss), "is another loss", "leave it out"),
            ("plan.sync", judged and policy is not None and not policy.resizes, "has other weights on each replica, or"
             " batches of one size", "every_step or canonical"),
            ("plan.schedule", schedule is not None and (not schedule.flushed or (judged and schedule.chains > 1)),
             "plays several versions or copies of the model", "1f1b"),
            ("plan.cp", self.kind == "dpo" and plan.cp > 1, "leaves no rank with a whole sequence's sum", "cp=1"),
            (f"[{others[0] if others else ''}]", bool(others), "changes the same part of a run", "leave it out"),
        ):  # fmt: skip
            if on:
                what = f"[post] with kind = {self.kind} is not available here: {key} {why}"
                yield Problem("C09", what, f"{key}, post.kind", fix)
