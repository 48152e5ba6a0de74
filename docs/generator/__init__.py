"""The generated parts of documents: a file per topic, whose functions write tables and sentences.

results.py reads result files, words.py writes numbers and paragraphs, pictures.py has what pictures
share. Which document has which part is in docs/generate.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
# Parts of the benchmarks that documents need, too.
import common  # noqa: F401
import quality_tables  # noqa: F401
import weight_tables  # noqa: F401
