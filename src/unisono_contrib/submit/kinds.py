"""The kinds of a job on Kubernetes: a function each, from the job to what kubectl applies. No torch."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from unisono_contrib.submit import pods
from unisono_contrib.submit.job import PORT, JobRequest
from unisono_contrib.submit.pods import Manifest


def job_spec(job: JobRequest, master: str, subdomain: str, backoff: int) -> Manifest:
    """An Indexed Job: pod i is node i. backoff: failures of pods that it bears."""
    seconds = job.config.seconds
    gang = (
        {"scheduling": {"schedulingPolicy": {"gang": {"minCount": job.nodes}}}}
        if job.k8s.gang == "scheduling"
        else {}
    )
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": backoff,
        **({"activeDeadlineSeconds": seconds} if seconds else {}),
        "podFailurePolicy": pods.failure_policy(),
        **gang,
        "template": {
            "metadata": {"labels": pods.pod_labels(job)},
            "spec": pods.pod_spec(job, master, subdomain=subdomain),
        },
    }


def plain_job(job: JobRequest) -> Sequence[Manifest]:
    """batch/v1: a headless service, by which pod 0 has a name before it has an address, and an Indexed Job."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            # A rank looks for the first one before that is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    return [
        service,
        *pods.gang(job),
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": pods.metadata(job, job.name, pods.queued(job)),
            # A failure of one node ends the ranks of all, so all pods count it.
            "spec": job_spec(job, f"{job.name}-0.{job.name}", job.name, job.config.restarts * job.nodes),
        },
    ]


def job_set(job: JobRequest) -> Sequence[Manifest]:
    """jobset.x-k8s.io/v1alpha2: one replicated job, whose pods have names, and which starts again as a whole."""
    name = pods.CONTAINER
    spec = job_spec(job, f"{job.name}-{name}-0-0.{job.name}", "", 0)
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(job, job.name, pods.queued(job)),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.config.restarts},
            "replicatedJobs": [{"name": name, "replicas": 1, "template": {"spec": spec}}],
        },
    }
    return [*pods.gang(job), manifest]


def train_job(job: JobRequest) -> Sequence[Manifest]:
    """trainer.kubeflow.org/v1alpha1: Kubeflow's runtime says how pods meet, by variables of torchrun's."""
    patch = {
        "serviceAccountName": job.k8s.service_account,
        "nodeSelector": dict(label.split("=", 1) for label in job.k8s.node_selector),
    }
    pod = {
        **{key: value for key, value in patch.items() if value},
        "terminationGracePeriodSeconds": pods.leave_time(job),
        "volumes": pods.volumes(job),
        "containers": [{"name": pods.CONTAINER, "volumeMounts": pods.mounts(job)}],
    }
    patched = {"name": pods.CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
    seconds = job.config.seconds
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata(job, job.name, pods.queued(job)),
        "spec": {
            **({"activeDeadlineSeconds": seconds} if seconds else {}),
            "runtimeRef": {"name": job.k8s.runtime},
            "runtimePatches": [
                {
                    "manager": "unisono/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
                }
            ],
            "trainer": {
                "image": job.k8s.image,
                "command": pods.command(job, ""),
                **({"env": pods.variables(job)} if job.variables else {}),
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "resourcesPerNode": pods.resources(job),
            },
        },
    }
    return [manifest]


def pytorch_job(job: JobRequest) -> Sequence[Manifest]:
    """kubeflow.org/v1, of the older training operator: a master and workers."""
    seconds = job.config.seconds
    template = {
        "metadata": {"labels": pods.pod_labels(job)},
        # The operator knows the container by this name.
        "spec": pods.pod_spec(job, "", name="pytorch", restart="OnFailure"),
    }
    workers = {"Worker": {"replicas": job.nodes - 1, "restartPolicy": "OnFailure", "template": template}}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job, job.name, pods.queued(job)),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {
                "backoffLimit": job.config.restarts * job.nodes,
                **({"activeDeadlineSeconds": seconds} if seconds else {}),
            },
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": template},
                **(workers if job.nodes > 1 else {}),
            },
        },
    }
    return [manifest]


KINDS: Mapping[str, Callable[[JobRequest], Sequence[Manifest]]] = MappingProxyType(
    {"job": plain_job, "jobset": job_set, "trainjob": train_job, "pytorchjob": pytorch_job}
)
