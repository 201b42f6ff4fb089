"""resources/*.jsonl."""

from pydantic import Field

from unisono.spec.sink import Observer, RunFacts, Sink


class ResourcesSink(Sink):
    """resources/: each second the cores, memory, disk, network, GPUs and energy of a host, and what a rank takes."""

    name = "resources"
    main = "every"
    every_rank = True

    every: float = Field(default=1.0, ge=0.1, description="seconds between samples")

    def open(self, run: RunFacts) -> Observer:
        from unisono_contrib.train.sinks._resources import ResourceSampler

        return ResourceSampler(run, self.every)
