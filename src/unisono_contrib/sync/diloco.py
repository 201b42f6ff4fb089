"""DiLoCo: rounds of h local steps, after which an outer Nesterov optimiser takes the mean of what replicas learnt.

Douillard et al. 2023 (arXiv 2311.08105); fragments, delay and alpha: Streaming DiLoCo, Douillard et al. 2025 (arXiv
2501.18512). With one replica it is an outer optimiser around plain training (Kallusky et al. 2025).

Fidelity: LOSSY. Identities: the same samples on all replicas give what one replica gives; outer_lr=1,outer_momentum=0
gives `local_sgd`; with one replica that is plain training.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._local import GroupedPolicy, pace_of_rounds, plain_problems, rounds_work


class Diloco(GroupedPolicy):
    """Every h-th step, the mean of what replicas learnt, taken by an outer Nesterov optimiser."""

    name = "diloco"
    main: ClassVar[str] = "h"
    alone = True
    mails = True
    identities = (
        Identity("diloco:h=3,outer_lr=1,outer_momentum=0", "local_sgd:h=3"),
        Identity(
            "diloco:h=3,outer_lr=1,outer_momentum=0",
            "local_sgd:h=3",
            codec="chunktopk:chunk=64,top=64,values=plain+ef:beta=0.95",
        ),
        Identity("diloco:h=3", "diloco:h=3", alike=True),
        Identity("diloco:h=3,fragments=2,delay=1", "diloco:h=3,fragments=2,delay=1", alike=True),
        Identity("diloco:h=3,outer_lr=1,outer_momentum=0", "every_step", replicas=1),
    )

    h: int = Field(default=30, ge=1, description="steps of a round; replicas meet once in it")
    outer_lr: float = Field(default=0.7, gt=0.0, description="learning rate of the outer optimiser")
    outer_momentum: float = Field(
        default=0.9, ge=0.0, lt=1.0, description="its Nesterov momentum; 0: plain SGD"
    )
    fragments: int = Field(default=1, ge=1, description="parts of the model, sent in turn within a round")
    delay: int = Field(default=0, ge=0, description="steps that a part may travel while training goes on")
    alpha: float | None = Field(
        default=None, ge=0.0, le=1.0,
        description="with a delay, what own weights keep of themselves in a merge (0.5); 1 merges nothing",
    )  # fmt: skip
    warmup: int = Field(default=0, ge=0, description="steps of lock-step before the first round")

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from super().problems(plan, batch)
        if self.fragments > self.h:
            what = (
                f"sync={plan.sync}: {self.fragments} fragments have no turn each in a round of {self.h} steps"
            )
            yield Problem("P16", what, "plan.sync", f"fragments={self.h}, or h={self.fragments}")
        if self.delay >= self.h:
            what = f"sync={plan.sync}: a part that travels {self.delay} steps is due again after {self.h}"
            yield Problem("P16", what, "plan.sync", f"delay={self.h - 1}, or a longer round")
        if self.alpha is not None and not self.delay:
            what = f"sync={plan.sync}: without a delay own weights have learnt nothing since they were sent"
            yield Problem("P16", what, "plan.sync", "delay=1, or leave alpha out")

    def pace(self, durations: Durations) -> float:
        return pace_of_rounds(durations, max(1, self.h // self.fragments), self.inside)

    def mail_problems(self, plan: Any) -> Iterator[Problem]:
        yield from plain_problems(plan, "what was learnt goes through a mailbox as it is")
        if plan.dp not in (-1, self.inside):
            what = f"sync={plan.sync}: with launch.mailbox the replicas of a run are in lock-step, and dp={plan.dp}"
            yield Problem(
                "P16", what, "plan.sync, plan.dp, launch.mailbox", f"inside={plan.dp}, or dp={self.inside}"
            )
        for key, usual in (("fragments", 1), ("delay", 0), ("warmup", 0)):
            if (value := getattr(self, key)) != usual:
                what = f"sync={plan.sync}: {key}={value} needs a link between replicas, and a mailbox is none"
                yield Problem("P16", what, "plan.sync, launch.mailbox", f"leave {key} out, or launch.mailbox")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        late, kept = self.fragments if self.delay else 0, self.outer_momentum > 0.0
        return rounds_work(gradient_bytes, dp, self.h, self.inside, momentum=kept, in_flight=late)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._rounds import RoundsSync, Timing, nesterov

        timing = Timing(self.h, self.delay, self.fragments, self.warmup)
        if site.mailbox is not None:
            from unisono_contrib.sync._mailed import MailedSync

            return MailedSync(site, site.mailbox, timing, nesterov(self.outer_lr, self.outer_momentum))
        alpha = 0.5 if self.alpha is None else self.alpha
        return RoundsSync(site, timing, nesterov(self.outer_lr, self.outer_momentum), alpha)
