"""The model of these tests, and what the evaluation makes of it.

Imports are inside: without transformers the tests are skipped, which only they themselves can say.
"""

import argparse

import pytest


@pytest.fixture(scope="module")
def model():
    from tests.eval.harness import tiny

    return tiny()


@pytest.fixture
def readings(monkeypatch):
    """The names of the caches that were read; `stop` interrupts one of them."""
    from torch_turboquant.eval import measure

    seen = argparse.Namespace(names=[], stop=None)
    read = measure.read

    def counted(*args, **kwargs):
        if kwargs["title"] == seen.stop:
            raise KeyboardInterrupt
        seen.names.append(kwargs["title"])
        return read(*args, **kwargs)

    monkeypatch.setattr(measure, "read", counted)
    return seen


@pytest.fixture(scope="module")
def result(model):
    from tests.eval.harness import evaluate

    return evaluate(model)
