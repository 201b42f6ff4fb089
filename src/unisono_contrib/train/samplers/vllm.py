"""Weights for a server of vLLM, by its own four calls over HTTP: `init_weight_transfer_engine`, `start_weight_update`,
`update_weights`, `finish_weight_update`, as its documentation has them (training/weight_transfer, 0.32).

The calls carry names, dtypes and shapes; the tensors go over a group of their own, one broadcast each in that order,
while the server is in `update_weights`. That a server answers 200 does not say that it has loaded anything: what its
`/weight_checker` says of its tensors before and after is compared with what has changed here.
"""

import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from unisono.models.gpt import GPTConfig
from unisono.models.gpt.export import entries_of
from unisono_contrib.train.samplers.errors import SamplerLost, WeightsNotHeld
from unisono_contrib.train.samplers.weights import digest_of

Named = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class VllmCalls:
    """The calls of one server. url: `http://host:port`, of a server with VLLM_SERVER_DEV_MODE=1. timeout: seconds of a
    call. Each raises SamplerLost where the server does not answer, or refuses."""

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Once: how the tensors will come. Answers when the group has met."""
        self._ask("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start_weight_update(self) -> None:
        self._ask("start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Answers when all tensors that it names have come."""
        self._ask("update_weights", {"update_info": dict(update_info)})

    def finish_weight_update(self, version: int) -> None:
        self._ask("finish_weight_update", {"weight_version": str(version)})

    def world_size(self) -> int:
        """Processes of the server that take weights."""
        return int(self._ask("get_world_size")["world_size"])

    def weight_version(self) -> str:
        """What the server was handed last, by its own word; "" where it has no such call."""
        return str(self._ask("weight_info", missing={}).get("weight_version") or "")

    def checksums(self) -> dict[str, str]:
        """By the server's own names, of the tensors that it computes with; empty where it has no such call."""
        return dict(self._ask("weight_checker", {"action": "checksum"}, missing={}).get("checksums", {}))

    def _ask(self, route: str, body: Any = None, missing: Any = None) -> Any:
        """body: None for GET. missing: what a server of an older version, without this route, stands for."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/{route}", data, {"Content-Type": "application/json"} if data else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing is not None:
                return missing
            said = error.read(500).decode(errors="replace").strip()
            raise SamplerLost(self.url, f"/{route} answers {error.code} {said}".rstrip()) from error
        except (OSError, ValueError) as error:
            raise SamplerLost(self.url, f"/{route}: {error}") from error


class VllmSampler:
    """A server that gets weights by version. named(weights): under the names and in the layout of the server's
    checkpoints. address: of this host, as the server sees it. Weights that the server packs for its kernels have no
    checksum, and are not looked at."""

    def __init__(
        self, url: str, named: Named = dict, address: str = "127.0.0.1", timeout: float = 300.0
    ) -> None:
        self._calls, self._named, self._timeout = VllmCalls(url, timeout), named, timedelta(seconds=timeout)
        self._sent: dict[str, str] = {}
        self._version = -1
        world = 1 + self._calls.world_size()
        self._store = TCPStore(address, 0, world, True, self._timeout, wait_for_workers=False)
        info = {
            "master_address": address, "master_port": self._store.port, "rank_offset": 1, "world_size": world,
            "packed": False,
        }  # fmt: skip
        with _beside(lambda: self._calls.init_weight_transfer_engine(info)):
            self._group: Any = ProcessGroupGloo(self._store, 0, world, self._timeout)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send whole weights, and look whether they are there. Raises WeightsNotHeld, SamplerLost."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in self._named(weights).items()}
        digests = {name: digest_of(x) for name, x in tensors.items()}
        before = self._calls.checksums()
        self._calls.start_weight_update()
        info = {
            "names": list(tensors),
            "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
            "shapes": [list(x.shape) for x in tensors.values()],
        }
        with _beside(lambda: self._calls.update_weights(info)):
            for x in tensors.values():
                self._group.broadcast(x, 0).wait()
        self._calls.finish_weight_update(version)
        self._check(version, digests, before, self._calls.checksums())
        self._sent, self._version = digests, version

    def _check(
        self, version: int, digests: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        said = self._calls.weight_version()
        if said and said != str(version):
            raise WeightsNotHeld(self._calls.url, version, (), f"it says version {said}")
        changed = {name for name, digest in digests.items() if self._sent.get(name, "") != digest}
        # A weight that is packed for a kernel leaves an empty tensor behind, and all of these have one checksum.
        often = Counter(after.values())
        same = {
            name.rpartition(":")[2]  # `tp0:lm_head.weight`
            for name, checksum in after.items()
            if checksum == before.get(name) and often[checksum] == 1
        }
        if odd := sorted(changed & same if self._sent else ()):
            raise WeightsNotHeld(self._calls.url, version, odd, f"{len(odd)} of its tensors have not changed")


def hugging_face_names(model: GPTConfig) -> Named:
    """Our GPT's weights under the names, and in the layout, of the model that `unisono export` writes. Raises
    UsageError F01 where no layout fits."""
    layout = model.layout()
    return lambda weights: {entry.name: entry.make() for entry in entries_of(weights, model, layout)}


@contextmanager
def _beside(call: Callable[[], None]) -> Iterator[None]:
    """The call runs in a thread while the body does its part. Raises what the call raises, rather than what the body
    does because of that."""
    failures = list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="unisono-vllm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if failures:
            raise failures[0]
