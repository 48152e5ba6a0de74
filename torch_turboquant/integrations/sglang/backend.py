"""The attention backend: how a layer stores and attends.

A decode step is one call per layer, which stores its tokens and reads them as they are. A step of
prompts attends first and stores then: queries read their own chunk as it is and older tokens from
pages and tail, and the chunk overwrites rows of the ring that its first queries see. Where SGLang
has FlashAttention it computes new prompts and long chunks (prompts.py).

Without a window the exact tail of a sequence is its first token, which lies in its first page. With
one it is an entry of memory that belongs to the request: the first token and a ring of the last
ones. The first token is then copied out of the page when a request continues somebody's prefix.
Pages and tails are given back together when SGLang releases the memory of its cache. What they hold
afterwards is never read: all that is has been stored for a request that came later.

A step that checks a chain of drafts stores all of them first, then attends: a draft reads itself
and the window before it from the ring, everything else from codes, which is what a decode step of
that token alone would read. The ring has room for the chain beside the window. Drafts that turn out
wrong are overwritten, in pages and ring, before anything reads them.

A layer that reads the keys of another one (layers.py) attends as that one has attended in the same
step: to its pages, with its constants, and to its new tokens as they are. Those are kept until the
step ends, and with them what the ring held before a chunk was stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from torch_turboquant.integrations.engine.limits import ELSEWHERE, refuse
from torch_turboquant.integrations.engine.pages import page_parts, put_first_token
from torch_turboquant.integrations.engine.prompts import PromptAttention
from torch_turboquant.integrations.sglang import hooks, limits, prompts
from torch_turboquant.integrations.sglang.layers import attention_layers, widen_sinks
from torch_turboquant.integrations.sglang.pool import TurboQuantKVPool, pages_of
from torch_turboquant.integrations.sglang.prompts import Recent, Run
from torch_turboquant.integrations.sglang.steps import DeviceRings, Step, Steps
from torch_turboquant.integrations.sglang.versions import untested
from torch_turboquant.ops.attention import attend_constants, step_constants
from torch_turboquant.ops.cache import cache_load, store_constants

logger = logging.getLogger("torch_turboquant.sglang")

_store = torch.ops.turboquant.cache_store.default
_attend = torch.ops.turboquant.paged_attention_out.default
_store_and_attend = torch.ops.turboquant.store_and_attend.default


class Past(NamedTuple):
    """What the exact tail of a layer held before the tokens of a step were stored."""

    ring: Tensor
    """[sequences, kv_heads, sinks + window, 2, head_dim]."""
    entries: Tensor
    """int64 [sequences]: 0, 1, 2, ...; -1: padding."""
    valid: Tensor
    """int32 [sequences, 2], as DeviceRings.valid."""

    def of_run(self, run: Run) -> Past:
        """That of the sequences of a run."""
        part = slice(run.first_sequence, run.end_sequence)
        return Past(self.ring[part], self.entries[: len(self.ring[part])], self.valid[part])


class Kept(NamedTuple):
    """What layers that read the keys of another one need of its step."""

    k: Tensor
    v: Tensor
    past: Past | None
    """None: its tail holds what it held before, as far as queries see it."""


class Layer(NamedTuple):
    """One attention layer: its memory, and the arguments of the ops that stay."""

    pages: Tensor
    first_tokens: Tensor | None
    """[pages, kv_heads, 1, 2, head_dim], in the memory of the pages."""
    ring: Tensor | None
    """[rows, kv_heads, sinks + window, 2, head_dim]; None: there is no window."""
    own_first_tokens: Tensor | None
    """[rows, kv_heads, 2, head_dim], in the memory of the ring; None: there are none."""
    store_arguments: tuple[Any, ...]
    attend_arguments: tuple[Any, ...]
    scale: float
    """Of the products of queries and keys."""
    step_arguments: dict[str, Any]
    options: tuple[int, float]
    """Sliding window, with the query itself; soft cap."""
    is_sliding: bool
    """Whether its pages lie in the pool of sliding layers."""
    load: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """(int32 [1, pages], int32 [1] tokens, tokens) -> decoded k, v [1, tokens, kv_heads, d]."""
    prompts: PromptAttention | None
    """FlashAttention for its prompts; None: the op for pages takes all of them."""
    is_read: bool
    """Whether other layers read its keys."""
    past: Past | None = None
    """In place of the ring, in the calls of these; None: the ring."""


class TurboQuantBackend(AttentionBackend):
    """--attention-backend turboquant.

    Args:
        runner: SGLang's ModelRunner, whose pools have been made.

    Raises:
        RuntimeError: SGLang has not asked the plug-in; the text names where.
        ValueError: the model has a layer that is not supported.
    """

    needs_cpu_seq_lens = False  # lengths are read on the device
    fills_in_graphs = hasattr(AttentionBackend, "shared_read_ends")
    """Whether SGLang lets a graph read its tables to the end of init_forward_metadata_in_graph,
    before it changes them for the next step. Before 0.5.18 it waits for what runs before a graph
    only."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        ngrams = runner.spec_algorithm.is_ngram()
        if ngrams:
            hooks.register_ngrams()
        hooks.check(sglang.__version__, ngrams)
        # SGLang's backend of hybrid models, which asks this one for their attention, reads the two
        self.token_to_kv_pool, self.req_to_token_pool = (
            runner.token_to_kv_pool,
            runner.req_to_token_pool,
        )
        pool, rows = pages_of(runner.token_to_kv_pool), runner.req_to_token_pool
        if not isinstance(pool, TurboQuantKVPool):
            raise RuntimeError(
                f"torch_turboquant: SGLang {sglang.__version__} has made a {type(pool).__name__} "
                "in place of packed pages: the model, or one of its options, is not supported"
            )
        self.plan, self.pool = pool.plan, pool
        self.window, self.sinks = self.plan.window, self.plan.sinks
        if self.window and rows.size > self.plan.max_requests:
            raise RuntimeError(
                f"torch_turboquant: SGLang runs {rows.size} requests at once, and there is memory "
                f"for the exact tails of {self.plan.max_requests}: pass --max-running-requests "
                f"{rows.size}"
            )
        self.max_context_len = int(rows.req_to_token.shape[1])  # SGLang reads it beside drafts
        both = runner.token_to_kv_pool
        to_sliding = both.full_to_swa_index_mapping if self.plan.sliding_layers else None
        sliding = both.swa_kv_pool if self.plan.sliding_layers else None
        self.sliding_pool: TurboQuantKVPool | None = sliding
        self.steps = Steps(rows.req_to_token, self.plan.page_size, self.plan.drafts, to_sliding)
        channels = min(self.plan.heads(layer).channels for layer in self.plan.own_layers)
        self.long_chunk: int | None = None
        if prompts.flash_attention(channels, self.plan.device) is not None:
            self.long_chunk = prompts.long_chunk(self.plan.q_heads, self.plan.device)
        self.rings: DeviceRings | None = None
        if self.window:
            self.rings = DeviceRings(rows, self.sinks, self.plan.ring, self.plan.device)
        widen_sinks(runner.model)
        self.layers = self._bind(runner.model, rows.size)
        self.step: Step | None = None
        self.kept: dict[int, Kept] = {}  # of this step, by the number of the layer
        self.graph_step: Step | None = None
        self.mask: VerifyMask | None = None
        if self.plan.rank == 0:
            sliding_tokens = 0 if sliding is None else sliding.size
            logger.info(self.plan.start_up_line(pool.size, rows.size, sliding_tokens))
            warning = untested(sglang.__version__)
            if warning is not None:
                logger.warning(warning)

    # ---- what stays

    def _bind(self, model: torch.nn.Module, requests: int) -> dict[int, Layer]:
        """Every attention layer of the model by its number."""
        found: dict[int, RadixAttention] = {}
        for module, keys_have_bias, reads in attention_layers(model):
            number = module.layer_id
            wrong = limits.wrong_layer(module, *self.plan.heads(number))
            if reads:
                wrong += limits.wrong_reader(module, found.get(number))
            elif number in found:
                wrong.append(f"several attentions store the keys of layer {number}: {ELSEWHERE}")
            refuse(wrong)
            if reads:
                continue
            found[number] = module
            if keys_have_bias:
                self.plan.check_biased_keys(number)
        if not found:
            refuse([f"no attention is found in {type(model).__name__}: {ELSEWHERE}"])
        return {number: self._layer(module, requests) for number, module in found.items()}

    def _layer(self, module: RadixAttention, requests: int) -> Layer:
        plan, number = self.plan, module.layer_id
        config, tables = plan.config(number), plan.tables(number)
        is_sliding = number in plan.sliding_layers
        pool = self.sliding_pool if is_sliding else self.pool
        assert pool is not None
        pages, first_tokens = page_parts(pool.memory_of(number), config, plan.first_token_dtype)
        ring = None
        if self.window:
            shape = plan.ring_shape(number, requests)
            with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
                ring = torch.zeros(shape, dtype=plan.dtype, device=plan.device)
        sees = module.sliding_window_size + 1 if module.sliding_window_size > -1 else 0
        soft_cap = module.logit_cap or 0.0

        def load(table: Tensor, length: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
            return cache_load(pages, table, length, config, tables, tokens, plan.dtype)

        return Layer(
            pages,
            first_tokens,
            ring,
            None if ring is None or first_tokens is None else ring[:, :, 0],
            store_constants(config, tables),
            attend_constants(config, tables),
            module.scaling,
            step_constants(config, tables),
            (sees, soft_cap),
            is_sliding,
            load,
            self._prompt_attention(config.head_dim, module.scaling, sees, soft_cap),
            number in plan.readers,
        )

    def _prompt_attention(
        self, head_dim: int, scale: float, sliding_window: int, soft_cap: float
    ) -> PromptAttention | None:
        flash = prompts.flash_attention(head_dim, self.plan.device)
        if flash is None:
            return None
        options = {"softmax_scale": scale, "softcap": soft_cap}
        return PromptAttention(flash, options, sliding_window)

    # ---- steps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describes a step that runs outside CUDA graphs."""
        self.kept.clear()
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self.step = self.steps.decode(forward_batch)
        elif mode.is_target_verify() and self.steps.drafts:
            self.step = self.steps.check_drafts(forward_batch)
        elif mode.is_extend_without_speculative() and not mode.is_dllm_extend():
            self._refuse_pictures(forward_batch)
            if self.rings is not None:
                self.rings.see(forward_batch)
            self.step = self.steps.extend(forward_batch, self.long_chunk, self.rings)
        elif not mode.is_idle():
            raise NotImplementedError(
                f"torch_turboquant: steps of the kind {mode.name} are not supported: leave out the "
                "option of SGLang that makes them"
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what CUDA graphs of decode steps read."""
        drafts = self.steps.drafts
        self.graph_step = self.steps.allocate(max_bs, drafts)
        self.mask = maybe_create_verify_mask(
            is_draft_runner=False,
            skip_prefill=False,
            max_bs=max_bs,
            max_context_len=self.max_context_len,
            num_draft_tokens=drafts,
            device=self.plan.device,
            is_read=False,
        )

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes which draft sees which; nobody reads it, since drafts are chains."""
        return self.mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing of a step depends on which tokens the drafts are."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Chooses the part of that memory which belongs to a batch size, and fills it where graphs
        must not."""
        self.kept.clear()
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or (mode.is_target_verify() and self.steps.drafts)):
            raise NotImplementedError(
                "torch_turboquant: CUDA graphs are for decode steps; prompts run between graphs: "
                "leave the kind of prefill graphs at its default"
            )
        assert self.graph_step is not None
        self.step = self.steps.part(self.graph_step, forward_batch.batch_size)
        if not self.fills_in_graphs:
            self.steps.fill(self.step, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fills it; recorded in the graph and replayed with it."""
        assert self.step is not None
        if self.fills_in_graphs:
            self.steps.fill(self.step, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of rows behind the batch, which `fill` takes for padding whatever their length."""
        return 1

    @staticmethod
    def _refuse_pictures(forward_batch: Any) -> None:
        if getattr(forward_batch.spec_info, "custom_mask", None) is not None:
            raise NotImplementedError(
                f"torch_turboquant: attention that is not causal is not supported: {ELSEWHERE}"
            )

    # ---- a layer's calls; SGLang records graphs of some models with gradients on

    @torch.no_grad()
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Stores one token of each sequence, and attends."""
        bound, step = self._bound(layer)
        sinks = self._options(layer, k, save_kv_cache, options)
        q, out = self._queries(q, layer, forward_batch)
        if k is None:
            kept = self.kept[layer.layer_id]
            _attend(*self._arguments(bound, step, q, sinks), kept.k, kept.v, out=out)
            return out.flatten(1)
        new = self._new(layer, k, v)
        arguments = (*self._arguments(bound, step, q, sinks), *new)
        _store_and_attend(*arguments, slot_mapping=step.slots, **bound.step_arguments, out=out)
        if bound.is_read:
            self.kept[layer.layer_id] = Kept(*new, None)
        return out.flatten(1)

    @torch.no_grad()
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Attends from chunks of prompts, and stores them; with drafts it stores first."""
        bound, step = self._bound(layer)
        sinks = self._options(layer, k, save_kv_cache, options)
        q, out = self._queries(q, layer, forward_batch)
        if step.checks_drafts:
            if k is not None:
                new = self._new(layer, k, v)
                self._store(bound, step, *new)
                if bound.is_read:
                    self.kept[layer.layer_id] = Kept(*new, None)
            _attend(*self._arguments(bound, step, q, sinks), None, None, out=out)
            return out.flatten(1)
        if k is None:
            kept = self.kept[layer.layer_id]
            self._attend_chunks(bound._replace(past=kept.past), step, q, kept.k, kept.v, out, sinks)
            return out.flatten(1)
        new = self._new(layer, k, v)
        self._fetch_first_tokens(bound, step)
        if bound.is_read:
            # copies, since SGLang's graphs around the attention of prompts use their memory again
            keys, values = (tokens.clone() for tokens in new)
            self.kept[layer.layer_id] = Kept(keys, values, self._past(bound, step))
        self._attend_chunks(bound, step, q, *new, out, sinks)
        self._store(bound, step, *new)
        self._keep_first_tokens(bound, step, *new)
        return out.flatten(1)

    def _attend_chunks(
        self,
        bound: Layer,
        step: Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attends from chunks of prompts, whose own tokens k and v are."""
        if self._is_for_flash(bound, step, sinks):
            for run, part in step.runs:
                self._attend_run(bound, part, run, q, k, v, out)
        else:
            _attend(*self._arguments(bound, step, q, sinks), k, v, out=out)

    def _past(self, bound: Layer, step: Step) -> Past | None:
        """What the ring of a layer holds of the sequences of a step, before it is stored."""
        if bound.ring is None:
            return None
        assert self.rings is not None
        rows = step.rows.clamp(min=0)
        entries = torch.arange(len(rows), device=rows.device)
        return Past(
            bound.ring.index_select(0, rows),
            torch.where(step.rows < 0, step.rows, entries),
            self.rings.valid.index_select(0, rows),
        )

    @staticmethod
    def _is_for_flash(bound: Layer, step: Step, sinks: Tensor | None) -> bool:
        """Whether a part of the step is left to FlashAttention.

        With a sliding window that takes new prompts only: elsewhere it asks for positions of keys.
        """
        if bound.prompts is None or sinks is not None or not step.runs:
            return False
        run = step.runs[0][0]
        fresh = len(step.runs) == 1 and run.by_flash and not run.contexts
        return fresh or not bound.prompts.sliding_window

    def _attend_run(
        self, bound: Layer, step: Step, run: Run, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Attends from the new tokens of a run; `step` is that of its sequences only."""
        if bound.past is not None:
            bound = bound._replace(past=bound.past.of_run(run))
        own = slice(run.first, run.end)
        q, k, v, out = q[own], k[own], v[own], out[own]
        if not run.by_flash:
            _attend(*self._arguments(bound, step, q, None), k, v, out=out)
            return
        assert bound.prompts is not None
        if not run.contexts:
            bound.prompts.fresh(q, k, v, out, step.starts, run.longest)
            return

        def load(sequence: int, at: int, tokens: int, length: Tensor) -> tuple[Tensor, Tensor]:
            first_page = at // self.plan.page_size
            table = step.block_table[sequence : sequence + 1, first_page:]
            keys, values = (found[0] for found in bound.load(table, length, tokens))
            self._put_exact(bound, step, sequence, at, run.recent.get(sequence), (keys, values))
            return keys, values

        bound.prompts.continued(q, k, v, out, step.starts, run.longest, run.contexts, load)

    def _put_exact(
        self,
        bound: Layer,
        step: Step,
        sequence: int,
        at: int,
        recent: Recent | None,
        decoded: tuple[Tensor, Tensor],
    ) -> None:
        """Puts the exact tokens of a sequence in place of those decoded from its pages.

        Args:
            at: the position of the first decoded token.
            decoded: keys and values [tokens, kv_heads, head_dim].
        """
        tail, entries, _ = self._tail(bound, step)
        if tail is None or entries is None:
            return
        entry = tail.index_select(0, entries[sequence : sequence + 1])[0]  # [kv_heads, rows, 2, d]
        first = 0 if recent is None else max(recent.first, at)
        end = at + len(decoded[0])
        if at == 0 and self.sinks:
            put_first_token(decoded, entry)
        for kind, rows in enumerate(decoded):
            if recent is not None and first < end:
                part = slice(first - recent.first, end - recent.first)
                exact = entry[:, recent.entries[part], kind].transpose(0, 1)
                place = rows[first - at :]
                place.copy_(torch.where(recent.held[part], exact, place))

    def _store(self, bound: Layer, step: Step, k: Tensor, v: Tensor) -> None:
        arguments = (k, v, bound.pages, step.slots, *bound.store_arguments)
        ring, rows, _ = self._tail(bound, step)
        if ring is None:
            _store(*arguments)
        else:
            _store(*arguments, ring, rows, step.seq_lens, step.starts, self.sinks)

    def _fetch_first_tokens(self, bound: Layer, step: Step) -> None:
        """Copies them out of first pages into the entries of requests that have tokens already."""
        if bound.own_first_tokens is None or bound.first_tokens is None or step.resumed is None:
            return
        rows, pages = step.resumed
        found = bound.first_tokens.index_select(0, pages).squeeze(2)
        bound.own_first_tokens.index_copy_(0, rows, found)

    def _keep_first_tokens(self, bound: Layer, step: Step, k: Tensor, v: Tensor) -> None:
        """Copies those of this step into first pages, where others find them."""
        if bound.own_first_tokens is None or bound.first_tokens is None or step.begun is None:
            return
        tokens, pages = step.begun
        row = torch.stack([k[tokens], v[tokens]], dim=2)
        bound.first_tokens.squeeze(2).index_copy_(0, pages, row)

    @staticmethod
    def _queries(q: Tensor, layer: Any, forward_batch: Any) -> tuple[Tensor, Tensor]:
        """The queries [tokens, q_heads, head_dim], and memory for what comes out.

        In its graphs around the attention of prompts SGLang has some, into which it would copy.
        """
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = getattr(forward_batch, "_attn_output", None)
        fits = out is not None and out.dtype == q.dtype and out.numel() == q.numel()
        if fits and out.is_contiguous():
            return q, out.view(q.shape)
        return q, torch.empty_like(q, memory_format=torch.contiguous_format)

    def _arguments(
        self, bound: Layer, step: Step, q: Tensor, sinks: Tensor | None
    ) -> tuple[Any, ...]:
        """The arguments of attention up to the new tokens."""
        tail = self._tail(bound, step)
        return (
            q,
            bound.pages,
            step.block_table,
            step.seq_lens,
            *bound.attend_arguments,
            bound.scale,
            step.starts,
            step.longest,
            *tail,
            0 if tail[0] is None else self.sinks,
            0 if tail[0] is None else self.window,
            *bound.options,
            sinks,
        )

    def _tail(self, bound: Layer, step: Step) -> tuple[Tensor | None, ...]:
        """The exact tail: its memory, the sequences' entries, and what these hold."""
        if bound.past is not None:
            return bound.past.ring, bound.past.entries, bound.past.valid
        if bound.ring is not None:
            assert self.rings is not None
            return bound.ring, step.rows, self.rings.valid
        if bound.first_tokens is not None:
            return bound.first_tokens, step.first_pages, None
        return None, None, None

    @staticmethod
    def _new(layer: Any, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """The new keys and values [tokens, kv_heads, head_dim]."""
        assert v is not None, "SGLang gives both or none"
        heads, d = layer.tp_k_head_num, layer.qk_head_dim
        return k.view(-1, heads, d), v.view(-1, heads, d)

    def _bound(self, layer: Any) -> tuple[Layer, Step]:
        """A layer's memory, and the step with the slots of its pool."""
        bound, step = self.layers[layer.layer_id], self.step
        assert step is not None, "SGLang describes a step before it runs one"
        if layer.scaling != bound.scale:  # a model of transformers says it in its first call
            bound = self.layers[layer.layer_id] = _rescaled(bound, layer.scaling)
        if bound.is_sliding:
            assert step.sliding is not None
            step = step.sliding
        return bound, step

    def _options(
        self, layer: Any, k: Tensor | None, save_kv_cache: bool, options: dict[str, Any]
    ) -> Tensor | None:
        """The learned sinks of a call, whose other options are refused."""
        others = [name for name, value in options.items() if name != "sinks" and value is not None]
        if k is None and layer.layer_id not in self.kept:
            others.append("keys of another layer")
        elif k is not None and not save_kv_cache:
            others.append("save_kv_cache=False")
        if others:
            raise NotImplementedError(
                f"torch_turboquant: attention with {', '.join(others)} is not supported: "
                f"{ELSEWHERE}"
            )
        sinks = options.get("sinks")
        return None if sinks is None else sinks.float()


def _rescaled(bound: Layer, scale: float) -> Layer:
    """A layer whose products of queries and keys have another scale."""
    prompts = bound.prompts
    if prompts is not None:
        prompts = replace(prompts, options={**prompts.options, "softmax_scale": scale})
    return bound._replace(scale=scale, prompts=prompts)
