"""Documents say what the code and the result files say, and lead to files that exist."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_blocks_are_up_to_date(generate):
    assert not list(generate.outdated()), "run make docs"


def test_other_numbers_would_show(generate, monkeypatch):
    real = generate.rows

    def slower(name):
        return [{**row, "ours_ms": 2 * row.get("ours_ms", 0)} for row in real(name)]

    monkeypatch.setattr(generate, "rows", slower)
    assert {"README.md", "docs/performance.md"} <= set(generate.outdated())


def test_another_docstring_would_show(generate, monkeypatch):
    monkeypatch.setattr(generate.tq.pack, "__doc__", "Something else.")
    assert list(generate.outdated()) == ["docs/ops.md"]


def test_every_op_has_its_text(generate):
    text = (ROOT / "docs" / "ops.md").read_text()
    for name in generate.op_names():
        assert f"\n{name}(" in text, name


def test_the_picture_shows_the_present_results(generate):
    image = pytest.importorskip("PIL.Image")
    with image.open(ROOT / "docs" / "pictures" / "attention_h200.png") as picture:
        assert picture.info["Source"] == generate.digest("h200_attention"), "run make docs"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http", "#")):
            assert (path.parent / target.split("#")[0]).exists(), target
