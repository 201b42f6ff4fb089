"""What `unisono lab` tells at the end: bytes of each link, beside those that the run counted itself."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.spec import words
from unisono.spec.errors import UnisonoError
from unisono.verbs import CommandCall

if TYPE_CHECKING:
    from unisono_contrib.lab.links import LabLink
    from unisono_contrib.lab.network import DeviceBytes


@dataclass(frozen=True, slots=True)
class Tally:
    """Where a run of `unisono train` will write what it counts, and what stood there before; nowhere for a command
    that is none."""

    folder: Path | None
    begun: float
    before: Mapping[Path, int]  # bytes of each file

    @classmethod
    def begin(cls, call: CommandCall) -> "Tally":
        folder = _folder_of(call)
        return cls(folder, time.time(), {file: file.stat().st_size for file in _files(folder)})

    def payload(self) -> int | None:
        """Bytes that the ranks sent in all steps since, as they count them; None where no run says so."""
        written = [file for file in _files(self.folder) if file.stat().st_mtime >= self.begun - 1]
        if not written:
            return None
        newest = max(written, key=lambda file: file.stat().st_mtime).parent  # of one run, a file a rank
        mine = [file for file in written if file.parent == newest]
        return sum(sum(_sent(file.read_bytes()[self.before.get(file, 0) :])) for file in mine)


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.rglob("events/rank*.jsonl"))


def _sent(text: bytes) -> Iterator[int]:
    """Bytes that one rank sent in each step."""
    for line in text.splitlines():
        with suppress(ValueError):
            step = json.loads(line)
            if isinstance(step, dict) and isinstance(step.get("bytes"), dict):
                yield sum(step["bytes"].values())


def _folder_of(call: CommandCall) -> Path | None:
    """The folder of the runs of the recipe that a command trains."""
    command = list(call.args.command)
    at = next((n for n, word in enumerate(command) if Path(word).name == "unisono"), None)
    if at is None or command[at + 1 : at + 2] != ["train"]:
        return None
    from unisono.verbs import VERBS
    from unisono.verbs._recipe import loaded
    from unisono.verbs.train import resumed

    with suppress(UnisonoError):  # the command itself will tell what is wrong
        train_call = VERBS.find("train")().read(command[at + 2 :], call.settings, call.environ)
        if train_call.args.resume is not None:
            return resumed(train_call.args.resume)[0]
        recipe = loaded(train_call, train_call.args.file, demo=train_call.args.demo).recipe
        return Path(recipe.out.dir, recipe.name)
    return None


def table(
    carried: "Sequence[DeviceBytes]", payload: int | None, link: "LabLink", seconds: float
) -> list[str]:
    """The closing lines of a lab."""
    from unisono_contrib.lab.links import host_name

    lines = [f"{'link':<8}{'sent':>12}{'received':>12}   of its rate"]
    for host, traffic in enumerate(carried):
        busiest = max(traffic.sent, traffic.received)
        share = words.percent(8 * busiest / link.rate / seconds) if link.rate else "-"
        lines.append(
            f"{host_name(host):<8}{words.nbytes(traffic.sent):>12}{words.nbytes(traffic.received):>12}   {share}"
        )
    total = sum(traffic.sent for traffic in carried)
    said = f"all     {words.nbytes(total):>12}   "
    if payload:
        said += f"payload {words.nbytes(payload)}, as the run counts it ({total / payload:.3f} bytes a byte)"
    else:
        said += "payload not counted: no run of unisono train"
    return [*lines, said]
