"""TF_CONFIG, TensorFlow's description of a cluster, as Kubeflow and Vertex AI leave it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from unisono.launch.run.membership import Role
from unisono.launch.starters import Environ, Started, Starter
from unisono.spec.doubtful import parse
from unisono.spec.errors import UsageError

_NAME = "TF_CONFIG"
_ROLES = {"chief": Role.TRAINER, "worker": Role.TRAINER, "ps": Role.SERVER, "evaluator": Role.EVALUATOR}
_PORT = 2222


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int


class TfConfig(Starter):
    """`TF_CONFIG`: chief and workers are the ranks, the chief or worker 0 first; ps and evaluator stand beside them."""

    name: ClassVar[str] = "tf_config"
    turn: ClassVar[int] = 25

    def detect(self, environ: Environ) -> Started | None:
        if not environ.get(_NAME):
            return None
        described = _table(environ[_NAME], "it")
        if not described.get("cluster") and "task" not in described:
            return None  # as TensorFlow has it: this process alone
        cluster = _cluster(described.get("cluster"))
        kind, index = _task(described.get("task"), cluster)
        ranks = [*cluster.get("chief", []), *cluster.get("worker", [])]
        if not ranks:
            _wrong(
                "its cluster has neither a chief nor workers, so nobody trains",
                '"worker": ["HOST:PORT", ...]',
            )
        servers = len(cluster.get("ps", []))
        first = {"chief": 0, "worker": len(cluster.get("chief", [])), "ps": len(ranks)}
        rank = first.get(kind, len(ranks) + servers) + index
        hosts = [address.host for address in ranks]
        trains = _ROLES[kind] is Role.TRAINER
        return Started(
            source=_NAME,
            rank=rank,
            world=len(ranks),
            local_rank=hosts[:rank].count(hosts[rank]) if trains else 0,
            local_world=hosts.count(hosts[rank]) if trains else 1,
            master=ranks[0].host,
            port=ranks[0].port,
            role=_ROLES[kind],
            name=f"{kind}{index}",
            servers=servers,
        )

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        chief, *workers = [f"host{h}:{_PORT + n}" for h, ranks in enumerate(hosts) for n in range(ranks)]
        rank = sum(hosts[:host]) + local_rank
        task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}
        return {_NAME: json.dumps({"cluster": {"chief": [chief], "worker": workers}, "task": task})}


def _wrong(what: str, fix: str) -> NoReturn:
    """One line for one mistake. Raises UsageError L02."""
    raise UsageError(f"{_NAME}: {what}", where=f"process environment: {_NAME}", fix=fix, code="L02")


def _table(value: Any, what: str) -> Mapping[str, Any]:
    """A JSON object, or its text."""
    try:
        table = parse(value.encode()) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        _wrong(
            f"{what} is no JSON ({error})",
            '{"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 0}}',
        )
    if not isinstance(table, Mapping):
        _wrong(f"{what} is {json.dumps(table)}, not a JSON object", "see docs/launch.md")
    return table


def _cluster(value: Any) -> dict[str, list[_Address]]:
    """The addresses of each kind of task."""
    if not value:
        _wrong('there is a task and no "cluster"', '"cluster": {"chief": ["HOST:PORT"], "worker": [...]}')
    cluster = dict[str, list[_Address]]()
    for kind, addresses in _table(value, '"cluster"').items():
        if kind not in _ROLES:
            fix = '"chief"' if kind == "master" else f"one of: {' '.join(_ROLES)}"
            _wrong(f"its cluster has tasks of an unknown type {kind!r}", fix)
        if isinstance(addresses, Mapping):  # TensorFlow's other form: index → address
            if sorted(addresses) != sorted(map(str, range(len(addresses)))):
                _wrong(
                    f"the indices of {kind} are {', '.join(addresses) or 'none'}",
                    "0, 1, 2, ... without a gap",
                )
            addresses = [addresses[str(index)] for index in range(len(addresses))]
        if not isinstance(addresses, list):
            _wrong(f"the addresses of {kind} are no list", f'"{kind}": ["HOST:PORT", ...]')
        cluster[kind] = [_address(text, f"{kind} {index}") for index, text in enumerate(addresses)]
    if (chiefs := len(cluster.get("chief", []))) > 1:
        _wrong(f"its cluster has {chiefs} chiefs", "one chief; the others are workers")
    every = [address for addresses in cluster.values() for address in addresses]
    if twice := next((a for a in every if every.count(a) > 1), None):
        _wrong(f"{twice.host}:{twice.port} is the address of two tasks", "an address for each task")
    return cluster


def _address(text: Any, who: str) -> _Address:
    host, colon, port = (
        text.removeprefix("grpc://").rpartition(":") if isinstance(text, str) else ("", "", "")
    )
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        lacks = "has no port" if isinstance(text, str) and ":" not in text else "is no HOST:PORT"
        _wrong(f"the address of {who}, {text!r}, {lacks}", f"HOST:PORT, as host0:{_PORT}")
    return _Address(host, int(port))


def _task(value: Any, cluster: Mapping[str, Sequence[_Address]]) -> tuple[str, int]:
    """(type, index) of this process."""
    if value is None:
        _wrong(
            'it has no "task": it does not say which one this process is',
            '"task": {"type": "worker", "index": 0}',
        )
    task = _table(value, '"task"')
    kind, index = task.get("type"), task.get("index", 0)
    if kind not in _ROLES:
        known = " ".join(sorted({*cluster, "evaluator"}))
        _wrong(f"the task's type is {json.dumps(kind)}", f"one of: {known}")
    if isinstance(index, str) and index.isdigit():
        index = int(index)
    if type(index) is not int or index < 0:
        _wrong(f"the task's index is {json.dumps(index)}, not a number from 0 on", '"index": 0')
    if kind == "evaluator" and kind not in cluster:
        return kind, index  # it is no part of TensorFlow's training cluster
    if kind not in cluster:
        _wrong(
            f"the task is a {kind}, and the cluster has none", f'"{kind}": ["HOST:PORT", ...] in "cluster"'
        )
    if index >= len(cluster[kind]):
        _wrong(f"the task is {kind} {index}, and the cluster has {len(cluster[kind])} of them",
               f'an "index" below {len(cluster[kind])}, or {index + 1} addresses')  # fmt: skip
    return kind, index
