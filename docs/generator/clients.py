"""Clients of engines that ask again as soon as they are answered (benchmarks/serving.py)."""

from __future__ import annotations

import re

from common import Row, markdown


def clients_table(of: list[Row], titles: dict[str, str]) -> str:
    """The clients among rows of an engine: what they ask for and how soon they are answered.

    Conversations come first, fewer clients before more, the engine's own caches before ours.

    Args:
        titles: of the engine's own caches, in the order of their rows.
    """

    def order(row: Row) -> tuple[bool, int, int, str]:
        config, own = row["config"], list(titles)
        place = own.index(config) if config in titles else len(own)
        return kind_of(row) != "turns", row["clients"], place, config

    rows = [row for row in of if "clients" in row]
    lines = [
        [
            load_in_words(row),
            titles.get(row["config"], row["config"]),
            f"{row['requests_s']:.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['first_token_s_median']:.2f} s, {row['first_token_s_p99']:.2f} s",
            f"{row['token_ms_median']:.0f} ms, {row['token_ms_p99']:.0f} ms",
        ]
        for row in sorted(rows, key=order)
    ]
    head = ["clients", "cache", "requests/s", "tokens/s", "first token", "time of a token"]
    return markdown(head, lines)


def kind_of(row: Row) -> str:
    """turns, serve or mix."""
    return re.match("[a-z]+", row["point"])[0]


def load_in_words(row: Row) -> str:
    """What clients ask for."""
    return {
        "turns": f"{row['clients']} conversations of {row['context']:,} tokens",
        "serve": f"{row['clients']} with new prompts of {row['context']:,} tokens",
        "mix": f"{row['clients']} with prompts and answers as long as ShareGPT's",
    }[kind_of(row)]
