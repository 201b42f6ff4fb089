"""profile/rank*.json.gz."""

from pydantic import Field, model_validator

from unisono.spec.sink import Observer, RunFacts, Sink


class ProfileSink(Sink):
    """profile/rank*.json.gz: operators, modules, Python lines and memory of some steps. `train.profile` opens it."""

    name = "profile"
    main = "first"
    every_rank = True

    first: int = Field(default=10, ge=1, description="the first step that is profiled")
    last: int = Field(default=12, ge=1, description="the last one")
    stack: bool = Field(
        default=False, description="Python functions too, call by call; slows down what is short"
    )

    @model_validator(mode="after")
    def _in_order(self) -> "ProfileSink":
        if self.last < self.first:
            raise ValueError(f"steps {self.first} to {self.last} are none")
        return self

    def open(self, run: RunFacts) -> Observer:
        from unisono_contrib.train.watch.profiling import Profiling

        return Profiling(run, self.first, self.last, self.stack)
