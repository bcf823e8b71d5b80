"""Where the GPU tests run: on a GPU, or kernel by kernel in Triton's interpreter.

`pytest -m gpu tests/gpu` on a machine with a GPU runs everything, with two GPUs also layouts over
NCCL (`test_two_gpus.py`, `test_two_gpu_failures.py`). Without one,
`TRITON_INTERPRET=1 pytest tests/gpu` runs the kernels' tests on the CPU, if Triton is there.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import INTERPRET


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where Triton kernels can run here; fresh tensors are NaN until a kernel writes them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if not torch.cuda.is_available() and not INTERPRET:
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
    # In this mode torch.empty fills its memory (torch.utils.deterministic).
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cpu" if INTERPRET else "cuda")
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """A real GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def two_gpus() -> None:
    """Two real GPUs, for ranks in processes of their own."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, and this machine has {count}")
