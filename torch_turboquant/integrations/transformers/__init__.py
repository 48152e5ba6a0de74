"""A packed KV cache for Hugging Face transformers.

    cache = TurboQuantCache.for_model(model, preset="k5v4u")
    model.generate(**inputs, past_key_values=cache)

The idea. transformers asks a cache for keys and values and then calls an attention function with
them. Handing back decoded keys would rebuild in every step the tensor that the cache exists to
avoid, so this module replaces both halves: `update` hands new tokens on as they are, and an
attention function registered with transformers stores them in packed pages and reads these.

1. The first forward (the prompt) attends exactly, with the attention that the model had before;
   its keys and values are also encoded into pages.
2. Every later forward (one new token, a draft, the next turn of a chat) attends through
   `store_and_attend`: codes, plus the exact tail (first and last tokens) of the configuration.
   A long continuation goes piece by piece, so that its result does not depend on how it is cut.

Attaching. A cache attaches itself to its model: the text configuration's attention implementation
becomes "turboquant_<previous>", a forward around the decoder's own notes which cache it runs on,
the model's `create_masks_for_generate` leaves masks to the forward, and its
`prepare_inputs_for_generation` leaves no cache out. With any other cache, or none, all of these do
what was done before; but `generate_batch` of transformers (continuous batching) knows attention
implementations by name, and refuses ours. `detach()`, the end of a `with` block or the end of the
cache's life restore the model.

Threads. What runs is noted by thread: several threads may use one model, each with a cache of its
own or with none. A cache is for one thread at a time, and says so to a second one.

Center. Keys are stored relative to one constant vector per layer and KV head, which softmax cannot
see, and with their channels scaled, which queries take back. center="auto" learns both from the
first CENTER_TOKENS tokens or more (means and variances of keys, sizes of queries, after the sink
tokens, padding excluded), center="mean" the mean alone. Until that many have been seen, the layers
hold them as they are and attend exactly; then everything is encoded at once (the static form does
not wait). A learned center stays until `reset()`. Centers of a calibration text (`calibrate`) can
be saved; the file names the model's shape and RoPE, and is refused by any other model.

Layers. All layers have one configuration unless `boundary_layers` or `layer_presets` say otherwise
(torch_turboquant.layer_choice).

Eviction. With keep below 1, layers with full attention store a part of the prompt only
(torch_turboquant.eviction). What stays carries its positions in its keys, so nothing else changes:
masks, positions and get_seq_length count all tokens, pages and the exact tail those that stay.

Memory. Everything of a layer lives on the device that the layer's keys come from. Layers that are
alike share the allocation of their first pages, and another one of their tails, as far as a prompt
is short; those of the static form do not. Without `max_cache_len` a prompt gets the pages that it
needs, and more are added as sequences grow: a tenth of them each time, so that a growing cache
holds at most 10% more than its tokens need. What is stored is copied then, layer by layer, so two
copies of one layer exist for a moment (at the first growth, of all layers whose pages are one
allocation: no more than hold 8,192 tokens together). With `max_cache_len`, pages for
`max_batch_size` sequences of that length are allocated at the first forward and never move. All
`max_batch_size` sequences have the pages of the longest one. A sequence owns as many pages in a
sliding-window layer as max_q_len queries can see, and goes round in them.

Static form. With `static=True` the lengths live on the device as well, and what a forward after the
prompt does follows from the shapes of its inputs: it can be compiled in one piece, without another
compilation as the context grows, and be captured in a CUDA graph. `generate` compiles it by itself
where it would with transformers' StaticCache. Every other forward is called without compilation,
whoever has compiled the model. Host and device meet only where something else than
such a step is asked for: a prompt, `crop`, a reordering, a size.

Latent attention. Where a model keeps one latent row per token for all heads (MLA), the pages hold
these rows. The prompt expands keys and values from them as ever. Every other forward is absorbed:
queries and results go through the model's matrices, and attention reads the rows (latent.py).

Hybrid models. Layers of linear attention or convolution keep the cache layers of transformers; only
layers with keys and values are packed. The states of the others cannot take tokens back.
"""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "TurboQuantCache needs transformers: pip install 'torch_turboquant[transformers]'",
        name=error.name,
    ) from error

from torch_turboquant.centers import CENTER_TOKENS
from torch_turboquant.integrations.transformers.cache import TurboQuantCache
from torch_turboquant.integrations.transformers.centers import load_centers, save_centers
from torch_turboquant.integrations.transformers.layer import TurboQuantLayer
from torch_turboquant.integrations.transformers.weights import TurboQuantConfig, quantize

__all__ = [
    "CENTER_TOKENS",
    "TurboQuantCache",
    "TurboQuantConfig",
    "TurboQuantLayer",
    "load_centers",
    "quantize",
    "save_centers",
]
