"""What `plan` says of a mixture: the best plans and where they lie, why the next ones lose, whether mixing pays."""

from collections.abc import Mapping
from typing import Any

from unisono.planner.mixed import MixedAnswer
from unisono.planner.mixed_search import Alone, MixedFound
from unisono.planner.mixed_told import because, by_pool, layers_said, placement_json, said, table, waterfall
from unisono.planner.simulate import GIB

_ALIKE = 0.01  # steps that are apart by less are as good as equal


def why(answer: MixedAnswer, best: MixedAnswer) -> str:
    """One sentence: what binds the best plan, or where another loses most against it."""
    own = dict(waterfall(answer))
    if answer is best:
        over = {what: seconds for what, seconds in own.items() if not what.startswith("ideal")}
        what = max(over, key=over.__getitem__)
        return f"the best that fits; most of what it loses to the ideal: {what}, {over[what]:.3g} s"
    slower = answer.price.step / best.price.step - 1.0
    other = dict(waterfall(best))
    worse = {what: own.get(what, 0.0) - other.get(what, 0.0) for what in {*own, *other}}
    what = max(sorted(worse), key=worse.__getitem__)
    return (
        "as fast"
        if slower < 5e-4
        else f"{100 * slower:.1f} % slower, most of it {what}: {worse[what]:.3g} s more"
    )


def pays(found: MixedFound) -> str:
    """Whether the pools together are worth it, in one sentence."""
    fitting = [one for one in found.alone if one.best is not None]
    if not found.best:
        names = " and ".join(one.pool.name for one in fitting)
        return f"mixing is no use: no plan deals this batch to all pools and fits; {names} alone will do"
    both = found.best[0].price.step
    if not fitting:
        return "mixing is needed: no pool alone has a plan that deals this batch and fits"
    first = min(fitting, key=_step)
    gain, name = _step(first) / both, first.pool.name
    devices = sum(one.pool.devices for one in found.alone) / first.pool.devices
    if gain < 1.0 - _ALIKE:
        return f"mixing costs: {name} alone is {1 / gain:.2f} times as fast as all pools together; leave the others out"
    if gain < 1.0 + _ALIKE:
        return f"mixing changes nothing: {name} alone is as fast as all pools together; leave the others out"
    return (
        f"mixing pays: all pools together are {gain:.2f} times as fast as {name} alone, with {devices:.3g} times its"
        " devices"
    )


def _step(one: Alone) -> float:
    return one.best.price.step if one.best else float("inf")


def as_json(found: MixedFound) -> Mapping[str, Any]:
    """The object of the contract, where each plan lies, and each pool alone."""
    return {
        "searched": found.searched,
        "feasible": found.feasible,
        "seconds": found.seconds,
        "priced": found.priced,
        "plans": [_plan(answer, found.best[0]) for answer in found.best],
        "alone": [
            {
                "pool": one.pool.name,
                "devices": one.pool.devices,
                "fits": one.best is not None,
                "step_s": one.best.price.step if one.best else None,
                "plan": str(one.best.question.plan) if one.best else None,
                "micro_batch": one.best.question.micro_batch if one.best else None,
            }
            for one in found.alone
        ],
        "mixing": pays(found),
    }


def _plan(answer: MixedAnswer, best: MixedAnswer) -> dict[str, Any]:
    over = [(seconds, what) for what, seconds in waterfall(answer) if not what.startswith("ideal")]
    return {
        "plan": str(answer.question.plan),
        "micro_batch": answer.question.micro_batch,
        "step_s": answer.price.step,
        "error_pct": 100.0 * answer.trust.error,
        "mem_gib": answer.tightest[1].memory.total / GIB,
        "mfu": answer.mfu,
        "bubble": answer.bubble,
        "exposed_comm_s": answer.price.exposed,
        "bound": max(over)[1],
        "why": why(answer, best),
        "placement": placement_json(answer),
    }


def as_text(found: MixedFound) -> str:
    """The same for people."""
    lines: list[str] = []
    if found.best:
        lines = _best(found)
    lines += ["", "each pool alone"]
    for one in found.alone:
        if one.best is None:
            lines.append(f"  {one.pool.name:<18}  no plan deals this batch to it and fits")
            continue
        ask = one.best.question
        lines.append(
            f"  {one.pool.name:<18}{_step(one):>10.4g} s  {ask.plan}   (micro_batch {ask.micro_batch})"
        )
    if found.best:
        lines.append(f"  {'together':<18}{found.best[0].price.step:>10.4g} s  {found.best[0].question.plan}")
    return "\n".join([*lines, "", pays(found)])


def _best(found: MixedFound) -> list[str]:
    first = found.best[0]
    ask, mixture = first.question, first.question.mixture
    join = mixture.join
    lines = [
        f"cluster    {mixture.name}: {' and '.join(f'{p.devices} {p.device.name}' for p in mixture.pools)}, joined by"
        f" {join.name}, {join.bandwidth / 1e9:g} GB/s a device ({join.sources.get('bandwidth', 'given')})",
        f"stack      {ask.stack.name}: a step is right within about {100 * first.trust.error:.0f} % on average",
        *(f"           less sure: {reason}" for reason in because(first)),
        f"searched   {found.searched:,} plans in all their places in {found.seconds:.2f} s; {found.priced:,} of them"
        f" priced whole, {found.feasible:,} fit",
    ]
    for place, answer in enumerate(found.best, 1):
        row = answer.tightest[1]
        lines += [
            "",
            f"{place}. {answer.question.plan}   (micro_batch {answer.question.micro_batch})",
            f"   {answer.price.step:.4g} s a step, MFU of all together {100 * answer.mfu:.1f} %, bubble"
            f" {100 * answer.bubble:.1f} %, {row.memory.total / GIB:.3g} of {row.capacity / GIB:.3g} GiB on"
            f" {mixture.pools[row.pool].device.name}",
        ]
        if place == 1:
            lines += [f"   {line}" for line in table(answer)]
        else:
            cuts = ", ".join(
                f"{layers_said(rows)} layers a row on {mixture.pools[pool].name}"
                for pool, _, rows in by_pool(answer)
            )
            lines.append(f"   {said(answer)}: {cuts}")
        lines.append(f"   {why(answer, first)}")
    return lines
