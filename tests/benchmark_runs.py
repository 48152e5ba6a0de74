"""How tests run a benchmark: in this process, and it writes no file."""

import sys

from tests.helpers import load_script


def run(monkeypatch, name, *arguments, **replaced):
    """What a benchmark hands to write_rows: (file, rows, whether it was to be written) or None."""
    module, given = load_script(f"benchmarks/{name}"), []
    for attribute, value in replaced.items():
        monkeypatch.setattr(module, attribute, value)

    def write_rows(file, rows, options):
        given.append((file, rows, not options.dry_run))

    monkeypatch.setattr(module.common, "write_rows", write_rows)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()
    return given[0] if given else None
