"""Steps one after the other: their rate, and an end between two of them."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from bevfusion.training import one_cycle, stop_on_signals


def test_the_schedule_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=37)
    for step in range(37):
        assert one_cycle(step, 37, 0.3) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < 36:
            schedule.step()


def test_signal_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
