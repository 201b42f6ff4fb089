"""Judges of manifests that are not ours: the schemas of Kubernetes and the models of Kubeflow Trainer."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from unisono_contrib.submit.job import JobRequest

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
_PYTORCHJOB = {"apiVersion", "kind", "metadata", "spec"}, {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}


class Refused(Exception):
    """A judge does not take a manifest."""


def judges() -> tuple[Any, Any]:
    """Both libraries; the test is skipped where one is missing."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate: judges manifests"
    )
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    return schemas, models


def judge(manifests: list[dict[str, Any]], job: JobRequest, version: str) -> None:
    """Raises Refused for what a cluster of this version would not take, or would not run as one job of so many nodes."""
    schemas, models = judges()
    for manifest in manifests:
        kind = manifest.get("kind")
        if kind == "JobSet":
            _modelled(models.JobsetV1alpha2JobSet, manifest)
            _template(schemas, manifest["spec"]["replicatedJobs"][0]["template"]["spec"], "Job", version)
        elif kind == "TrainJob":
            _modelled(models.TrainerV1alpha1TrainJob, manifest)
        elif kind == "PyTorchJob":
            _pytorch(schemas, manifest, version)
        elif str(manifest.get("apiVersion")).startswith("scheduling.x-k8s.io/"):
            _same(manifest["spec"], {"minMember": job.nodes})
            _metadata(schemas, manifest, version)
        else:
            _schema(schemas, manifest, version)
    _coherent({one["kind"]: one for one in manifests}, job)


def _schema(schemas: Any, manifest: Any, version: str) -> None:
    try:
        schemas.validate(manifest, version, strict=True)
    except Exception as error:  # each library has kinds of its own
        raise Refused(str(error)[:300]) from error


def _metadata(schemas: Any, manifest: Any, version: str) -> None:
    _schema(schemas, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}, version)


def _template(schemas: Any, spec: Any, kind: str, version: str) -> None:
    api = {"Job": "batch/v1", "PodTemplate": "v1"}[kind]
    held = {"spec": spec} if kind == "Job" else {"template": spec}
    _schema(schemas, {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, **held}, version)


def _modelled(model: Any, manifest: Any) -> None:
    """The model takes it, and knows every key of it."""
    try:
        read = model.model_validate(_wrapped(manifest))
    except ValueError as error:
        raise Refused(str(error)[:300]) from error
    _same(_unwrapped(read.model_dump(mode="json", by_alias=True, exclude_none=True)), manifest)


def _wrapped(value: Any, quantities: bool = False) -> Any:
    """With each quantity, which may be a text or a number, in the form that the generated models have for it."""
    if isinstance(value, dict):
        return {
            key: _wrapped(inner, quantities or key in ("requests", "limits")) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_wrapped(inner) for inner in value]
    return {"actual_instance": value} if quantities else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, dict):
        if "actual_instance" in value:
            return value["actual_instance"]
        return {key: _unwrapped(inner) for key, inner in value.items()}
    return [_unwrapped(inner) for inner in value] if isinstance(value, list) else value


def _same(a: Any, b: Any) -> None:
    if a != b:
        raise Refused(f"{str(a)[:200]} is not {str(b)[:200]}")


def _pytorch(schemas: Any, manifest: Any, version: str) -> None:
    """The operator's schema is in no package that installs here; its pods are Kubernetes'."""
    _same((set(manifest), set(manifest["spec"])), _PYTORCHJOB)
    _metadata(schemas, manifest, version)
    _same(set(manifest["spec"]["runPolicy"]) - {"activeDeadlineSeconds"}, {"backoffLimit"})
    for role, part in manifest["spec"]["pytorchReplicaSpecs"].items():
        _same((role in ("Master", "Worker"), set(part)), (True, {"replicas", "restartPolicy", "template"}))
        _template(schemas, part["template"], "PodTemplate", version)


def pods_of(kinds: Mapping[str, Any], job: JobRequest) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(how many, resources of the container that trains) of all groups of pods."""
    if "Job" in kinds or "JobSet" in kinds:
        spec = (
            kinds["Job"]["spec"]
            if "Job" in kinds
            else kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        )
        _same((spec["completions"], spec["parallelism"]), (job.nodes, job.nodes))
        yield spec["completions"], spec["template"]["spec"]["containers"][0]["resources"]
    elif "TrainJob" in kinds:
        trainer = kinds["TrainJob"]["spec"]["trainer"]
        yield trainer["numNodes"], trainer["resourcesPerNode"]
    else:
        for part in kinds["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values():
            yield part["replicas"], part["template"]["spec"]["containers"][0]["resources"]


def _coherent(kinds: Mapping[str, Any], job: JobRequest) -> None:
    """What no schema sees, as its keys are free: requests, selectors, labels, and the recipe's key."""
    need, nodes = job.need, 0
    gpus = {job.k8s.gpu: str(need.gpus)} if need.gpus else {}
    try:
        for count, resources in pods_of(kinds, job):
            nodes += count
            _same(dict(resources["requests"]), {"cpu": str(need.cores), "memory": f"{need.mib}Mi", **gpus})
            _same(dict(resources.get("limits", {})), gpus)
        _same(nodes, job.nodes)
        _same(set(kinds["ConfigMap"]["data"]), {"recipe.toml"})
        for kind, manifest in kinds.items():
            queue = (
                {"kueue.x-k8s.io/queue-name": job.k8s.queue}
                if job.k8s.queue and kind.endswith(("Job", "Set"))
                else {}
            )
            _same(manifest["metadata"]["labels"], {"app.kubernetes.io/name": job.name, **queue})
        for labels in _labels(kinds):
            group = {"scheduling.x-k8s.io/pod-group": job.name} if job.k8s.gang == "plugin" else {}
            _same(labels, {"app.kubernetes.io/name": job.name, **group})
        if "Service" in kinds:
            _same(kinds["Service"]["spec"]["selector"], {"batch.kubernetes.io/job-name": job.name})
    except KeyError as error:
        raise Refused(f"lacks {error}") from error


def _labels(value: Any) -> Iterator[Any]:
    """Labels of all templates of pods."""
    if isinstance(value, Mapping):
        spec = value.get("spec")
        if isinstance(spec, Mapping) and "containers" in spec and "metadata" in value:
            yield value["metadata"]["labels"]
        for inner in value.values():
            yield from _labels(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _labels(inner)
