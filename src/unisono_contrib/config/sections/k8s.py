"""`[k8s]`: what a job on Kubernetes says beside `[job]`. No torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.section import Section

KINDS = ("job", "jobset", "trainjob", "pytorchjob")
_VOLUME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[^:]*")
_LABEL = r"^(?:[a-z0-9](?:[-a-z0-9.]{0,61}[a-z0-9])?)?$"
Name = Annotated[str, Field(pattern=_LABEL)]


class K8sConfig(Section):
    """Manifests for Kubernetes, for `unisono launch k8s`."""

    name: ClassVar[str] = "k8s"

    kind: Literal["job", "jobset", "trainjob", "pytorchjob"] = Field(
        default="job",
        description="job: batch/v1, nothing to install; jobset: jobset.x-k8s.io; trainjob: Kubeflow Trainer 2;"
        " pytorchjob: Kubeflow's older operator",
    )
    image: str = Field(default="", description="container image that has Unisono, torch and the user's files")
    namespace: Name = Field(default="", description="namespace; kubectl's own when absent")
    queue: Name = Field(
        default="",
        description="LocalQueue of Kueue (label kueue.x-k8s.io/queue-name), which admits all pods or none",
    )
    gang: Literal["none", "scheduling", "podgroup", "plugin"] = Field(
        default="none",
        description="all pods or none are placed. scheduling: spec.scheduling of the Job (Kubernetes 1.37); podgroup:"
        " PodGroup of the core (1.37); plugin: PodGroup of scheduler-plugins",
    )
    scheduler: Name = Field(default="", description="schedulerName of the pods")
    runtime: Name = Field(default="torch-distributed", description="trainjob: the ClusterTrainingRuntime")
    gpu: str = Field(default="nvidia.com/gpu", description="resource name of a GPU")
    volumes: tuple[str, ...] = Field(
        default=(),
        description="claims and where they are mounted, each CLAIM:/PATH; out.dir should be in one",
    )
    service_account: Name = Field(default="", description="serviceAccountName of the pods")
    node_selector: tuple[str, ...] = Field(default=(), description="labels of nodes, each KEY=VALUE")

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        for volume in self.volumes:
            if not _VOLUME.fullmatch(volume):
                yield Problem(
                    "C06", f"{volume!r} is no CLAIM:/PATH", "k8s.volumes", 'volumes = ["runs:/runs"]'
                )
        for label in self.node_selector:
            if "=" not in label:
                yield Problem("C06", f"{label!r} is no KEY=VALUE", "k8s.node_selector", '["gpu=h100"]')
        if self.gang != "none" and self.kind in ("trainjob", "pytorchjob"):
            what = f"gang={self.gang} of a {self.kind} is said by its runtime or operator"
            yield Problem(
                "C06", what, "k8s.gang, k8s.kind", "k8s.queue; podGroupPolicy in the runtime; kind = jobset"
            )
        if self.gang == "scheduling" and self.kind == "jobset":
            what = "gang=scheduling is a key of the Job, and jobs of a JobSet are several"
            yield Problem("C06", what, "k8s.gang, k8s.kind", "gang = podgroup")
