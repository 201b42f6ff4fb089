"""How replicas stay together: policies on the `dp` axis, one a file, chosen by the plan's `sync`.

`Policy` is the declaration: options, traits, fidelity, and what it sends and keeps, without torch. `bind` makes the
live part, a `Sync`, when ranks are there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.errors import Problem
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Durations, Work

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.comm.bucket import Bucket
    from unisono.comm.group import Group
    from unisono.sync._kept import CodecState


class Verdict(Enum):
    """What the step is to do with the gradient that it holds."""

    APPLY = "apply"  # step the optimiser here
    REMOTE = "remote"  # the update happened elsewhere
    DISCARD = "discard"  # this step does not count
    HOLD = "hold"  # it counts, and its gradient goes into the update of a later step
    LATER = "later"  # it counts, and its gradient is still on its way: the update of a later step applies it


@dataclass(frozen=True, slots=True)
class Identity:
    """A case in which a policy computes what another one computes, by which it is proven: under `sync` replicas
    get the weights that they get under `equals`, up to rounding. Where replicas are `alike`, both of them have the same
    samples, and `equals` is played by one replica. replicas, codec: under `sync`."""

    sync: str
    equals: str
    alike: bool = False
    replicas: int = 2
    codec: str = ""


@dataclass(frozen=True, slots=True)
class SampleLane:
    """Which samples a run reads that trains beside others. Of every `count` global batches in the order of samples it
    has number `place`. From `place` = `count` on, batches come from an order of samples with another seed."""

    place: int = 0
    count: int = 1


class Policy(Member, ABC):
    """A policy's declaration.

    fidelity: how close training under it comes to one device. leafwise: it needs the gradient of each micro-batch by
    itself, to add them up in an order that no layout changes. equal: replicas hold equal weights after every step, so
    that copies can be compared and one replica's checkpoint is everybody's. alone: it means something with dp=1.
    served: weights lie with parameter servers, of which `[launch] servers` says how many. mails: runs of their own can
    meet under it through a mailbox, `[launch] mailbox`. lazy: it sends at most what it declares. identities: by which
    a policy that is LOSSY is proven; one without any is refused by `unisono verify --conformance`.
    """

    fidelity: ClassVar[Fidelity]
    identities: ClassVar[tuple[Identity, ...]] = ()
    lazy: ClassVar[bool] = False
    leafwise: ClassVar[bool] = False
    equal: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    served: ClassVar[bool] = False
    mails: ClassVar[bool] = False

    @property
    def rhythm(self) -> int:
        """Steps from one update to the next. More than 1 changes what a run means: fidelity then is towards one device
        that has the same policy."""
        return 1

    @property
    def update_lag(self) -> int:
        """Steps from a gradient to its update. More than 0 changes what a run means, as `rhythm` does. The gradient of
        step k then makes update k in step `k + update_lag`, at the learning rate of step k."""
        return 0

    def steady(self, text: str) -> str:
        """text: this policy as the plan says it. The same where nothing follows what is measured on the way, so that
        two runs do the same."""
        return text

    @property
    def look_every(self) -> int:
        """Steps from one look at the replicas' speeds, by which leaves are assigned to them, to the next; 0: none."""
        return 0

    @property
    def resizes(self) -> bool:
        """Whether steps may have different numbers of micro-batches."""
        return False

    @property
    def replica_speeds(self) -> tuple[float, ...]:
        """Of each replica, by which leaves are assigned to them at the start; () where all are alike."""
        return ()

    def among(self, text: str, replicas: int) -> str:
        """text: this policy as the plan says it. The same for another number of replicas, without what it says of each
        one."""
        return text

    @property
    def virtual(self) -> int:
        """Shards by which every layer is computed, so that `tp` and `cp` change no bit; 1: layers as they are."""
        return 1

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        """What of a plan and its batch (`plan.checks.Batch`) this policy cannot be played with."""
        yield from ()

    def pace(self, durations: "Durations") -> float:
        """Mean time from one step to the next, given how long each step of each replica takes by itself: how replicas
        wait for each other. As here: for the slowest one, in every step."""
        return fmean(map(max, zip(*durations, strict=True)))

    def mail_problems(self, plan: Any) -> Iterator[Problem]:
        """What of a plan cannot be played where this run meets others through a mailbox."""
        yield from ()

    @abstractmethod
    def work(self, gradient_bytes: int, dp: int) -> Work:
        """What one rank sends and keeps in a step, given the bytes of its gradients and the number of replicas."""

    def served_work(self, gradient_bytes: int, dp: int, servers: int) -> Work:
        """The same of a rank that carries one of so many parameter servers. As here: there are none."""
        return self.work(gradient_bytes, dp)

    @abstractmethod
    def bind(self, slots: "Sequence[Any]", group: "Group", codec: Any) -> "Sync":
        """The live policy of one rank. slots: `parallel.params.Slot`, all parameters of this rank. group: its `dp`.
        codec: the live codec for all that it sends. Every member of `group` calls it, or it hangs."""


class Sync(ABC):
    """A live policy on the `dp` axis, on one rank. private: each replica keeps a state of its own. shares: what each
    keeps for itself is a part of a sum, which counts: with another dp it is dealt anew, in equal parts. cap: bytes that
    a bucket between hosts has at most, 0 where that is not the policy's affair. sliced: buckets are as small on one
    host, and do not lie in memory that all see. overlaps: the next forward may begin
    before the update is made. settled: what was measured, as the plan's `sync` would say it. equal: see `Policy`.
    lane: which samples of a step this run reads, where it is one of several runs.
    replicas: those that have weights of their own, None where all are equal. keeps_weights: whether a replica's weights
    and optimiser state between steps are a part of the run; else they lie elsewhere until `center` fetches them.
    one_copy: replicas have the very same weights and optimiser state in memory, which others change at any time."""

    dp: "Group"
    kept: "CodecState | None" = None
    private: bool = False
    shares: bool = False
    cap: int = 0
    sliced: bool = False
    overlaps: bool = False
    settled: str = ""
    equal: bool = True
    lane: SampleLane = SampleLane()
    replicas: "Group | None" = None
    keeps_weights: bool = True
    one_copy: bool = False

    def among(
        self, world: "Group", replica: "Group | None" = None, counted: frozenset[str] = frozenset()
    ) -> None:
        """Before the first step. world: all ranks of the run, with whom a decision is taken that all must take alike.
        replica: those between which one replica's parameters are split; None where one rank has all of them. counted:
        names of the parameters of which this rank's box counts, since another of its replica may hold the same."""
        return None

    def assigned(self, stretches: "Sequence[range]", shards: int) -> None:
        """Between two steps: the leaves that each replica computes from now on, which its `shards` take in turn."""
        return None

    def weigh(self, count: float) -> float:
        """Before forward: what one target's loss counts for, given the targets that one replica holds. As here: for a
        sum over all replicas."""
        return 1.0 / (count * self.dp.size)

    @abstractmethod
    def grad_ready(self, bucket: "Bucket") -> None:
        """During backward: this replica's gradients in `bucket` are complete."""

    def lacking(self, absent: "Sequence[Any]") -> "Sequence[Any]":
        """absent: parameters that had no gradient in this step on this replica; of these the ones that none of an
        earlier step goes along with."""
        return absent

    @abstractmethod
    def settle(self) -> Verdict:
        """Before the update: gradients are what the update shall use when this returns."""

    def next_gradient(self) -> bool:
        """After the update of a run's last step: whether there was one more gradient on its way. The slots have it
        then, for an update of its own. Every member of `dp` calls it, or it hangs."""
        return False

    def after_update(self, step: int) -> None:
        """After the update of step number `step` (from 0)."""
        return None

    def proceed(self, step: int) -> int:
        """Before the first step, and after each in which replicas have come together: the step with which this run goes
        on. step: the one that is next. A run that trains beside others may find that they are further. Every rank
        calls it, or it hangs."""
        return step

    def close(self) -> None:
        """This run ends here, or its ranks meet anew: let go of what lies outside of it. Raises nothing."""
        return None

    def before_step(self, step: int) -> None:
        """Before the batch of step `step` (from 0) is computed: what this replica fetches from others."""
        return None

    def deliver(self, step: int, norm: float, stop: bool) -> None:
        """After the backward of step `step`: gradients are whole in this replica, as they are for an update. norm: of
        its whole gradient. stop: whether a rank of it was asked to. For what is given to others that update."""
        return None

    def next_step(self, step: int) -> int:
        """The step that this replica makes after `step`: later ones than `step + 1` where others have gone on."""
        return step + 1

    def meets(self, step: int) -> bool:
        """Whether anything at all crosses `dp` in step `step`; the same on all replicas. In a step in which nothing
        does, no loss is summed, no request to stop is heard, no step is judged: the next meeting makes up for it."""
        return True

    def take_loss(self, step: int, loss: float) -> None:
        """In a step in which replicas that are not `equal` meet: the mean of their losses, the same on all."""
        return None

    def heed(self, stop: "Callable[[], bool]") -> None:
        """Before `exchange`, which may wait for what lies outside of the run. stop(): whether this rank was asked
        to."""
        return None

    def exchange(self, step: int) -> None:
        """After the update of step `step`, where replicas are not `equal`: what they tell each other of their weights.
        Nothing that is kept changes here, so that a replica that is lost meanwhile takes nothing along."""
        return None

    def merge(self, step: int) -> None:
        """After `exchange`: the weights and what the policy keeps become what was agreed on. Nothing is sent."""
        return None

    def center(self) -> "Mapping[str, Tensor]":
        """By a parameter's name, "the" weights of a run whose replicas are not `equal`, each like the parameter's
        master: those that are validated, exported, and saved as `model/NAME`. Empty where they are the replica's own.
        Every member of `dp` calls it, or it hangs."""
        return self.outer

    @property
    def outer(self) -> "Mapping[str, Tensor]":
        """What of `center` is kept between steps, alike on all replicas; a checkpoint fills these very tensors."""
        return {}

    def salvage(self, tell: "Callable[[str, Any], list[Any]]") -> "tuple[int, Set[str]] | None":
        """After a rank was lost, where not `keeps_weights`: weights and optimiser state of this rank become what its
        servers hold. tell(name, JSON): what every rank that is left says under this name, in the order of ranks.
        Returns (steps that are in them, names of these parameters), None where there is nothing. Every rank that is
        left calls it, or it hangs."""
        return None

    def agree(self) -> None:
        """After a run was restored: where replicas hold different rounds, all go on from the newest. Every member of
        `dp` calls it, or it hangs."""
        return None

    def undone(self) -> None:
        """After a step that was discarded because its numbers are bad: what was kept is as before it."""
        return None

    def says(self) -> str:
        """What it has chosen among others, and why; "" where it had no choice."""
        return ""

    def metrics(self) -> "Mapping[str, Any]":
        """What there is to tell of the last step beside its report, by name, for its line of metrics."""
        return {}

    def is_private(self, key: str) -> bool:
        """Whether this key of the state is each replica's own."""
        return self.private

    def adds(self, key: str) -> bool:
        """Whether what is kept under this key is a gradient or a part of one: of the uses of a tied weight, the sum
        counts."""
        return self.is_private(key)

    def await_transfers(self) -> None:
        """Before `state` is saved or filled: what is on its way between steps arrives."""
        return None

    def state(self) -> "Mapping[str, Tensor]":
        """What the policy keeps between steps; a checkpoint fills these very tensors.

        Key: `NAME/WHAT` for a tensor like the master of the parameter NAME, which loads under any layout; any other
        for one that all ranks of a replica have alike."""
        return {}

    def load(self, state: "Mapping[str, Tensor]") -> None:
        """What `state` gave is filled from a checkpoint, as far as it was there."""
        return None


class OuterPolicy(Policy, ABC):
    """A policy under which replicas have weights and optimiser states of their own, and come together between steps.

    To the rest of a step, a replica with its `inside - 1` neighbours is a run by itself: lock-step inside, and nothing
    crosses `dp` but what the live `sync._outer.OuterSync` sends. repeats: the same run again has the same weights,
    since nothing depends on which replica is first.
    """

    equal: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    @property
    def neighbours(self) -> int:
        """How many neighbouring replicas are in lock-step with each other; 1: each is by itself."""
        return 1

    def bind(self, slots: "Sequence[Any]", group: "Group", codec: Any) -> "Sync":
        """Raises TypeError: replicas that have weights of their own are bound by `bind_outer`."""
        raise TypeError(f"{self.name} is bound by bind_outer")

    @abstractmethod
    def bind_outer(self, site: Any) -> Sync:
        """The live policy of one rank, a `sync._outer.OuterSync`. site: `sync._outer.Site`. Every rank of the run calls
        it, or it hangs."""


POLICIES: Family[Policy] = Family("policy", "unisono.sync", Policy, "plan.sync", ("P04", "P05"))
