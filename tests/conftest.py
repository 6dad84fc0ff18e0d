"""Triton kernels run in its interpreter where there is no GPU; it must be told before it is first imported.

Threads that wait do not spin, here and in processes that tests start: several of them share few cores, and on x86 the
tests of the engine took four times as long. And no example of a property has to be quick: on such a machine any may
take its time.
"""

import importlib.util
import os
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from slipstream.models.threads import threads

hypothesis.settings.register_profile("slipstream", deadline=None)
hypothesis.settings.load_profile("slipstream")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from interpreted import multiply_in_order

        multiply_in_order()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that two processes that share the files out end at about the same time."""
    items.sort(key=lambda item: not item.path.name.startswith("test_runtime"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What is compared to the bit is computed alike; products this small wait for threads longer than they compute."""
    with threads(1):
        yield


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
