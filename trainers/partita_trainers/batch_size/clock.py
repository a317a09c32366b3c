"""A clock for measuring work on a device."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, once the device has done all it was given; only differences mean something.

    On a CPU with one thread it is the process's own time, which other programs on the machine do not stretch.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
