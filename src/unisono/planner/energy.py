"""What a training costs: device-hours, money, energy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unisono.planner.machines.cluster import Cluster, Source

_SURVEY = Source(
    "specification", "Uptime Institute, Global Data Center Survey, 2023: mean; largest 1.1 to 1.2"
)
# Power of a whole data centre beside that of its computers.
PUE: Annotated[float, _SURVEY] = 1.58


@dataclass(frozen=True, slots=True)
class Bill:
    """hours: of one device, times devices. dollars: None without a price of an hour. kwh: None without watts.

    Energy is thermal design power all the time, times `pue`. Hosts, network and storage are not counted, and devices
    that wait draw less: the two errors have opposite signs.
    """

    hours: float
    dollars: float | None
    kwh: float | None
    pue: float


def bill(cluster: Cluster, devices: int, seconds: float, pue: float = PUE) -> Bill:
    """Of `devices` for `seconds`."""
    hours = devices * seconds / 3600.0
    dollars = hours * cluster.cost_per_hour if cluster.cost_per_hour is not None else None
    kwh = hours * cluster.device.watts / 1000.0 * pue if cluster.device.watts else None
    return Bill(hours, dollars, kwh, pue)


def as_json(got: Bill) -> Mapping[str, Any]:
    """The keys that `simulate --json` gains; `cost` is there already."""
    return {"device_hours": got.hours, "energy_kwh": got.kwh, "pue": got.pue}


def as_text(got: Bill) -> str:
    parts = [f"{got.hours:,.0f} device-hours" if got.hours >= 10 else f"{got.hours:.2g} device-hours"]
    if got.dollars is not None:
        parts.append(f"{got.dollars:,.0f} (at cost_per_hour)")
    if got.kwh is not None:
        said = f"{got.kwh:,.0f}" if got.kwh >= 10 else f"{got.kwh:.2g}"
        parts.append(f"{said} kWh (design power of the devices, times a PUE of {got.pue:g})")
    return f"cost       {', '.join(parts)}"
