"""Quality against size: every preset and every control on one model and one text.

What is measured, and how, is torch_turboquant/eval. Without --model and --text it takes the demo's
model and text. Rows that the result file has of the same run are not measured again; delete them to
do so.
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
    name = "quality_" + loaded[2].lower().replace("-", "_").replace(".", "_")
    path = common.RESULTS / f"{name}.json"
    device = common.device_name(arguments.device)
    done = [row for row in report.read_json(path) if row["device"] == device]
    origin = {
        "name": name,
        "device": device,
        "commit": arguments.commit or common.commit_name(),
        "command": common.command_line(),
    }

    def save(new: list[dict[str, Any]]) -> None:
        common.write_rows(name, report.finite(rows.without(done, new) + new), arguments)

    measured = evaluation.measure_rows(arguments, loaded, origin, done, save)
    report.show(measured)
    if not (arguments.no_picture or arguments.dry_run):
        report.picture(path.with_suffix(".png"), measured)


if __name__ == "__main__":
    main()
