"""How long three famous models take to train, computed again from their arithmetic; and which device a figure is of.

    python benchmarks/founding_table.py
    python benchmarks/founding_table.py --json

The text that this project began with says of one A100: ResNet-101 44 hours, BERT-Base 84 hours, GPT-3 175B 3,100,000
hours. Each figure implies a speed; the speed that the last one implies is a V100's: "355 years" was said of one V100 at
28 TFLOP/s in 2020 (Li, "OpenAI's GPT-3 language model: a technical overview", Lambda, from memory; Wang et al., 2023,
quote it as V100 years). What an A100 would take is priced by `unisono.planner` where that has a price, and a band of
utilisations otherwise, and says which.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from unisono.plan import Plan
from unisono.planner.clusters import of_size
from unisono.planner.search import Space, search
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.planner.work.transformer import Transformer

A100, V100 = 312e12, 125e12  # dense FLOP/s in half precision, of their data sheets
# ImageNet-1k once, and the usual epochs (Goyal et al., 2017).
IMAGES, EPOCHS = 1_281_167, 90
# Images of ResNet-50 that one A100 trains in a second, in TF32 and in mixed precision: NVIDIA DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5. Deeper nets of the same blocks are taken to reach the same FLOP/s.
RESNET50_IMAGES = (938.0, 2470.0)
# BERT: 1,000,000 steps of 256 samples, 90 % of them with 128 tokens and the rest with 512 (Devlin et al., 2018).
BERT_STEPS, BERT_BATCH = ((900_000, 128), (100_000, 512)), 256
GPT3_TOKENS = 300e9  # Brown et al., 2020, table 2.1
GPT3_BATCH = 1536  # 3.1 million tokens; theirs grew to 3.2 million


@dataclass(frozen=True, slots=True)
class Row:
    """said: hours of the founding text. flops: of the whole training. hours: on one A100, low and high. how: they were
    found."""

    name: str
    parameters: float
    said: float
    flops: float
    hours: tuple[float, float]
    how: str

    @property
    def implied(self) -> float:
        """FLOP/s at which `said` hours would do."""
        return self.flops / (self.said * 3600)


def bottlenecks(blocks: tuple[int, ...], size: int = 224) -> tuple[int, int]:
    """(parameters, FLOP of one image forward) of a ResNet of bottleneck blocks (He et al., 2015), v1.5 strides."""
    side = size // 2
    weights = 7 * 7 * 3 * 64
    flops, norms, before = 2 * weights * side * side, 64, 64
    side //= 2  # the pooling
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for number in range(count):
            stride = 2 if stage and not number else 1
            after = side // stride
            parts = [(before * width, side), (9 * width * width, after), (4 * width * width, after)]
            if not number:
                parts.append((4 * before * width, after))
                norms += 4 * width
            weights += sum(weight for weight, _ in parts)
            flops += sum(2 * weight * place * place for weight, place in parts)
            norms, before, side = norms + 6 * width, 4 * width, after
    weights, flops = weights + before * 1000, flops + 2 * before * 1000
    return weights + 2 * norms + 1000, flops


def resnet101() -> Row:
    parameters, forward = bottlenecks((3, 4, 23, 3))
    flops = 3.0 * forward * IMAGES * EPOCHS
    speeds = [3.0 * bottlenecks((3, 4, 6, 3))[1] * images for images in RESNET50_IMAGES]
    low, high = flops / max(speeds) / 3600, flops / min(speeds) / 3600
    return Row("ResNet-101", parameters, 44.0, flops, (low, high), "band: ResNet-50's measured FLOP/s")


def bert(context: int) -> Transformer:
    """BERT-Base as a stack of blocks. Its own head predicts 15 % of the positions; here all of them are charged."""
    return Transformer(12, 12, 768, context, 30_522, 12, 3072, noisy=True)


def bert_base() -> Row:
    where = of_size("dgx-a100", 1)
    flops = seconds = 0.0
    for steps, context in BERT_STEPS:
        model = bert(context)
        flops += steps * model.step_flops(BERT_BATCH)
        micro = 64 * 128 // context
        plan = Plan.parse(f"precision=bf16 micros={BERT_BATCH // micro}")
        ask = PlanRequest(model, plan, where, stack("plain"), micro, BERT_BATCH // micro)
        seconds += steps * simulate(ask).price.step
    error = stack("plain").error
    hours = (seconds / 3600 * (1 - error), seconds / 3600 * (1 + error))
    return Row(
        "BERT-Base", bert(512).workload.parameters, 84.0, flops, hours, "priced on one A100, stack plain"
    )


def gpt3() -> Transformer:
    return Transformer(96, 96, 12288, 2048, 51_200, 96, 4 * 12288, noisy=True)


def gpt3_175b() -> Row:
    flops = gpt3().step_flops(1) * GPT3_TOKENS / 2048
    hours = gpt3_hours("dgx-a100", "bf16")
    return Row(
        "GPT-3 175B", gpt3().workload.parameters, 3.1e6, flops, hours, "priced on 1,024 A100, device-hours"
    )


def gpt3_hours(cluster: str, precision: str) -> tuple[float, float]:
    """Device-hours of GPT-3 on 1,024 devices under the best plan that fits, less and more the mean error."""
    where = of_size(cluster, 1024)
    made = stack({"dgx-a100": "megatron-2022", "dgx-v100": "megatron-2021"}[cluster])  # as that of 2020 ran
    space = Space(gpt3(), where, made, GPT3_BATCH, None, Plan.parse(f"precision={precision}"))
    best = search(space, top=1).best[0]
    hours = best.price.step * GPT3_TOKENS / (GPT3_BATCH * 2048) * 1024 / 3600
    return hours * (1 - made.error), hours * (1 + made.error)


def sentences(rows: list[Row], on_v100: tuple[float, float]) -> list[str]:
    """What the table shows."""
    last = rows[-1]
    years = last.said / 24 / 365
    other = [row.implied / A100 for row in rows[:-1]]
    return [
        f"ResNet-101's and BERT-Base's hours mean {100 * other[0]:.0f} and {100 * other[1]:.0f} % of an A100's peak.",
        f"GPT-3's mean {last.implied / 1e12:.0f} TFLOP/s: {100 * last.implied / A100:.0f} % of an A100's peak, less"
        f" than either, for larger matrices; of a V100's it is {100 * last.implied / V100:.0f} %.",
        f"It is 3.14e23 FLOP at 28 TFLOP/s, {years:.0f} years: what was said in 2020 of one V100.",
        f"Priced: {last.hours[0]:,.0f} to {last.hours[1]:,.0f} hours of an A100, {on_v100[0]:,.0f} to"
        f" {on_v100[1]:,.0f} of a V100.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Hours to train ResNet-101, BERT-Base and GPT-3 on one A100."
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, on_v100 = [resnet101(), bert_base(), gpt3_175b()], gpt3_hours("dgx-v100", "fp16")
    if options.json:
        table = [asdict(row) | {"implied_tflops": row.implied / 1e12} for row in rows]
        print(json.dumps({"schema_version": 1, "rows": table, "gpt3_on_v100_hours": on_v100}))
        return 0
    print(f"{'':<12}{'parameters':>12}{'FLOP':>11}{'said, h':>12}{'means':>14}{'of A100':>9}  one A100, h")
    for row in rows:
        print(
            f"{row.name:<12}{row.parameters / 1e6:>10,.0f} M{row.flops:>11.2e}{row.said:>12,.0f}"
            f"{row.implied / 1e12:>8.1f} TFLOP/s{100 * row.implied / A100:>6.1f} %"
            f"  {row.hours[0]:,.0f} to {row.hours[1]:,.0f} ({row.how})"
        )
    print()
    print("\n".join(sentences(rows, on_v100)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
