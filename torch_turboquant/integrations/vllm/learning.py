"""Centers of an engine that got no file of them: the mean keys of its first prompt.

All pages are stored relative to the centers, so these must be known before the first token is
stored and never change. The first step that is no warm-up decides, before it stores: each layer
takes the mean of its keys, of all tokens of the step but the first SINKS of each sequence. A step
of fewer than LEAST such tokens leaves the centers at zero for good; so does one that vLLM may
replay from a CUDA graph, where no layer could learn.

What is learned depends on the first prompt of the process. Whoever moves pages between engines, or
wants the same bytes after a restart, gives a file or turns learning off.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_turboquant.centers import SINKS

LEAST = 4
"""The mean of so few keys adds a quarter to the variance that is coded where keys have no bias.
Where they have one, as in Qwen2.5, no center at all makes predictions nonsense."""

# Methods of vLLM's workers that run the model on tokens that nobody asked for.
WARM_UP = {
    "_dummy_run",
    "compile_or_warm_up_model",
    "determine_available_memory",
    "elastic_ep_execute",
    "execute_dummy_batch",
    "initialize_from_config",
    "load_model",
}


class Learning:
    """The one step that an engine's centers are learned from."""

    def __init__(self) -> None:
        self.decided = False
        self.tokens: Tensor | None = None
        """The step's tokens that count; None: no step has decided, or it had too few."""

    def see(self, m: Any, longest_in_graphs: int) -> str | None:
        """Looks at the metadata of a step; returns what the log should say, if it decides.

        longest_in_graphs: CUDA graphs are for steps with no more new tokens in a sequence.
        """
        if self.decided or _is_warm_up():
            return None
        self.decided = True
        starts = m.query_start_loc_cpu[: m.num_reqs + 1].tolist()
        kept = [
            torch.arange(begin + SINKS, end)
            for begin, end in pairwise(starts)
            if end - begin > SINKS
        ]
        count = sum(map(len, kept))
        if count < LEAST or m.max_query_len <= longest_in_graphs:
            least = max(SINKS + LEAST, longest_in_graphs + 1)
            return (
                "TurboQuant: the first prompt was too short to learn centers from "
                f"({m.max_query_len} tokens, needed: {least}), so that keys have none until vLLM "
                "starts again. Give a file of centers, or let the first prompt have "
                f"{least} tokens or more"
            )
        self.tokens = torch.cat(kept).to(m.query_start_loc.device)
        return f"TurboQuant: centers are the mean keys of the first prompt's {count} tokens"


def _is_warm_up() -> bool:
    """Whether the step belongs to vLLM's preparation: only who calls it tells, no metadata does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in WARM_UP and frame.f_globals["__name__"].startswith("vllm."):
            return True
        frame = frame.f_back
    return False
