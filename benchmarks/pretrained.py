"""What a rank's memory takes while it loads a pretrained model: `python benchmarks/pretrained.py`

Makes a folder of safetensors of about 400 MB (`--mb`), in several files, and builds a run from it on forked ranks under
each plan (`--plan`, again and again); with `--hf` it is read as a model of transformers. All are MiB. new: anonymous
memory of the fullest rank at its most, beyond what it had before (a small model was built before that, for what Python
draws in at its first); share: weights that it holds in the end; model: all weights. The optimiser keeps nothing.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from unisono.config import ModelConfig, Recipe, resolve
from unisono.launch.fork_server import ForkServer

PLANS = ("shard=4", "tp=2 pp=2", "shard=2 tp=2", "dp=1")
SIZES = {
    "d_model": 640, "n_head": 10, "context": 64, "vocab": 256, "bias": False, "tie_embeddings": False,
    "positions": "rotary", "norm": "rms", "activation": "swiglu",
}  # fmt: skip
LAYER_MB = 4 * 12 * SIZES["d_model"] ** 2 / 1e6
MIB = 2.0**20


def anonymous_mib() -> float:
    """Of this process, as it is now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


class Watch:
    """The most anonymous memory while it lasts, looked at every 2 ms."""

    def __enter__(self) -> "Watch":
        self.before = self.most = anonymous_mib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous_mib())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, anonymous_mib())


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, place_of

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 120.0)
    connect(place, ctx.store)
    # Before, a small one of drawn weights: what Python and torch draw in at their first model is not the weights'.
    small = ModelConfig.model_validate(argument["small"])
    first = resolve(Recipe(model=small, train=resolved.recipe.train), argument["plan"], ctx.world)
    build(first.recipe, first.plan, place, corpus, Recorder(ctx.rank))
    began = time.perf_counter()
    with Watch() as watch:
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    seconds = time.perf_counter() - began
    held = {slot.master.untyped_storage().data_ptr(): slot.master.nbytes for slot in run.local.slots}
    run.mesh.world.barrier()
    return {"new": watch.most - watch.before, "share": sum(held.values()) / MIB, "seconds": seconds}


def written(folder: Path, megabytes: float) -> ModelConfig:
    """A folder of about so many megabytes; the model that it holds."""
    from unisono.models.build import Facts, build
    from unisono.models.folder import write_tensors
    from unisono.models.gpt.export import entries_of
    from unisono.models.init import initialise

    width = {"d_model": 40} if megabytes < LAYER_MB else {}
    config = ModelConfig(**(SIZES | width), n_layer=max(4, round(megabytes / LAYER_MB)))
    model = build(config, Facts(), "cpu")
    initialise(model, 0)
    state = {name: p.detach() for name, p in model.named_parameters()}
    config.export(state, folder, None)  # for config.json; its one file gives way to several
    (folder / "model.safetensors").unlink()
    write_tensors(folder, entries_of(state, config, "llama"), limit=int(megabytes * 1e6 / 3))
    return config


def main_command() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=400.0)
    parser.add_argument("--plan", action="append", default=[])
    parser.add_argument("--hf", action="store_true", help="played by transformers' own Llama, not by our gpt")
    given = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "words.txt").write_text("any words will do, for nothing is trained\n" * 200)
        config = written(folder, given.mb)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(
            f"{size / 1e6:.0f} MB in {len(list(folder.glob('*.safetensors')))} files, {config.depth} blocks"
        )
        print(f"{'plan':<16}{'model MiB':>10}{'share MiB':>10}{'new MiB':>9}{'new/share':>10}{'seconds':>9}")
        ours = config.model_dump(exclude_unset=True) | {"weights": str(folder)}
        keys = {"kind": f"hf:{folder}", "context": 64} if given.hf else ours
        small = {"kind": f"hf:{folder / 'small'}", "context": 64} if given.hf else SIZES | {"d_model": 40}
        if given.hf:
            written(folder / "small", 1.0)
        train = {"global_batch": 4, "micro_batch": 1, "optimizer": "sgd", "momentum": 0.0}
        text = json.dumps({"model": keys, "data": {"source": f"text:{folder / 'words.txt'}"}, "train": train})
        with ForkServer("pretrained:main", path=[str(Path(__file__).parent)]) as nursery:
            for plan in given.plan or PLANS:
                ranks = resolve(Recipe.model_validate_json(text), plan).plan.world
                argument = {"recipe": text, "plan": plan, "small": small}
                outcome = nursery.run(argument, ranks, 1, timeout=120.0)
                if outcome.error is not None:
                    raise outcome.error
                full = max((r or {} for r in outcome.results), key=lambda r: r["new"] / r["share"])
                worst = max(worst, full["new"] / full["share"])
                line = f"{plan:<16}{size / MIB:>10.0f}{full['share']:>10.1f}{full['new']:>9.1f}"
                print(f"{line}{full['new'] / full['share']:>10.2f}{full['seconds']:>9.2f}")
    print(f"at most {worst:.2f} times its share")
    return 0 if worst <= 1.3 else 1


if __name__ == "__main__":
    sys.exit(main_command())
