"""Quality against size: every preset and every control on one model and one text.

torch_turboquant/eval measures; this program adds the result file. Without --model and --text it
takes the demo's model and text. Rows of the same run that the result file already has are not
measured again, unless they are deleted from it.
"""

from __future__ import annotations

from typing import Any

import common

from torch_turboquant import eval as evaluation
from torch_turboquant.eval import report, rows


def main() -> None:
    options = common.parser(__doc__)
    evaluation.add_measure_arguments(options)
    options.add_argument("--no-picture", action="store_true", help="does not need matplotlib")
    arguments = options.parse_args()
    loaded = evaluation.load(arguments, arguments.device)
    name = common.file_name("quality", loaded[2])
    origin = common.origin(name, arguments)
    old = common.read_rows(name, missing_ok=True)
    done = [row for row in old if row["device"] == origin["device"]]

    def save(new: list[dict[str, Any]]) -> None:
        common.write_rows(name, report.finite(rows.without(done, new) + new), arguments)

    measured = evaluation.measure_rows(arguments, loaded, origin, done, save)
    report.show(measured)
    if not (arguments.no_picture or arguments.dry_run):
        report.picture(common.RESULTS / f"{name}.png", measured)


if __name__ == "__main__":
    main()
