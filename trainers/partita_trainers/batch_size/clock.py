"""A clock for timing work on a device."""

import time

import torch


def now(device: torch.device) -> float:
    """Return seconds, after the device has finished its queued work; only differences are meaningful.

    On a CPU with one thread this is the process's CPU time, which other programs on the machine do not affect.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
