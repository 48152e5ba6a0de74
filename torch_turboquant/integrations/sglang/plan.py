"""What all layers of one engine share: settings, sizes, constants, and the number of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_turboquant.config import CacheConfig
from torch_turboquant.format import FORMAT_VERSION
from torch_turboquant.integrations.engine import pages
from torch_turboquant.integrations.engine.centers import (
    LayerConstants,
    check_biased_keys,
    find_file,
)
from torch_turboquant.integrations.engine.limits import refuse
from torch_turboquant.integrations.engine.settings import NO_CENTERS
from torch_turboquant.integrations.sglang import limits
from torch_turboquant.integrations.sglang.arguments import chosen
from torch_turboquant.integrations.sglang.settings import (
    backends_of,
    given_settings,
    is_ours,
    parse,
)
from torch_turboquant.layer_choice import layer_configs
from torch_turboquant.tables import CacheTables, make_tables
from torch_turboquant.tail import ring_rows, tail_rows, tail_shape

RING_SHARE = 64
"""Rings get at most this part of the memory (1 / 64) where --max-running-requests is not given."""
MOST_REQUESTS = 4096  # what SGLang allows at most by itself


class Heads(NamedTuple):
    """Of the keys and values of a layer."""

    number: int
    """On this rank."""
    channels: int


class Plan:
    """The choices for the layers of one model on one rank.

    Args:
        kvc: SGLang's KVCacheConfigurator, which asks first.

    Attributes:
        own_layers: which layers of the model have pages, by their numbers, in their order.
        sliding_layers: those of them whose pages lie in a pool of their own, which SGLang gives the
            layers with sliding windows of some models; usually none.
        readers: how many layers without pages read those of a layer, by its number; usually none.
        own_heads: the heads of every layer where they differ (Gemma 4); usually none.
        is_hybrid: whether other layers keep a state, in a pool of SGLang's.

    Raises:
        ValueError: SGLang or the model ask for what is not supported; all of it is named.
    """

    sliding_layers: Sequence[int] = ()
    readers: Mapping[int, int] = MappingProxyType({})
    own_heads: Mapping[int, Heads] = MappingProxyType({})

    def __init__(self, kvc: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        from torch_turboquant.integrations.sglang import layers

        args, model = chosen(kvc.server_args), kvc.model_config
        refuse(limits.wrong_arguments(args) + limits.wrong_model(kvc, args))
        self.settings = parse(args.attention_backend, args.json_model_override_args)
        self.rank, self.ranks = get_parallel().attn_tp_rank, get_parallel().attn_tp_size
        self.page_size: int = kvc.page_size
        self.device, self.dtype = torch.device(kvc.device), kvc.model_dtype
        self.head_dim: int = model.head_dim
        self.kv_heads: int = model.get_num_kv_heads(self.ranks)
        self.q_heads: int = model.num_attention_heads // self.ranks
        self.readers = layers.readers_of(kvc.model)
        self.own_layers, self.sliding_layers = attention_layers(kvc), sliding_layers(kvc)
        stored = layers.heads_of(kvc.model)
        if self.readers:
            self.own_layers = [layer for layer in self.own_layers if layer in stored]
            self.sliding_layers = [layer for layer in self.sliding_layers if layer in stored]
        if limits.heads_may_differ(kvc):
            self.own_heads = stored
        self.is_hybrid: bool = kvc.mambaish_config is not None
        self.drafts: int = args.speculative_num_draft_tokens if args.speculative_algorithm else 0
        self.layers_of_drafts = draft_layers(kvc)
        base = replace(self.settings.config(self.head_dim), page_size=self.page_size)
        if self.drafts:  # where each draft reads itself as it is, which is a window of one token
            base = replace(base, recent_window=max(1, base.recent_window))
        total = int(model.num_hidden_layers)
        presets = self.settings.choices(total)
        as_given = dict(self.settings.layers)
        refuse(limits.wrong_layer_presets(as_given, self.own_layers, total))
        configs = layer_configs(base, [0] * total, layer_presets=presets)
        self.configs = [
            replace(config, head_dim=self.heads(layer).channels)
            for layer, config in enumerate(configs)
        ]
        self.sinks, self.window = base.sink_tokens, base.recent_window
        self.requested: int | None = args.max_running_requests
        self.max_requests = 0  # of config_from_budget
        self.constants: LayerConstants | None = None
        given = self.settings.centers
        file: Path | None = None if given == NO_CENTERS else find_file(args.model_path, given)
        if file is not None:
            self.constants = LayerConstants.of(file, as_written(kvc), self.rank, self.ranks)

    @property
    def first_token_dtype(self) -> torch.dtype | None:
        """The dtype of exact first tokens in the pages; None: there are none."""
        return self.dtype if self.sinks else None

    def config(self, layer: int) -> CacheConfig:
        """The configuration of a layer of the model."""
        return self.configs[layer]

    def heads(self, layer: int) -> Heads:
        """The heads of a layer of the model."""
        return self.own_heads.get(layer) or Heads(self.kv_heads, self.head_dim)

    @property
    def num_layers(self) -> int:
        """How many layers have pages."""
        return len(self.own_layers)

    def token_bytes(self, layer: int) -> int:
        """Bytes of a token and KV head in a layer's pages."""
        return pages.bytes_per_token(self.configs[layer], self.page_size, self.first_token_dtype)

    def asked(self, layers: Sequence[int]) -> int:
        """For how many layers SGLang wants pages where these have some: readers are among them."""
        return sum(1 + self.readers.get(layer, 0) for layer in layers)

    @property
    def full_layers(self) -> Sequence[int]:
        """The layers with pages that are not in the pool of sliding layers."""
        return [layer for layer in self.own_layers if layer not in self.sliding_layers]

    def bytes_of(self, layers: Sequence[int]) -> int:
        """Bytes of a token in the pages of these layers of this rank."""
        return sum(self.heads(layer).number * self.token_bytes(layer) for layer in layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the pages of all layers of this rank."""
        return self.bytes_of(self.own_layers)

    def plain_bytes(self, layer: int) -> int:
        """Bytes of a token of a layer in the model's dtype, on this rank."""
        heads = self.heads(layer)
        return 2 * heads.channels * heads.number * self.dtype.itemsize

    @property
    def cell_size(self) -> int:
        """What SGLang is to take for the bytes of a token in the layers of the model.

        Layers of a draft model beside it keep their keys in the model's dtype. SGLang adds them at
        the size of the model's own layers, from which it would count too few bytes.
        """
        own, drafts = self.bytes_per_token, self.layers_of_drafts
        all_layers = own + drafts * 2 * self.head_dim * self.kv_heads * self.dtype.itemsize
        asked = self.asked(self.own_layers)
        return math.ceil(all_layers * asked / (asked + drafts))

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request's exact tail in all layers of this rank."""
        if not self.window:
            return 0
        rows = tail_rows(self.configs[self.own_layers[0]], self.drafts or 1)
        return rows * sum(map(self.plain_bytes, self.own_layers))

    @property
    def ring(self) -> int:
        """Tokens in the ring of a request's exact tail, in every layer."""
        return ring_rows(self.configs[self.own_layers[0]], self.drafts or 1)

    def ring_shape(self, layer: int, requests: int) -> tuple[int, ...]:
        """Of a layer's exact tail, with an entry in front that no request owns."""
        heads = self.heads(layer).number
        return tail_shape(self.configs[layer], requests + 1, heads, self.drafts or 1)

    def reserve(self, budget: int) -> int:
        """Decides for how many requests there are rings, and returns the bytes that these take.

        Args:
            budget: bytes for the whole cache.

        Raises:
            ValueError: the rings of as many requests as were asked for take more than half of it.
        """
        each = self.bytes_per_request
        if not each:
            self.max_requests = self.requested or MOST_REQUESTS
            return 0
        share = budget // RING_SHARE // each - 1
        self.max_requests = self.requested or max(1, min(MOST_REQUESTS, share))
        reserved = (self.max_requests + 1) * each
        if reserved > budget // 2:
            raise ValueError(
                f"torch_turboquant: the exact tails of {self.max_requests} requests take "
                f"{reserved / 1e9:.2f} GB of the {budget / 1e9:.2f} GB for the cache: pass a "
                'smaller --max-running-requests, or set "window" to 0'
            )
        return reserved

    def tables(self, layer: int) -> CacheTables:
        """The constants of a layer, on the device, whose addresses stay."""
        center: Tensor | None = None
        if self.constants is not None:
            center = self.constants.center(layer, *self.heads(layer))
        return make_tables(self.configs[layer], layer, self.device, center)

    def check_biased_keys(self, layer: int) -> None:
        """Raises unless a layer whose keys have a bias has centers, or none are wanted."""
        if self.constants is None and self.settings.centers != NO_CENTERS:
            check_biased_keys(layer, self.configs[layer].key_bits)

    def start_up_line(self, tokens: int, requests: int, sliding_tokens: int = 0) -> str:
        """What the log says of this rank's cache, once.

        Args:
            tokens: that the pages have room for.
            requests: that have exact tails.
            sliding_tokens: that the pages of sliding layers have room for, where these are in a
                pool of their own.
        """
        plain = sum(map(self.plain_bytes, self.own_layers))
        centers = "none" if self.constants is None else self.constants.describe()
        each = self.bytes_per_request
        tails = sliding = shared = ""
        if self.sliding_layers:
            sliding = (
                f" (and {sliding_tokens:,} in a pool of {len(self.sliding_layers)} layers with "
                "sliding windows)"
            )
        if self.readers:
            shared = (
                f" {sum(self.readers.values())} more layers have no pages and read those of layers "
                f"{' and '.join(map(str, sorted(self.readers)))}."
            )
        if each:
            tails = (
                f" Exact tails: the last {self.window} tokens of {requests} requests, "
                f"{each / 1e6:,.2f} MB each, counted in the same memory."
            )
        return (
            f"TurboQuant: {self.settings.presets}, "
            f"{self.bytes_per_token / self.num_layers:,.0f} bytes per token and layer on this "
            f"rank; {tokens:,} tokens fit{sliding}, {plain / self.bytes_per_token:.2f} times those "
            f"of {str(self.dtype).removeprefix('torch.')} in as many bytes.{shared}{tails} "
            f"Centers: {centers}; seed {self.settings.seed}; format {FORMAT_VERSION}"
        )


def attention_layers(kvc: Any) -> Sequence[int]:
    """The layers of the model that keep keys and values, by their numbers, in their order."""
    info = kvc.layer_info
    if kvc.mambaish_config is None:
        return range(info.start_layer, info.start_layer + info.num_effective_layers)
    return tuple(kvc.mambaish_config.full_attention_layer_ids)


def sliding_layers(kvc: Any) -> Sequence[int]:
    """The layers with sliding windows that SGLang gives a pool of their own."""
    if not kvc.is_hybrid_swa:
        return ()
    names = "swa_attention_layer_ids"  # newer versions keep them for each rank
    return tuple(getattr(kvc.layer_info, names, None) or getattr(kvc.model_config, names))


def as_written(kvc: Any) -> Any:
    """The configuration of a model as transformers reads it.

    SGLang changes that of Gemma 4: what it calls the heads of all layers are those of layers with
    full attention, and what files name otherwise is gone.
    """
    if not limits.heads_may_differ(kvc):
        return kvc.model_config.hf_config
    from transformers import AutoConfig

    args = chosen(kvc.server_args)
    options = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    return AutoConfig.from_pretrained(args.model_path, **options)


def draft_layers(kvc: Any) -> int:
    """The layers of a draft model, whose keys lie in a pool of SGLang's beside the pages."""
    algorithm = kvc.spec_algorithm
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    return int(kvc.spec_aux_config.eagle_draft_num_layers or 0)


_LATEST: list[tuple[Any, Plan]] = []  # the arguments of the engine made last, and its plan


def plan_of(kvc: Any) -> Plan | None:
    """The plan of the engine of a KVCacheConfigurator, made once; None: it has another backend,
    as the model that drafts for one of ours.

    Raises:
        ValueError: another backend has our settings, or shares its steps with ours; and as Plan.
    """
    args = chosen(kvc.server_args)
    if not is_ours(args.attention_backend):
        if any(map(is_ours, backends_of(args))):
            raise ValueError(
                f"torch_turboquant: --attention-backend is {args.attention_backend}, but that of "
                "prefill or of decode is turboquant, and only one backend can read the pages: pass "
                "--attention-backend turboquant alone"
            )
        if given_settings(args.json_model_override_args) is not None:
            raise ValueError(
                "torch_turboquant: there are settings, but another attention backend is chosen: "
                "pass --attention-backend turboquant alone"
            )
        return None
    if kvc.is_draft_worker:
        return None
    if not _LATEST or _LATEST[0][0] is not kvc.server_args:
        _LATEST[:] = [(kvc.server_args, Plan(kvc))]
    return _LATEST[0][1]
