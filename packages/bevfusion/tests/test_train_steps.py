"""Steps one after the other: their rate, and an end between two of them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from bev_data.points import Frame, Labels
from bevfusion.model import CONFIGS, build_model
from bevfusion.training import (
    Augmentation,
    DetectorTrainer,
    compact,
    one_cycle,
    untrained_model,
)


def test_the_schedule_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=37)
    for step in range(37):
        assert one_cycle(step, 37, 0.3) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < 36:
            schedule.step()


SIGNALS = """
import os, signal
from bevfusion.training import stop_on_signals

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
with stop_on_signals() as request:
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.asked
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
"""


def test_signal_handlers_come_back() -> None:
    """In a process of its own: a signal that reaches no handler would end the test's."""
    done = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_a_step_hangs_on_its_number_alone_and_none_is_taken_without_numbers() -> None:
    sizes, draw = CONFIGS["tiny"], np.random.default_rng(0)
    points = draw.uniform(-8, 8, (500, 5)).astype(np.float32)
    points[:, 2:] = draw.uniform(0, 1, (500, 3))
    boxes = np.array([[4, 4, 0, 4, 2, 1.5, 0.3]], np.float32)
    frame = compact(Frame("one", points, labels=Labels(boxes, ("car",))), None)

    def trainer() -> DetectorTrainer:
        return DetectorTrainer(
            untrained_model(lambda: build_model(sizes, ("lidar", "decoder", "head")), seed=1),
            [frame],
            steps=4, batch=1, lr=1e-3, weight_decay=0.01, clip=10.0, seed=3,
            augmentation=Augmentation(),
        )  # fmt: skip

    one, again = trainer(), trainer()
    first = one.step(0)
    assert len(first) == len(one.terms)
    assert again.step(0) == first
    for mine, its in zip(one.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, its)

    neck = {name: value.clone() for name, value in one.model.decoder.named_parameters()}
    one.model.head.heatmap_head[1].bias.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match="step 2: the loss is"):
        one.step(1)
    assert all(torch.equal(v, neck[name]) for name, v in one.model.decoder.named_parameters())
