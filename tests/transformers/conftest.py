"""No test of the transformers cache wants gradients."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
