"""The values of a plan, without the reading and the checking of them (`Plan`)."""

from dataclasses import dataclass, field
from typing import Any

from unisono.plan.options import Arithmetic, Wires, arithmetic_of, chunks_of, wires_of
from unisono.spec.errors import UsageError

OPTIONED = ("zero", "tp", "precision")
"""Keys behind whose values options may stand that no member reads."""
ALIKE = "alike"
"""The value of `blocks` that says nothing of any block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFields:
    """The fields of a plan, as `Plan` describes them, and what follows from them alone."""

    dp: int = 1
    shard: int = 1
    zero: int = 3
    pp: int = 1
    schedule: str = "1f1b"
    micros: int | None = None
    tp: int = 1
    cp: int = 1
    ep: int = 1
    cp_kind: str = "ring"
    sync: str = "every_step"
    collective: str = "auto"
    codec: str = "plain"
    precision: str = "fp32"
    recompute: str = "none"
    offload: str = "none"
    blocks: str = ALIKE
    options: frozenset[str] = frozenset()
    said: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def text(self, key: str) -> Any:
        """The value of a key as it is written: with its options, if it has any."""
        value = getattr(self, key)
        if not self.options or key not in OPTIONED:
            return value
        written = (text.partition("=")[2] for text in self.options if text.startswith(f"{key}={value}:"))
        return next(written, value)

    @property
    def wires(self) -> Wires:
        """The options of `zero`."""
        return wires_of(str(self.text("zero")) if self.options else "")

    @property
    def chunks(self) -> int:
        """The option of `tp`."""
        return chunks_of(str(self.text("tp")) if self.options else "")

    @property
    def arithmetic(self) -> Arithmetic:
        """The options of `precision`."""
        return arithmetic_of(self.text("precision") if self.options else "")

    @property
    def inner(self) -> int:
        """Ranks of one replica."""
        return self.shard * self.pp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Ranks in all. Raises UsageError while dp=-1 is not filled."""
        return self._filled_dp() * self.inner

    @property
    def replicas(self) -> int:
        """Data ranks: coordinates that see different samples, dp * shard."""
        return self._filled_dp() * self.shard

    def _filled_dp(self) -> int:
        if self.dp == -1:
            raise UsageError(
                "dp=-1 fills the world, but the number of ranks is not known",
                where="plan.dp",
                fix="--launch.ranks N, or write dp=N",
                code="P14",
            )
        return self.dp


USUAL = PlanFields()
"""The value of each key that a plan does not name."""
