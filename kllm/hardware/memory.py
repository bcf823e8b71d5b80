"""Device memory that a process holds without using it."""

import gc

import torch


def release_memory() -> None:
    """Give back what nothing refers to any more, for other processes and for what comes next.

    A network has cycles, so that only a collection frees it, and torch keeps the blocks of what
    is freed for tensors of this process. What is free on a device is to be asked after this call.
    """
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no device is in use
