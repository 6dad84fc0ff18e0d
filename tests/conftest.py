"""Triton kernels run in its interpreter where there is no GPU; it must be told before it is first imported."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that two processes that share the files out end at about the same time."""
    items.sort(key=lambda item: not item.path.name.startswith("test_runtime"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What is compared to the bit is computed alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
