"""`unisono train` in a process of a cluster that is no rank: a server, or an evaluator."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unisono.launch.rank import under
from unisono.launch.run.membership import Role
from unisono.launch.starters import Started
from unisono.spec.settings import Settings
from unisono.train.state import history
from unisono_contrib import rpc
from unisono_contrib.rpc.meeting import meet_at
from unisono_contrib.train.evaluation import follow
from unisono_contrib.verbs.evaluate import in_words

_LOOK = 0.2  # seconds between two looks into the store


def stand(place: Started, settings: Settings) -> dict[str, Any]:
    """Do what this process is for until the run is over; the object of --json. Raises UsageError L01, L02, F03."""
    store = under.stand_beside(place)
    if place.role is Role.EVALUATOR:
        return _evaluate(place, store, settings)
    if place.role is not Role.SERVER:
        raise ValueError(f"nobody starts a {place.role} so")
    settings.note(f"note  {place.name} serves remote calls of the ranks, until the run is over")
    for _ in _while_alive(store, lambda: store.check(["rpc/worker/0"])):
        rpc.RpcWorker(meet_at(place, store), "", [], 64, 600.0, 30.0, False).shutdown()
    return {"role": str(place.role), "name": place.name}


def _evaluate(place: Started, store: Any, settings: Settings) -> dict[str, Any]:
    """Evaluate each checkpoint of the run whose folder rank 0 names."""
    records, run_dir = list[dict[str, Any]](), None
    with under.reading(store):
        for _ in _while_alive(store, lambda: store.check(["run_dir"])):
            run_dir = Path(json.loads(store.get("run_dir"))["value"]["run_dir"])
    if run_dir is not None:
        folder = run_dir
        for record in follow(folder, lambda: history.ended(folder) or not _is_alive(store)):
            settings.say(in_words(record))
            records.append(record)
    seen = {"run_dir": str(run_dir) if run_dir is not None else None, "evaluations": records}
    return {"role": str(place.role), "name": place.name, **seen}


def _while_alive(store: Any, came: Callable[[], bool]) -> Iterator[None]:
    """Wait for `came` and yield once; not at all if the ranks leave before."""
    while _is_alive(store):
        if came():
            yield
            return
        time.sleep(_LOOK)


def _is_alive(store: Any) -> bool:
    """Whether rank 0, whose store it is, is there."""
    try:
        store.check(["run_token"])
    except (RuntimeError, OSError):
        return False
    return True
