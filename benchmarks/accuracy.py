"""What quantization costs trained networks, and what gets it back: PTQ, mixed precision, QAT.

    python benchmarks/accuracy.py [ptq] [blocks] [sensitivity] [mixed] [qat] [--images N]
    python benchmarks/accuracy.py streets [--weights FILE …] [--streets N] [--formats W8A8 …]
    python benchmarks/accuracy.py ranks
    python benchmarks/accuracy.py searches [--first SEED] [--streets N]
    python benchmarks/accuracy.py pandaset --data FOLDER

ResNet-20 on CIFAR-10 images and the MNIST net, public weights (`_trained_nets.py`). Differences
are points of accuracy against float in the same run on the same images; noise is that of the
outputs against the float ones. The standard error of a difference of d points on n images is at
least √(d/100/n)·100 (0.4 points for d = 3, n = 2,000). Ranges come from the first 256 training
images, which for CIFAR-10 are of three classes.

`streets` compares trained BEVFusion models on generated streets (`_streets.py`), `ranks` the orders
of estimated and measured sensitivities of both shipped detectors, `searches` ranges searched by the
output and by the loss (`_search_peers.py`), `pandaset` a LiDAR detector on real labels
(`_pandaset.py`). They run only where named.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
import torch
from _machine import print_machine
from _pandaset import cross_validate
from _rounding_peers import adaround, equalized, reconstruct
from _search_peers import compare_searches
from _streets import FORMATS, compare_ranks, compare_streets
from _trained_nets import Task, accuracy, cifar10, mnist
from torch import Tensor, nn

import bevquant_qnn._round_weights as rounding
from bevquant_fusion import fuse_model
from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PrecisionPlan,
    QuantConfig,
    apply_precision,
    assign_precision,
    distillation_loss,
    estimate_sensitivity,
    freeze,
    learn_ranges,
    precision_groups,
    quantize_model,
    refine_plan,
    round_weights,
    sensitivity,
)
from bevquant_quantizers import calibrate

CALIBRATION = 256
Prepare = Callable[[nn.Module, Tensor], nn.Module]


def folded(task: Task) -> nn.Module:
    """The float network, batch norms folded."""
    return fuse_model(task.make(), task.calibration[0][:2]).model


def quantized(
    model: nn.Module, images: Tensor, bits: int = 8, method: str = "mse", **config: object
) -> nn.Module:
    """A calibrated copy: weights of `bits`, activations of 8."""
    settings = QuantConfig(weight_bits=bits, **config)
    result = quantize_model(model, settings, images[:2]).model
    calibrate(result, images[:CALIBRATION].split(64), method=method, progress=False)
    return result


@torch.no_grad()
def sqnr(model: nn.Module, exact: nn.Module, images: Tensor) -> float:
    """Power of the float outputs over that of the difference, dB."""
    f, q = (torch.cat([net(x) for x in images.split(250)]) for net in (exact, model))
    return float(10 * torch.log10(f.square().sum() / (f - q).square().sum()))


class Table:
    """Rows of accuracy, its difference to float, and SQNR."""

    def __init__(self, task: Task, exact: nn.Module) -> None:
        self.task, self.exact = task, exact
        self.float = accuracy(exact, *task.test)
        print(f"\n{task.name}: {len(task.test[1]):,} test images, float {self.float:.2f} %")
        print(f"{'':38} {'accuracy':>9} {'to float':>9} {'SQNR dB':>8} {'CPU s':>8}")

    def row(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """Print what the model that `make` makes is worth, and return it."""
        start = time.process_time()
        model = make()
        seconds = time.process_time() - start
        value = accuracy(model, *self.task.test)
        noise = sqnr(model, self.exact, self.task.test[0][:1000])
        print(
            f"{name:38} {value:9.2f} {value - self.float:+9.2f} {noise:8.1f} {seconds:8.1f}",
            flush=True,
        )
        return model


def pairs_of(model: nn.Module) -> list[tuple[str, str]]:
    """Convolutions with nothing but ReLU and pooling between them."""
    names = {name for name, _ in model.named_modules()}
    if "conv2" in names:
        return [("conv1", "conv2")]
    return [(n, n[:-1] + "2") for n in sorted(names) if n.endswith(".conv1")]


def rounded(model: nn.Module, images: Tensor, **options: object) -> nn.Module:
    round_weights(model, images[:CALIBRATION].split(64), **options)
    return model


def adarounded(model: nn.Module, images: Tensor) -> nn.Module:
    """`round_weights` with AdaRound in the place of GPTQ."""
    own, rounding.gptq = rounding.gptq, adaround
    try:
        return rounded(model, images)
    finally:
        rounding.gptq = own


def ptq(task: Task) -> None:
    exact, images = folded(task), task.calibration[0]
    table = Table(task, exact)
    level = equalized(exact, pairs_of(exact))

    def run(name: str, bits: int, prepare: Prepare | None = None, **config: object) -> None:
        net = level if "equalized" in name else exact

        def make() -> nn.Module:
            model = quantized(net, images, bits, **config)
            return model if prepare is None else prepare(model, images)

        table.row(name, make)

    for method in ("max", "percentile", "entropy"):
        run(f"W8A8 {method}", 8, method=method)
    for bits in (8, 4):
        run(f"W{bits}A8 mse", bits)
        run("  equalized", bits)
        run("  biases corrected", bits, partial(rounded, rounding="nearest"))
        run("  gptq", bits, partial(rounded, correct_bias=False))
        run("  gptq, biases corrected", bits, rounded)
    run("  AdaRound, biases corrected", 4, adarounded)
    for bits in (8, 4):
        run(f"W{bits}A8 mse, one range a weight", bits, weight_per_channel=False)
        run("  equalized", bits, weight_per_channel=False)
        run("  gptq, biases corrected", bits, rounded, weight_per_channel=False)


def blocks_of(model: nn.Module) -> list[str]:
    """Paths of ResNet-20's blocks and single layers; the MNIST net is one block."""
    stages = [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)]
    return ["conv1", *stages, "linear"] if hasattr(model, "layer1") else [""]


def blocks(task: Task) -> None:
    """W4A8: GPTQ, and BRECQ from the nearest and from GPTQ's numbers, by all 1,000 images."""
    exact, images = folded(task), task.calibration[0]
    table, nearest = Table(task, exact), quantized(exact, images, 4)
    batches = images.split(64)

    def greedy() -> nn.Module:
        model = copy.deepcopy(nearest)
        round_weights(model, batches)
        return model

    def learned(start: nn.Module) -> nn.Module:
        model = copy.deepcopy(start)
        for path in blocks_of(model):
            reconstruct(model, exact, path, batches)
        return model

    start = table.row("W4A8 gptq, biases corrected", greedy)
    table.row("  BRECQ", partial(learned, nearest))
    table.row("  BRECQ from gptq", partial(learned, start))


def sensitivity_cost(task: Task) -> None:
    """Seconds of `sensitivity` against those of the plain loop of full runs."""
    exact, images = folded(task), task.calibration[0]
    model, batches = quantized(exact, images), list(images[:32].split(16))
    sensitivity(model, batches[:1])  # what is compiled, is
    groups = precision_groups(model)

    def plain() -> None:
        with torch.no_grad():
            for chosen in [None, *groups]:
                for on in (True, False):
                    for group in groups:
                        for q in group.quantizers:
                            q._disabled = (group is chosen) != on
                    for batch in batches:
                        model(batch)
        for group in groups:
            for q in group.quantizers:
                q._disabled = False

    times: dict[str, list[float]] = {"plain": [], "records": []}
    for _ in range(3):
        for name, run in (("plain", plain), ("records", lambda: sensitivity(model, batches))):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    slow, fast = (sorted(times[name])[1] for name in ("plain", "records"))
    print(
        f"\n{task.name}: sensitivity of {len(groups)} groups, {slow:.2f} CPU seconds by full runs, "
        f"{fast:.2f} by records: {slow / fast:.2f} times as fast"
    )
    _estimate_cost(task, exact, images)


def _estimate_cost(task: Task, exact: nn.Module, images: Tensor) -> None:
    """What `estimate_sensitivity` takes of `sensitivity`'s time, and how far it is from it."""
    model, batches = quantized(exact, images), list(images[:128].split(64))
    tables, seconds = [], []
    for measure in (partial(sensitivity, without=False), estimate_sensitivity):
        measure(model, batches[:1])  # what is compiled, is
        start = time.process_time()
        tables.append(measure(model, batches))
        seconds.append(time.process_time() - start)
    apart = [two.alone["int8"] - one.alone["int8"] for one, two in zip(*tables, strict=True)]
    mean = math.fsum(apart) / len(apart)
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in apart) / len(apart))
    print(
        f"{task.name}: each group alone, {seconds[0]:.2f} CPU seconds measured, {seconds[1]:.2f} "
        f"estimated; off by {mean:+.1f} dB in the mean, deviation {deviation:.1f}, at most "
        f"{max(map(abs, apart)):.1f}"
    )


def mixed(task: Task) -> None:
    """Plans against hand lists of the same time."""
    exact, images = folded(task), task.calibration[0]
    base = quantized(exact, images)
    kinds = ("int4", "int8", "int16")
    batches = images[:128].split(64)
    measured = sensitivity(base, batches, precisions=kinds)
    whole = sum(row.operations for row in measured)
    table = Table(task, exact)
    last = precision_groups(base)[-1].name
    hands = {
        "int8, first and last in float": ({"conv1": "float", last: "float"}, "int8"),
        "int8, first three in float": (
            {g.name: "float" for g in precision_groups(base)[:3]},
            "int8",
        ),
        "int4, first and last in float": ({"conv1": "float", last: "float"}, "int4"),
    }
    for name, (hand, default) in hands.items():
        by_hand = PrecisionPlan.by_hand(base, hand, default)
        cost = [measured[g.modules[0]].operations * BIT_OPERATIONS[g.precision] for g in by_hand]
        time_of = sum(cost) / whole
        budget = Budget(time=time_of)
        plan = assign_precision(base, measured, budget)
        start = time.process_time()
        refined = refine_plan(base, plan, batches, measured, budget)
        spent = time.process_time() - start
        for label, chosen in (
            (name, by_hand),
            (f"  estimated plan, time {plan.time:.3f}", plan),
            (f"  the best of {refined.tried} measured", refined.plan),
        ):
            model = copy.deepcopy(base)
            apply_precision(model, chosen)
            table.row(label, lambda m=model: m)
        print(
            f"{'':38} on the images it was measured on: estimated {plan.score:.1f} dB, that plan "
            f"{refined.start.score:.1f}, the best {refined.plan.score:.1f}; {spent:.0f} CPU seconds"
        )


def qat(task: Task, epochs: int = 6) -> None:
    """W4A8: a short training on the 1,000 images, by labels or by the float model's outputs.

    These images are re-encoded as JPEG, those of the float model's training were not: labels also
    teach what that changes, so that row may end above float. Distillation cannot.
    """
    exact, (images, labels) = folded(task), task.calibration
    table = Table(task, exact)
    start = table.row("W4A8 mse, PTQ", lambda: quantized(exact, images, 4))
    lost = table.float - accuracy(start, *task.test)
    for name, distil, learn in (
        ("QAT, labels", False, False),
        ("QAT, distillation", True, False),
        ("QAT, distillation, LSQ", True, True),
    ):
        make = lambda d=distil, s=learn: trained(  # noqa: E731
            copy.deepcopy(start), exact, images, labels, epochs, distil=d, learn=s
        )
        model = table.row(name, make)
        back = lost - (table.float - accuracy(model, *task.test))
        print(f"{'':38} {100 * back / lost if lost else math.nan:.0f} % of PTQ's loss came back")


def trained(
    model: nn.Module,
    exact: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    *,
    distil: bool,
    learn: bool,
) -> nn.Module:
    """Train by Adam with a cosine rate, mirrored images, batches of 50; ranges fixed or learned."""
    torch.manual_seed(0)
    weights = list(model.parameters())
    groups = [{"params": weights, "lr": 3e-4}]
    if learn:
        groups.append({"params": learn_ranges(model), "lr": 1e-3})
    optimizer = torch.optim.Adam(groups)
    total = epochs * math.ceil(len(images) / 50)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(50):
            x = images[chosen]
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
            output = model(x)
            if distil:
                with torch.no_grad():
                    teacher = exact(x)
                loss = distillation_loss(output, teacher, kind="kl", temperature=2.0)
            else:
                loss = nn.functional.cross_entropy(output, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    freeze(model)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", help="as above; ptq, sensitivity, mixed, qat by default"
    )
    parser.add_argument("--images", type=int, help="test images of each task; all by default")
    parser.add_argument("--streets", type=int, default=100, help="streets of each condition")
    parser.add_argument("--first", type=int, default=100, help="seed of the first street")
    parser.add_argument("--conditions", nargs="*", default=[], help="all by default")
    parser.add_argument(
        "--weights",
        nargs="*",
        type=Path,
        default=[],
        help="of the models; the package's by default",
    )
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="all by default"
    )
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[0], help="of the training of trained formats"
    )
    parser.add_argument("--runs", type=Path, help="folder of the runs, made where missing")
    parser.add_argument("--data", type=Path, help="of pandaset: a sequence in compact form")
    options = parser.parse_args()
    parts = {"ptq": ptq, "sensitivity": sensitivity_cost, "mixed": mixed, "qat": qat}
    chosen = options.parts or list(parts)
    parts["blocks"] = blocks
    unknown = set(chosen) - {*parts, "streets", "ranks", "searches", "pandaset"}
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}")
    if "pandaset" in options.parts and options.data is None:
        parser.error("pandaset needs --data, the folder of a sequence in compact form")
    if "streets" in options.parts and options.streets < 2:
        parser.error(f"--streets {options.streets}: intervals are drawn from at least 2 streets")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    print_machine(peaks=False)
    with tempfile.TemporaryDirectory() as made:
        folder = options.runs or Path(made)
        if "streets" in options.parts:
            compare_streets(
                folder,
                options.weights,
                options.formats,
                options.seeds,
                options.first,
                options.streets,
                options.conditions,
            )
        if "ranks" in options.parts:
            compare_ranks(folder)
        if "searches" in options.parts:
            compare_searches(folder, options.first, options.streets)
        if "pandaset" in options.parts:
            cross_validate(folder, options.data)
    tasks = {"ptq": (cifar10, mnist), "blocks": (cifar10, mnist)}
    for name in (part for part in chosen if part in parts):
        for make in tasks.get(name, (cifar10,)):
            parts[name](make(options.images))


if __name__ == "__main__":
    main()
