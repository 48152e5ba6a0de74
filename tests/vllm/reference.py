"""What an engine must answer, computed by transformers with attention in float64.

Every call of the model is a step of the engine: its own tokens are read as they are, or from their
codes, and older ones from codes, except for the first one of all. Codes come from cache_store and
cache_load, which have tests of their own, so that nothing of the integration is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import torch_turboquant as tt
from tests.oracle import exact_attention

# Of the logits' standard deviation; the first two of 128 are 0.3 apart on average, any other 2.5.
NEAR_TIE = 0.01
# A GPU computes the rest of the model in 16 bits, and so may find other codes here and there.
NEAR_TIE_ON_GPU = 0.1

Center = Callable[[int, Tensor], Tensor | None]


class Reference:
    """A model that sees its past through codes.

    Args:
        model: of transformers, in float32.
        presets: of all layers, or of each.
        exact_steps: whether steps of one token read it as it is.
        first_token: whether the first token of all stays exact.
        center: of a layer, from its keys in the first call [tokens, kv_heads, d].
        window: how many last tokens stay exact, of those from `self.held` on.

    Attributes:
        long_chunk: new tokens from which all queries of a chunk read the window before it exactly,
            as FlashAttention has it; 0: each query reads its own window.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        presets: str | Sequence[str],
        exact_steps: bool = True,
        center: Center = lambda layer, keys: None,
        first_token: bool = True,
        window: int = 0,
    ) -> None:
        layers = model.config.num_hidden_layers
        presets = [presets] * layers if isinstance(presets, str) else list(presets)
        self.model, self.exact_steps, self.center = model, exact_steps, center
        self.first_token, self.window, self.held = first_token, window, 0
        self.long_chunk = 0
        self.near_tie = NEAR_TIE_ON_GPU if torch.cuda.is_available() else NEAR_TIE
        self.presets = presets
        self.centers: dict[int, Tensor | None] = {}
        AttentionInterface.register("seen_through_codes", self._attend)
        model.set_attn_implementation("seen_through_codes")

    def check(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        chunks: Sequence[int] = (),
        near_tie: float | None = None,
    ) -> None:
        """Raises unless every token of a greedy answer is the likeliest, or as good as that.

        The prompt is computed in chunks that end here. The engine's attention rounds to 16 bits, so
        that of two logits which are nearly the same either may be larger.
        """
        near_tie = self.near_tie if near_tie is None else near_tie
        self.centers.clear()
        cache, ids = DynamicCache(config=self.model.config), torch.tensor([[*prompt, *answer]])
        last = range(len(prompt), len(prompt) + len(answer))
        ends = [*(end for end in chunks if end < len(prompt)), *last]
        with torch.no_grad():
            for begin, end in zip([0, *ends], ends, strict=False):
                logits = self.model(ids[:, begin:end], past_key_values=cache).logits[0, -1]
                if end < len(prompt):
                    continue
                place, token = end - len(prompt), ids[0, end]
                lacking = float(logits.max() - logits[token])
                assert lacking <= near_tie * logits.std(), (
                    f"token {place} is {int(token)}, {lacking:.3f} below {int(logits.argmax())}"
                )

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        layer, new, total = stored_by(module), len(q), len(k)
        if layer not in self.centers:
            self.centers[layer] = self.center(layer, k)
        decoded_k, decoded_v = through_codes(k, v, self.presets[layer], layer, self.centers[layer])
        if self.long_chunk and new >= self.long_chunk and not sliding_window:
            begin = total - new
            ring = slice(max(self.held, begin - self.window, int(self.first_token)), begin)
            decoded_k[ring], decoded_v[ring] = k[ring], v[ring]
        out, _ = exact_attention(
            q,
            decoded_k[None],
            decoded_v[None],
            [total],
            [new],
            exact_k=k[None],
            exact_v=v[None],
            sinks=int(self.first_token),
            window=self.window,
            held=[(int(self.first_token), self.held)],
            own=new > 1 or self.exact_steps,
            softmax_scale=scaling,
            sink_logits=s_aux,
            sliding_window=sliding_window or 0,
            soft_cap=softcap or 0.0,
        )
        return out[None].to(query.dtype), None


def stored_by(module: torch.nn.Module) -> int:
    """The layer whose keys an attention reads: its own, or where layers share keys (Gemma 3n) the
    last one of its kind that has some."""
    layer, config = module.layer_idx, module.config
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    if layer < first:
        return layer
    kinds = config.layer_types
    return max(i for i in range(first) if kinds[i] == kinds[layer])


def through_codes(
    k: Tensor, v: Tensor, preset: str, layer: int, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv_heads, d] as pages give them back."""
    tokens, heads, d = k.shape
    config = tt.preset(preset, d, page_size=16, sink_tokens=0, recent_window=0)
    tables = tt.make_tables(config, layer, center=center)
    pages = -(-tokens // 16)
    cache = tt.allocate_cache(config, pages, heads)
    tt.cache_store(k, v, cache, torch.arange(tokens), config, tables)
    table, lengths = torch.arange(pages).int()[None], torch.tensor([tokens]).int()
    k, v = tt.cache_load(cache, table, lengths, config, tables, tokens, torch.float32)
    return k[0], v[0]
