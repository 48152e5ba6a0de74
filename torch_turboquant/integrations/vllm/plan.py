"""What all layers of one engine share: settings, presets of layers, where centers come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from torch_turboquant.config import CacheConfig
from torch_turboquant.format import FORMAT_VERSION
from torch_turboquant.integrations.engine import pages
from torch_turboquant.integrations.engine.centers import (
    LayerConstants,
    check_biased_keys,
    find_file,
)
from torch_turboquant.integrations.engine.settings import NO_CENTERS
from torch_turboquant.integrations.vllm import adapter, choice, limits
from torch_turboquant.integrations.vllm.learning import Learning
from torch_turboquant.integrations.vllm.settings import parse
from torch_turboquant.integrations.vllm.sizes import needs_of, share, target_of
from torch_turboquant.integrations.vllm.versions import untested
from torch_turboquant.latent import LatentConfig, LatentTables, make_latent_tables, norm_center
from torch_turboquant.tables import CacheTables, make_tables

PAGE_SIZE = 64  # where the user has not chosen --block-size: fewer, longer runs than vLLM's 16


class Engine:
    """What all plans of one engine share: it has one for its model, and others where vLLM makes a
    part of the model from a copy of its configuration, as drafts and language models inside."""

    def __init__(self) -> None:
        self.learning = Learning()
        self.page_tokens = 0
        """Tokens of a page that bytes are counted with; 0: as many as the block size says."""
        self.is_hybrid = False
        """Whether a model of the engine has layers with a state of fixed size."""
        self.has_latents = False
        """Whether a model of the engine has latent attention."""


class Plan:
    """The choices for the layers of one model in this process.

    A draft model gets the settings' preset for all of its layers and no centers: `layers` and
    `centers` speak of the model that is served.
    """

    def __init__(self, vllm_config: Any) -> None:
        cache_dtype = vllm_config.cache_config.cache_dtype
        self.settings = parse(vllm_config.additional_config, cache_dtype)
        self.engine = _engine_of(vllm_config)
        limits.check_engine(vllm_config, adapter.INTERFACE, self.settings)
        choice.let_drafts_follow(vllm_config)
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        self.layers = int(model.hf_text_config.num_hidden_layers)
        self.vllm_cache_config = vllm_config.cache_config
        self._scheduler_config = vllm_config.scheduler_config
        self.engine.is_hybrid |= bool(model.is_hybrid)
        self.latents: bool = model.use_mla
        self.engine.has_latents |= self.latents
        if self.latents:
            limits.keep_pages_to_attention(vllm_config.compilation_config)
        keeps = self.settings.first_token == "exact"
        self.dtype: torch.dtype = model.dtype
        self.first_token_dtype: torch.dtype | None = model.dtype if keeps else None
        self.is_draft = _is_of_drafts(model, speculative)
        self.device = torch.device(vllm_config.device_config.device)
        self.constants: LayerConstants | None = None
        self.rank = get_tensor_model_parallel_rank()
        file, given = None, self.settings.centers
        makes_it = self.settings.calibrate and given is None  # the one beside the model, anew
        may_have = not self.is_draft and not self.latents and given != NO_CENTERS
        if may_have and not makes_it:
            file = find_file(model.model, given)
        if file is not None:
            ranks = get_tensor_model_parallel_world_size()
            self.constants = LayerConstants.of(file, model.hf_config, self.rank, ranks)
        learns = may_have and self.settings.learn and file is None
        self.learning = self.engine.learning if learns else None
        if self.learning is not None:
            limits.check_learning(vllm_config)
        self._told = False

    def index(self, name: str, drafts: bool) -> int:
        """The number of a layer by its name; those of drafts come behind the model's own.

        Some models number the layers that draft (MTP) on from their own ones, and some anew.
        """
        number = limits.layer_index(name)
        if not (drafts or self.is_draft):
            limits.check_layer_number(name, number, self.layers)
        return number + self.layers if drafts and number < self.layers else number

    def config(self, layer: int, head_dim: int) -> CacheConfig:
        """The configuration of a layer, with some page size."""
        if self._is_drafting(layer):
            limits.check_preset_of_drafts(self.settings.preset)
            return self.settings.config(head_dim)
        return self.settings.layer_config(head_dim, layer, self.layers)

    def latent_config(self, layer: int, latent_dim: int, rope_dim: int) -> LatentConfig:
        """The configuration of a layer with latent attention, with some page size."""
        dims = latent_dim, rope_dim, self.dtype
        if self._is_drafting(layer):
            return self.settings.latent_config(*dims)
        return self.settings.latent_layer_config(*dims, layer, self.layers)

    def tokens_of_block(self, size: int) -> int:
        """Tokens of the layers' blocks where vLLM says `size`: for latents LATENT_SIZES or more.

        On a CPU without AMX vLLM makes blocks of 16 tokens for latents, whatever the user asks for.
        Drafts beside latents have as many tokens, or vLLM would part them into groups, which its
        drafting refuses.
        """
        fits = not self.engine.has_latents or size % pages.LATENT_SIZES[0] == 0
        return size if fits else PAGE_SIZE

    def bytes_per_token(self, config: CacheConfig | LatentConfig) -> int:
        """Bytes of a token and KV head in a layer's pages; the model has been loaded by then.

        Where a draft model is loaded, vLLM asks before its block size fits the backends, but only
        whether a layer has pages at all.
        """
        return pages.bytes_per_token(config, self._page_tokens(), self.first_token_dtype)

    def settle_pages(self) -> None:
        """Remembers what pages were counted with, where a model of the engine is hybrid.

        vLLM asks backends for their bytes once its block size fits them, and then makes blocks
        larger: they are multiples of that.
        """
        if self.engine.is_hybrid:
            self.engine.page_tokens = self._page_tokens()

    def _page_tokens(self) -> int:
        sizes = pages.LATENT_SIZES if self.latents else pages.SIZES
        block = self.tokens_of_block(int(self.vllm_cache_config.block_size))
        return self.engine.page_tokens or pages.page_tokens(block, sizes)

    def given(self, layers: Mapping[str, Any]) -> dict[str, int]:
        """Bytes of a token and KV head of the engine's layers on this rank, which have been loaded.

        In hybrid models vLLM has made blocks of bytes_per_token by then, for layers of one kind.
        """
        alike = self.engine.is_hybrid or self._scheduler_config.disable_hybrid_kv_cache_manager
        return share(needs_of(layers, bool(alike)))

    def _is_drafting(self, layer: int) -> bool:
        """Whether a layer drafts: the heads of EAGLE and MTP come behind the model's layers."""
        return self.is_draft or layer >= self.layers

    def learns(self, layer: int) -> bool:
        """Whether the center of a layer is learned from the first prompt."""
        return self.learning is not None and not self._is_drafting(layer)

    def check_reader(self, name: str, drafts: bool) -> None:
        """Raises ValueError for a layer that reads the keys of another one and has a preset of its
        own in the settings, which could change nothing.

        Args:
            name, drafts: as in index.
        """
        if not self.settings.layers:
            return
        layer = self.index(name, drafts)
        if not self._is_drafting(layer) and layer in self.settings.choices(self.layers):
            raise ValueError(
                f'turboquant: "layers" names layer {layer}, which keeps no keys and values and '
                "reads those of an earlier layer: leave it out"
            )

    def check_bias(self, layer: int, config: CacheConfig, has_bias: Callable[[], bool]) -> None:
        """Raises ValueError for a layer whose keys have a bias and will get no center, unless none
        is wanted. Layers that draft have none either, and only lose drafts.

        has_bias: whether its keys have one, which is asked where it matters.
        """
        will_have = self.constants is not None or self.learns(layer) or self._is_drafting(layer)
        if not will_have and self.settings.centers != NO_CENTERS and has_bias():
            check_biased_keys(layer, config.key_bits, 'set "learn" to true, ')

    def tables(self, layer: int, config: CacheConfig, kv_heads: int) -> CacheTables:
        """The constants of a layer, on the device, whose addresses stay."""
        center: Tensor | None = None
        if self.learns(layer):
            center = torch.zeros(kv_heads, config.head_dim, dtype=torch.float32, device="cpu")
        elif self.constants is not None and not self._is_drafting(layer):
            center = self.constants.center(layer, kv_heads, config.head_dim)
        return make_tables(config, layer, self.device, center)

    def latent_tables(self, layer: int, config: LatentConfig, norm: Tensor) -> LatentTables:
        """The constants of a layer with latent attention; norm: the weight of its latents' norm."""
        return make_latent_tables(config, layer, self.device, norm_center(norm))

    def tell(self, logger: Any, impl: Any, layers: dict[str, Any]) -> None:
        """Logs the start-up line when vLLM asks what the first layer of the model needs, and of a
        version that has not been tested that it is one."""
        if self._told or self._is_drafting(impl.index) or self.rank:
            return
        self._told = True
        kept = {}
        for name, layer in layers.items():
            other = getattr(layer, "impl", None)
            ours = type(other) is type(impl) and other.plan is self
            if ours and target_of(layer) is None and not self._is_drafting(other.index):
                kept[name] = (other.config, other.num_kv_heads)
        given = self.given(layers)
        stored = sum(given[name] * heads for name, (_, heads) in kept.items())
        logger.info(self.start_up_line(impl.dtype, [*kept.values()], stored))
        said = untested(vllm.__version__)
        if said:
            logger.warning(said)

    def start_up_line(
        self,
        dtype: torch.dtype,
        layers: Sequence[tuple[CacheConfig | LatentConfig, int]],
        stored: int,
    ) -> str:
        """What the log says of this rank's cache, once.

        Args:
            dtype: of the model.
            layers: configuration and KV heads of every layer that keeps pages.
            stored: bytes of a token in all of these layers.
        """
        needed = sum(self.bytes_per_token(config) * heads for config, heads in layers)
        rows = needed - sum(config.bytes_per_token * heads for config, heads in layers)
        plain = sum(pages.row_bytes(config, dtype) * heads for config, heads in layers)
        parts = [(rows, "for exact first tokens"), (stored - needed, "to make pages alike")]
        told = [f"{part / len(layers):,.0f} of them {why}" for part, why in parts if part]
        centers = "none" if self.learning is None else "to be learned from the first prompt"
        if self.constants is not None:
            centers = self.constants.describe()
        if self.latents:
            centers = "scales of channels from the norm of latents"
        each = f"{stored / len(layers):,.0f} bytes per token and layer on this rank"
        return (
            f"TurboQuant: {self.settings.presets}, {', '.join([each, *told])}; "
            f"{plain / stored:.2f} times the tokens of {str(dtype).removeprefix('torch.')} fit. "
            f"Centers: {centers}; seed {self.settings.seed}; format {FORMAT_VERSION}"
        )


_PLANS: list[tuple[weakref.ref[Any], Plan]] = []  # an engine each; configurations have no hash


def plan_of(vllm_config: Any) -> Plan:
    """The plan of an engine's configuration, made once."""
    _PLANS[:] = [(ref, plan) for ref, plan in _PLANS if ref() is not None]
    for ref, plan in _PLANS:
        if ref() is vllm_config:
            return plan
    plan = Plan(vllm_config)
    _PLANS.append((weakref.ref(vllm_config), plan))
    return plan


def _engine_of(vllm_config: Any) -> Engine:
    """The engine of a configuration: all that it has know the layers by one compilation_config."""
    same = vllm_config.compilation_config
    for ref, plan in _PLANS:
        other = ref()
        if other is not None and other.compilation_config is same:
            return plan.engine
    return Engine()


def _is_of_drafts(model: Any, speculative: Any) -> bool:
    """Whether a configuration is that of a draft model.

    Where drafts come without a model, as those of n-grams, vLLM names the served model as both.
    """
    if speculative is None or model is speculative.target_model_config:
        return False
    return model is speculative.draft_model_config


def are_for_drafts(vllm_config: Any) -> bool:
    """Whether layers that are made now will draft: those of the model have been loaded by then."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = (getattr(layer, "impl", None) for layer in layers)
    return any(hasattr(i, "plan") and i.index is not None for i in impls)


def latest_plan() -> Plan:
    """The plan of the engine that this process has made last.

    vLLM asks backends for the sizes of pages without saying for which engine.
    """
    return _PLANS[-1][1]
