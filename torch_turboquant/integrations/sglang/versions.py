"""The versions of SGLang that the plug-in is for; needs no SGLang.

What the plug-in takes from SGLang is looked at when an engine starts (hooks.check), so that a later
0.5 which has moved something is refused then.
"""

from __future__ import annotations

import re

from torch_turboquant.integrations.engine.limits import not_tested

FIRST = (0, 5, 17)
BEFORE = (0, 6)
TESTED = ("0.5.17", "0.5.23")


def wrong_version(version: str) -> str | None:
    """What is wrong with a version of SGLang such as "0.5.17.post1"; None: nothing."""
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if number and FIRST <= tuple(map(int, number.groups())) < BEFORE:
        return None
    first, before = ".".join(map(str, FIRST)), ".".join(map(str, BEFORE))
    return (
        f"SGLang {version} is installed; this torch_turboquant supports {first} and later versions "
        f"before {before}, and is tested with {' and '.join(TESTED)}: install one of these"
    )


def untested(version: str) -> str | None:
    """What the log says at start of a version of SGLang that no test has run with; None: one has.

    Args:
        version: one that is not wrong, with or without the name of a build ("0.5.23+cu130").
    """
    said = not_tested("SGLang", version, TESTED)
    return said and f"torch_turboquant: {said}. If answers look wrong, install one of these"


def check_version(version: str) -> None:
    """Raises ImportError for a version that this plug-in does not know."""
    wrong = wrong_version(version)
    if wrong:
        raise ImportError(wrong)
