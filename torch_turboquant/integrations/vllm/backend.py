"""The attention backend: what a step is about, and how a layer stores and attends.

A step of vLLM holds sequences in this order: those that decode (one token, or a draft to verify),
then prompts and their continuations. One call of the op takes any mixture of them. Only what must
be computed differently makes a second part of the step (`TurboQuantMetadataBuilder.build`).

Everything that a call reads is made before CUDA graphs are captured and keeps its address: the
tables when weights have been loaded, lengths and block tables by vLLM. Nothing waits for the GPU.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from torch_turboquant.config import CacheConfig
from torch_turboquant.integrations.engine.limits import (
    refuse,
    wrong_dtype,
    wrong_head_dim,
)
from torch_turboquant.integrations.engine.pages import page_parts, put_first_token
from torch_turboquant.integrations.engine.prompts import (
    Alike,
    Context,
    PromptAttention,
    contexts_of,
    least_fresh,
    long_chunk,
    runs_of_neighbours,
)
from torch_turboquant.integrations.vllm import adapter, choice, limits
from torch_turboquant.integrations.vllm.plan import (
    PAGE_SIZE,
    Plan,
    are_for_drafts,
    latest_plan,
    plan_of,
)
from torch_turboquant.integrations.vllm.prompts import prompt_attention
from torch_turboquant.integrations.vllm.sizes import target_of
from torch_turboquant.ops.attention import attend_constants, step_constants
from torch_turboquant.ops.cache import cache_load, store_constants
from torch_turboquant.tables import CacheTables

logger = init_logger("vllm.torch_turboquant")  # vLLM prints what is below its own name

FIRST_TOKENS = 1  # of a sequence that stay exact, as the ops' sink_tokens
NO_TAIL = (None, None, None, 0, 0)  # for the arguments tail to recent_window

_store = torch.ops.turboquant.cache_store.default
_attend = torch.ops.turboquant.paged_attention_out.default
_store_and_attend = torch.ops.turboquant.store_and_attend.default


# ---- the backend


class TurboQuantBackend(adapter.Pages):
    """What vLLM asks before it makes layers. --attention-backend CUSTOM."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TurboQuantImpl]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type[TurboQuantMetadataBuilder]:
        return TurboQuantMetadataBuilder

    @staticmethod
    def bytes_per_token(head_dim: int) -> int:
        plan = latest_plan()
        plan.settle_pages()
        return plan.bytes_per_token(plan.settings.config(head_dim))

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(PAGE_SIZE, default_block_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return wrong_head_dim(head_size) is None

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return wrong_dtype(dtype, current_platform.is_cpu()) is None

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or limits.wrong_cache_dtype(kv_cache_dtype) is None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None = None,
        use_mla: bool = False,
        has_sink: bool = False,
        use_sparse: bool = False,
        use_mm_prefix: bool = False,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """vLLM says "not supported" of what the methods above refuse; the cures are added here."""
        if use_mla:  # else choice.py would have chosen another class
            return limits.NO_LATENTS
        if use_mm_prefix:
            return limits.BOTH_WAYS
        on_cpu = current_platform.is_cpu()
        given = kv_cache_dtype or "auto"
        wrong = limits.wrong_layer(head_size, dtype, on_cpu, given, None, "decoder", {})
        return "; ".join(wrong) or None


class OwnNameBackend(TurboQuantBackend):
    """--attention-backend TORCH_TURBOQUANT, where vLLM lets backends have names of their own."""

    @staticmethod
    def get_name() -> str:
        return choice.OWN_NAME


class CpuBackend(TurboQuantBackend):
    """The only name that vLLM knows on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


# ---- a step


class Part(NamedTuple):
    """Sequences of a step that one call computes."""

    first: int
    """Its tokens: first .. end - 1."""
    end: int
    block_table: Tensor
    first_pages: Tensor
    """int32 [sequences]: the first column of block_table."""
    seq_lens: Tensor
    cu_seqlens: Tensor | None
    """Where each sequence's tokens begin, from 0; None: one token each."""
    longest: int
    """An upper bound of the new tokens of a sequence."""
    exact: bool
    """Whether queries read this step's tokens as they are."""
    by_flash: bool = False
    """Whether FlashAttention takes it, where there is one that can."""
    contexts: tuple[Context, ...] = ()
    """What its sequences have in the cache, where FlashAttention takes it."""


@dataclass
class TurboQuantMetadata(AttentionMetadata):
    """The parts of a step, one in most steps."""

    parts: tuple[Part, ...]
    by_op: tuple[Part, ...]
    """The same for layers whose parts FlashAttention cannot take: as few as can be."""
    whole: Part
    """The step as one part, for what does not differ."""
    slot_mapping: Tensor
    query_start_loc: Tensor


class TurboQuantMetadataBuilder(AttentionMetadataBuilder[TurboQuantMetadata]):
    """Makes the metadata of a step; adds nothing to what vLLM copies to the GPU by itself."""

    # A graph serves steps whose sequences all have the same number of new tokens: decoding and
    # verification. Lengths and tables are read on the device.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    metadata_class = TurboQuantMetadata

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        plan = plan_of(vllm_config)
        self.exact_steps, self.learning = plan.settings.exact_steps, plan.learning
        self.splits_prompts = current_platform.is_cuda()
        self.long_chunk, self.least_fresh = self.for_flash(vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        drafts = all(layers[name].impl.drafts for name in layer_names)
        self.left_out = choice.tokens_left_out(vllm_config.speculative_config) if drafts else 0

    @staticmethod
    def for_flash(vllm_config: Any, device: torch.device) -> tuple[int, int]:
        """Which prompts FlashAttention takes: see long_chunk and least_fresh in prompts.py."""
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        return long_chunk(heads, device), least_fresh(heads, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None)
        return 1 + (drafts or 0)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TurboQuantMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise ValueError(limits.NOT_CAUSAL)
        if self.learning is not None and not self.learning.decided:
            said = self.learning.see(m, self.reorder_batch_threshold)
            if said:
                logger.log(logging.WARNING if self.learning.tokens is None else logging.INFO, said)
        parts, by_op = self._parts(m)
        whole = by_op[0] if len(by_op) == 1 else self._part(m, 0, m.num_reqs, self.exact_steps)
        slots = m.slot_mapping[: m.num_actual_tokens]
        return self.metadata_class(parts, by_op, whole, slots, m.query_start_loc)

    def _parts(self, m: Any) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The step as one part, unless some of it must be computed differently; and the same where
        the op for pages takes all of it."""
        threshold, decodes, prompts = self.reorder_batch_threshold, m.num_reqs, 0
        if m.max_query_len > threshold:
            decodes, prompts, *_ = split_decodes_and_prefills(m, decode_threshold=threshold)
        if not prompts:
            part = self._part(m, 0, m.num_reqs, self.exact_steps)
            return (part,), (part,)
        firsts = m.query_start_loc_cpu[: m.num_reqs + 1].tolist()
        new = [end - begin for begin, end in itertools.pairwise(firsts)]
        firsts[-1] = m.num_actual_tokens  # with what pads a step
        by_op = self._parts_of(m, (Alike(decodes, m.num_reqs, False),), decodes, firsts, new)
        if not self.splits_prompts:
            return by_op, by_op
        # Upper bounds are exact for sequences that are still in their prompt.
        lengths = adapter.longest_lengths(m)[: m.num_reqs].tolist()
        old = [max(0, length + self.left_out - n) for length, n in zip(lengths, new, strict=True)]
        runs = runs_of_neighbours(new, old, self.long_chunk, decodes, self.least_fresh)
        if not any(run.by_flash for run in runs):
            return by_op, by_op
        return self._parts_of(m, runs, decodes, firsts, new, old), by_op

    def _parts_of(
        self,
        m: Any,
        runs: tuple[Alike, ...],
        decodes: int,
        firsts: list[int],
        new: list[int],
        old: Sequence[int] = (),
    ) -> tuple[Part, ...]:
        """A part for each run of prompts, and what decodes before them in the first call that may.

        Args:
            decodes: sequences that decode; they come first.
            firsts: where the new tokens of each sequence begin, and the end of all.
            new: tokens of this step, of each sequence.
            old: tokens of earlier steps, where FlashAttention takes a run.
        """
        if decodes and self.exact_steps and not runs[0].by_flash:
            runs = (Alike(0, runs[0].end, False), *runs[1:])
        elif decodes:
            runs = (Alike(0, decodes, False), *runs)
        return tuple(
            self._part(
                m,
                begin,
                end,
                self.exact_steps or end > decodes,
                (firsts[begin], firsts[end]),
                max(*new[begin:end], self.reorder_batch_threshold),
                by_flash,
                contexts_of(new[begin:end], old[begin:end], m.seq_lens.device) if by_flash else (),
            )
            for begin, end, by_flash in runs
        )

    @staticmethod
    def _part(
        m: Any,
        begin: int,
        end: int,
        exact: bool,
        tokens: tuple[int, int] | None = None,
        longest: int | None = None,
        by_flash: bool = False,
        contexts: tuple[Context, ...] = (),
    ) -> Part:
        """Sequences begin .. end - 1 of a step.

        Args:
            tokens: the first and last + 1 of their new tokens; None: all of the step.
            longest: an upper bound of the new tokens of a sequence; None: the step's.
        """
        first, last = tokens or (0, m.num_actual_tokens)
        longest = m.max_query_len if longest is None else longest
        starts = None
        if longest > 1 or last - first != end - begin:
            starts = m.query_start_loc[begin : end + 1]
            if first:
                starts = starts - first
        table, lengths = m.block_table_tensor, m.seq_lens
        if begin or end != lengths.shape[0]:
            table, lengths = table[begin:end], lengths[begin:end]
        # no copy: CUDA graphs read what vLLM has put into the table by then
        pages = table[:, 0]
        return Part(first, last, table, pages, lengths, starts, longest, exact, by_flash, contexts)


# ---- a layer


def keep_while_asleep(layer: torch.nn.Module, **tensors: Tensor | None) -> None:
    """Registers what a layer must find again, in place, when its engine wakes up.

    An engine that sleeps (level 2) gives up the memory that was allocated while its model was
    loaded. vLLM copies a model's buffers out before and back afterwards, and loads weights into a
    model again without moving them.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            layer.register_buffer(f"turboquant_{name}", tensor, persistent=False)


class TurboQuantImpl(AttentionImpl[TurboQuantMetadata]):
    """One layer: its tables, and the raw ops with arguments that stay prepared once."""

    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window or 0
        self.soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.vllm_config = get_current_vllm_config()
        self.dtype = torch.get_default_dtype()
        wrong = limits.wrong_layer(
            head_size,
            self.dtype,
            current_platform.is_cpu(),
            kv_cache_dtype,
            alibi_slopes,
            attn_type,
            extra,
        )
        refuse(wrong)
        self.plan: Plan = plan_of(self.vllm_config)
        self.drafts = are_for_drafts(self.vllm_config)
        self.index: int | None = None
        self.owner: TurboQuantImpl | None = None
        """The layer whose keys and values this one reads; None: it has its own."""
        self.sink_logits: Tensor | None = None
        self.learns = False
        self.key_sums: Any = None
        self.prompt_attention: PromptAttention | None = None
        self.bound: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Makes what stays; called again when weights are loaded again, then addresses stay."""
        if self.index is not None:
            if self.sink_logits is not None:
                self.sink_logits.copy_(self.sinks)
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        name, self.layer = next(
            (n, x) for n, x in layers.items() if getattr(x, "impl", None) is self
        )
        if self.sinks is not None:
            self.sink_logits = self.sinks.detach().to(torch.float32, copy=True)
            keep_while_asleep(self.layer, sink_logits=self.sink_logits)
        target = target_of(self.layer)
        if target is None:
            self._make_own(name, layers)
        else:
            self.plan.check_reader(name, self.drafts)
            self._read_those_of(target)

    def _make_own(self, name: str, layers: dict[str, Any]) -> None:
        """Makes the tables of a layer that has keys and values."""
        self.index = self.plan.index(name, self.drafts)
        self.config: CacheConfig = self.plan.config(self.index, self.head_size)
        self.plan.check_bias(self.index, self.config, lambda: adapter.keys_have_bias(self.layer))
        self.tables: CacheTables = self.plan.tables(self.index, self.config, self.num_kv_heads)
        keep_while_asleep(self.layer, **self.tables._asdict())
        self.learns = self.plan.learns(self.index)
        if self.plan.settings.calibrate:
            from torch_turboquant.integrations.vllm.calibrator import KeySums

            self.key_sums = KeySums(self.num_kv_heads, self.head_size, self.plan.device)
        self.prompt_attention = prompt_attention(
            self.head_size,
            self.scale,
            self.sliding_window,
            self.soft_cap,
            self.sinks is not None,
        )

        def bytes_per_token() -> int:
            self.plan.tell(logger, self, layers)
            return self.plan.given(layers)[name]

        adapter.set_page_bytes(self.layer, bytes_per_token, self.plan.tokens_of_block)

    def _read_those_of(self, target: str) -> None:
        """Makes this a layer that reads the keys and values of another one, with its tables, also a
        center that is learned later."""
        owner = self.vllm_config.compilation_config.static_forward_context[target].impl
        if not isinstance(owner, TurboQuantImpl):
            raise ValueError(
                f"torch_turboquant: a layer reads the keys of {target}, whose pages are those of "
                'another attention backend: leave "attention_backend" out of --speculative-config, '
                "or choose this backend for both models"
            )
        self.owner, self.index = owner, owner.index
        self.config, self.tables = owner.config, owner.tables
        self.learns, self.key_sums, self.prompt_attention = False, None, None

    def _bind(self, kv_cache: Tensor) -> None:
        """Prepares the arguments of calls for memory that vLLM has allocated."""
        target = target_of(self.layer)
        if target is not None and self.owner is None:
            # vLLM gives drafts of Gemma 4 the keys of the model once both are loaded.
            self._read_those_of(target)
        self.config = replace(self.config, page_size=kv_cache.shape[2])
        self.pages, self.first_tokens = page_parts(
            kv_cache, self.config, self.plan.first_token_dtype
        )
        self.store_arguments = store_constants(self.config, self.tables)
        self.attend_arguments = (*attend_constants(self.config, self.tables), self.scale)
        self.attend_options = (self.sliding_window, self.soft_cap, self.sink_logits)
        self.step_arguments = step_constants(self.config, self.tables)
        self.bound = kv_cache

    def _learn(self, key: Tensor) -> None:
        """The center of this layer, in place: calls and CUDA graphs have its address."""
        tokens = self.plan.learning.tokens
        if tokens is not None:
            self.tables.center.copy_(key[tokens].float().mean(0))
        self.learns = False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TurboQuantMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("torch_turboquant: outputs are not quantised")
        if attn_metadata is None:  # vLLM measures memory: there is no cache yet
            return output.fill_(0)
        if kv_cache is not self.bound:
            self._bind(kv_cache)
        parts, step = attn_metadata.parts, attn_metadata.whole
        if not any(map(self._is_for_flash, parts)):
            parts = attn_metadata.by_op
        if key is not None and key.shape[0] != step.end:  # a layer that shares pages has none
            key, value = key[: step.end], value[: step.end]
        if self.owner is None:
            self._learn_from(attn_metadata, query, key)
            if len(parts) == 1 and parts[0].exact and not self._is_for_flash(parts[0]):
                self._store_and_attend(attn_metadata, parts[0], query, key, value, output)
                return output
            self._store(attn_metadata, key, value)
        for part in parts:
            self._attend(part, query, key, value, output)
        return output

    def _learn_from(self, m: TurboQuantMetadata, query: Tensor, key: Tensor) -> None:
        if self.learns and self.plan.learning.decided:
            self._learn(key)
        if self.key_sums is not None:
            end, lengths = m.whole.end, m.whole.seq_lens
            self.key_sums.add(query[:end], key, m.query_start_loc, lengths)

    def _store(self, m: TurboQuantMetadata, key: Tensor, value: Tensor) -> None:
        """Stores a whole step before any of its parts is computed.

        A sequence may read pages that another one of the same step fills: vLLM shares prefixes from
        the moment that their pages are promised.
        """
        step = m.whole
        arguments = (key, value, self.pages, m.slot_mapping, *self.store_arguments)
        if self.first_tokens is None:
            _store(*arguments)
            return
        tail = self.first_tokens, step.first_pages
        _store(*arguments, *tail, step.seq_lens, step.cu_seqlens, FIRST_TOKENS)

    def _store_and_attend(
        self,
        m: TurboQuantMetadata,
        part: Part,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
    ) -> None:
        """A step that is one call of attention, with its store."""
        if part.end != query.shape[0]:
            query, out = query[: part.end], out[: part.end]
        arguments = self._arguments(part, query)
        _store_and_attend(
            *arguments, key, value, slot_mapping=m.slot_mapping, **self.step_arguments, out=out
        )

    def _is_for_flash(self, part: Part) -> bool:
        """Whether a part is left to FlashAttention, which does not know where a window of the
        tokens in the cache begins."""
        if self.prompt_attention is None or not part.by_flash:
            return False
        return not part.contexts or not self.sliding_window

    def _attend(self, part: Part, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        first, end, table, _, _, starts, longest, exact, _, contexts = part
        if first or end != query.shape[0]:
            query, out = query[first:end], out[first:end]
        # A layer that reads the pages of another one has no keys of its own.
        exact = exact and self.owner is None
        if exact and (first or end != key.shape[0]):
            key, value = key[first:end], value[first:end]
        if not self._is_for_flash(part):
            new = (key, value) if exact else (None, None)
            _attend(*self._arguments(part, query), *new, out=out)
            return
        if not contexts:
            self.prompt_attention.fresh(query, key, value, out, starts, longest)
            return

        def load(sequence: int, at: int, tokens: int, length: Tensor) -> tuple[Tensor, Tensor]:
            row = table[sequence : sequence + 1, at // self.config.page_size :]
            arguments = self.config, self.tables, tokens, query.dtype
            keys, values = cache_load(self.pages, row, length, *arguments)
            if at == 0 and self.first_tokens is not None:
                entry = self.first_tokens.index_select(0, row[:, 0])[0]
                put_first_token((keys[0], values[0]), entry)
            return keys[0], values[0]

        self.prompt_attention.continued(query, key, value, out, starts, longest, contexts, load)

    def _arguments(self, part: Part, query: Tensor) -> tuple[Any, ...]:
        """The arguments of attention up to the new tokens."""
        tail: tuple[Any, ...] = (self.first_tokens, part.first_pages, None, FIRST_TOKENS, 0)
        if self.first_tokens is None:
            tail = NO_TAIL
        return (
            query,
            self.pages,
            part.block_table,
            part.seq_lens,
            *self.attend_arguments,
            part.cu_seqlens,
            part.longest,
            *tail,
            *self.attend_options,
        )
