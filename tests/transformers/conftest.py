"""No test of the transformers cache wants gradients."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def folder(tmp_path):
    """Saves a model, and gives the folder."""

    def save(model, name="model", **options):
        model.save_pretrained(tmp_path / name, **options)
        return tmp_path / name

    return save
