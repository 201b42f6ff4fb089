"""The pods of a job on Kubernetes: one a node, whose container starts the node's ranks. No torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unisono_contrib.submit.job import PORT, JobRequest

Manifest = dict[str, Any]
FOLDER, RECIPE = "/etc/unisono", "recipe.toml"
CONTAINER = "node"
"""As Kubeflow's runtimes call the container that trains."""
_SPARE = 5
"""Seconds between the ranks' grace and the pod's end."""
_PLUGIN = "scheduling.x-k8s.io/pod-group"


def metadata(job: JobRequest, name: str, labels: Mapping[str, str] = {}) -> Manifest:
    """Of an object of the job. The queue's label stands on what Kueue admits, which is the job."""
    namespace = {"namespace": job.k8s.namespace} if job.k8s.namespace else {}
    return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": job.name, **labels}}


def queued(job: JobRequest) -> dict[str, str]:
    """Kueue's label of a job that waits in a queue of it."""
    return {"kueue.x-k8s.io/queue-name": job.k8s.queue} if job.k8s.queue else {}


def recipe_map(job: JobRequest, recipe: str) -> Manifest:
    """The ConfigMap with the recipe: what was submitted is what runs."""
    data = {RECIPE: recipe}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, f"{job.name}-recipe"),
        "data": data,
    }


def resources(job: JobRequest) -> Manifest:
    """Requests of a node, by the plan's ledger. Only GPUs are limits too: a price is no reason to end a run that takes
    more memory."""
    need = job.need
    gpus = {job.k8s.gpu: str(need.gpus)} if need.gpus else {}
    requests = {"cpu": str(need.cores), "memory": f"{need.mib}Mi", **gpus}
    return {"requests": requests, **({"limits": gpus} if gpus else {})}


def command(job: JobRequest, master: str) -> list[str]:
    """What a container runs: the ranks of one node. master: where they meet, "" if the operator says it."""
    meet = ["--nodes", str(job.nodes), "--master", f"{master}:{PORT}"] if master else []
    train = job.train(f"{FOLDER}/{RECIPE}", job.grace)
    python = job.config.python or "python"
    return [
        python,
        "-m",
        "unisono_contrib.launch.node",
        "--ranks",
        str(job.ranks_per_node),
        *meet,
        "--",
        *train,
    ]


def variables(job: JobRequest) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in job.variables.items()]


def mounts(job: JobRequest) -> list[Manifest]:
    """Where the container sees the recipe and the claims."""
    claims = [volume.split(":", 1) for volume in job.k8s.volumes]
    return [
        {"name": "recipe", "mountPath": FOLDER},
        *({"name": claim.replace(".", "-"), "mountPath": path} for claim, path in claims),
        *([{"name": "shm", "mountPath": "/dev/shm"}] if job.ranks_per_node > 1 else []),
    ]


def volumes(job: JobRequest) -> list[Manifest]:
    """The recipe, the claims, and shared memory of the ranks of a node: by itself a container has 64 MiB of that."""
    claims = [volume.split(":", 1)[0] for volume in job.k8s.volumes]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        *(
            {"name": claim.replace(".", "-"), "persistentVolumeClaim": {"claimName": claim}}
            for claim in claims
        ),
        *([shm] if job.ranks_per_node > 1 else []),
    ]


def leave_time(job: JobRequest) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return math.ceil(job.grace) + _SPARE


def container(job: JobRequest, master: str, name: str = CONTAINER) -> Manifest:
    return {
        "name": name,
        "image": job.k8s.image,
        "command": command(job, master),
        **({"env": variables(job)} if job.variables else {}),
        "resources": resources(job),
        "volumeMounts": mounts(job),
    }


def pod_spec(
    job: JobRequest, master: str, *, subdomain: str = "", name: str = CONTAINER, restart: str = "Never"
) -> Manifest:
    """The pod of one node. subdomain: of the headless service by which pods know each other."""
    config = job.k8s
    known = {
        "subdomain": subdomain,
        "schedulerName": config.scheduler,
        "serviceAccountName": config.service_account,
        "nodeSelector": dict(label.split("=", 1) for label in config.node_selector),
    }
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": leave_time(job),
        **{key: value for key, value in known.items() if value},
        **({"schedulingGroup": {"podGroupName": job.name}} if config.gang == "podgroup" else {}),
        "containers": [container(job, master, name)],
        "volumes": volumes(job),
    }


def pod_labels(job: JobRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, **({_PLUGIN: job.name} if job.k8s.gang == "plugin" else {})}


def gang(job: JobRequest) -> list[Manifest]:
    """The object that says that all pods are placed or none, where it is one of its own."""
    if job.k8s.gang == "plugin":
        spec: Manifest = {"minMember": job.nodes}
        version = "scheduling.x-k8s.io/v1alpha1"
    elif job.k8s.gang == "podgroup":
        spec, version = {"schedulingPolicy": {"gang": {"minCount": job.nodes}}}, "scheduling.k8s.io/v1beta1"
    else:
        return []
    return [{"apiVersion": version, "kind": "PodGroup", "metadata": metadata(job, job.name), "spec": spec}]


def failure_policy() -> Manifest:
    """Which ends of a pod count: not a saved run (75) and not an eviction. A recipe that is wrong (2) fails at once."""
    rules: Sequence[Manifest] = (
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [75]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]}},
    )
    return {"rules": list(rules)}
