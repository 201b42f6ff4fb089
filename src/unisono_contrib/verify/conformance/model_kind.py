"""What every model kind owes: a module of three parts as deep as declared, and prices that count its weights."""

from collections.abc import Iterator
from pathlib import Path

from unisono.models.build import build
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig, model_keys

FACTS = Facts(vocab=64, classes=10, sample_shape=(1, 8, 8), rows=(7, 5))


def faults(member: ModelConfig, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a kind, a sentence each: it says what it reads, shares keys by one type, and, where it is
    played, has stem, blocks, head, loss and anatomy, `depth` blocks, and as many weights as its workload says."""
    kind = type(member)
    if member.reads not in ("", "tokens", "pictures", "clicks"):
        yield f"it reads {member.reads!r}, which no data source gives"
    for key, field in kind.model_fields.items():
        if key != "kind" and key in model_keys() and model_keys()[key].annotation != field.annotation:
            yield f"its key {key} is of another type than that of another kind"
    if not kind.played:
        return
    try:
        model = build(member, FACTS)
    except UsageError as error:
        yield f"it cannot be built from what data says: {error.what}"
        return
    lacking = [part for part in ("stem", "blocks", "head", "loss", "anatomy") if not hasattr(model, part)]
    if lacking:
        yield f"its module has no {', '.join(lacking)}"
        return
    if member.depth is not None and member.depth != len(model.blocks):  # type: ignore[arg-type]
        yield f"it declares a depth of {member.depth} and has {len(model.blocks)} blocks"  # type: ignore[arg-type]
    if not member.attends:
        count, priced = sum(p.numel() for p in model.parameters()), member.workload(FACTS).parameters
        if count != priced:
            yield f"it has {count} parameters and is priced with {priced}"
