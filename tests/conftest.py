"""Triton kernels run in its interpreter where there is no GPU; it must be told before it is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that two processes that share the files out end at about the same time."""
    items.sort(key=lambda item: not item.path.name.startswith("test_runtime"))
