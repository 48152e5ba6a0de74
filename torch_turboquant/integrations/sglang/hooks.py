"""The methods of SGLang that ask the plan of an engine, and whether they do.

SGLang's registry of hooks only logs what it cannot hook, so that `check` calls every hooked method
with a Probe in place of its object: a hook that is there gives the probe back.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from torch_turboquant.integrations.engine.limits import ELSEWHERE
from torch_turboquant.integrations.sglang.arguments import chosen
from torch_turboquant.integrations.sglang.plan import plan_of
from torch_turboquant.integrations.sglang.settings import backends_of, is_ours
from torch_turboquant.integrations.sglang.versions import TESTED

Original = Callable[..., Any]

SETTLING = (
    "sglang.srt.server_args.ServerArgs.resolve_once",
    "sglang.srt.server_args.ServerArgs.__post_init__",
)
"""Where newer and older versions of SGLang settle the arguments of the server."""
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
CELLS = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
TWO_CELLS = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator"
TREES = (
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
)
OTHER_TREES = ("SWARadixCache",)
"""Trees with an answer of their own about prefixes, of engines that limits refuses."""
PREFIX_METHOD = "swa_reprefill_tail_tokens"


class Probe:
    """In place of an object of SGLang, for a method that is expected to have a hook."""


def settle_arguments(original: Original, server_args: Any) -> None:
    """What SGLang chooses where nothing was given, and for single models against what was.

    Raises:
        ValueError: another attention backend is in the place of ours.
    """
    asked = backends_of(server_args)
    original(server_args)
    for before, after in zip(asked, backends_of(chosen(server_args)), strict=True):
        if is_ours(before) and not is_ours(after):
            raise ValueError(
                f"torch_turboquant: SGLang has put the attention backend {after} in the place of "
                f"{before}, as the only one for this model or one of its options: {ELSEWHERE}"
            )


def build_pool(original: Original, kvc: Any, **arguments: Any) -> Any:
    """The pool of pages instead of the pool of keys and values."""
    plan = plan_of(kvc)
    if plan is not None:
        from torch_turboquant.integrations.sglang.pool import TurboQuantKVPool

        arguments["mha_pool_class"] = functools.partial(TurboQuantKVPool, plan=plan)
    return original(kvc, **arguments)


def config_from_budget(original: Original, kvc: Any, budget_bytes: int, **more: Any) -> Any:
    """The number of tokens in the memory that the exact tails of requests leave."""
    plan = plan_of(kvc)
    reserved = 0 if plan is None else plan.reserve(budget_bytes)
    return original(kvc, budget_bytes - reserved, **more)


def resolve_max_num_reqs(original: Original, kvc: Any, token_capacity: int) -> int:
    """No more requests than have exact tails."""
    plan, requests = plan_of(kvc), original(kvc, token_capacity)
    return requests if plan is None else min(requests, plan.max_requests)


def compute_cell_size(original: Original, cells: Any, kvc: Any, num_layers: int) -> int:
    """The bytes of a token."""
    plan = plan_of(kvc)
    return original(cells, kvc, num_layers) if plan is None else plan.cell_size


def two_cell_sizes(original: Original, cells: Any, kvc: Any) -> None:
    """The bytes of a token in each of two pools, and of one for which both are divided up.

    SGLang multiplies the bytes of a layer by the number of layers, which may have presets of their
    own, or no pages: a layer gets their mean.
    """
    original(cells, kvc)
    plan = plan_of(kvc)
    if plan is None:
        return
    full, sliding = plan.bytes_of(plan.full_layers), plan.bytes_of(plan.sliding_layers)
    cells._full_per_token = full / plan.asked(plan.full_layers)
    cells._swa_per_token = sliding / plan.asked(plan.sliding_layers)
    cells._cell_size = full + cells._swa_full_tokens_ratio * sliding


def reprefill_tail_tokens(original: Original, tree: Any, *arguments: Any, **more: Any) -> int:
    """How many tokens at the end of a prompt are computed even where the tree has them.

    The exact window of a request is nobody else's, so that a request which continues somebody's
    prefix computes the last tokens anew. SGLang asks for the same reason where it keeps the keys of
    sliding windows by request.
    """
    from torch_turboquant.integrations.sglang.pool import TurboQuantKVPool, pages_of

    tokens = original(tree, *arguments, **more)
    allocator = getattr(tree, "token_to_kv_pool_allocator", None)
    pool = None if allocator is None else pages_of(allocator.get_kvcache())
    return max(tokens, pool.plan.window) if isinstance(pool, TurboQuantKVPool) else tokens


def keep_windows_of_prefixes(
    original: Original, req: Any, pre_len: int, *, sliding_window_size: int, **more: Any
) -> None:
    """How much of a request stays in the pool of sliding layers.

    The tree offers a prefix only with the window before its end. That is the end of a page, and
    requests take no prefix that reaches into the exact window at their end. So that much more
    stays: else a conversation whose turns are shorter than that would find nothing.
    """
    from torch_turboquant.integrations.sglang.pool import TurboQuantKVPool, pages_of

    shared = more.get("supports_prefix_sharing", not more.get("is_chunk_cache", False))
    pool = pages_of(more["token_to_kv_pool_allocator"].get_kvcache())
    if shared and isinstance(pool, TurboQuantKVPool):
        sliding_window_size += pool.plan.window + pool.plan.page_size
    original(req, pre_len, sliding_window_size=sliding_window_size, **more)


def draft_chains(original: Original, worker: Any, batch: Any) -> tuple[Any, Any]:
    """The deepest branch of each tree of n-grams, so that every draft sees all before it."""
    tokens, mask = original(worker, batch)
    if not is_ours(chosen(worker.server_args).attention_backend):
        return tokens, mask
    return chains_of_trees(tokens, mask, worker.draft_token_num)


def chains_of_trees(
    tokens: np.ndarray, mask: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chains in place of trees of drafts.

    SGLang joins n-grams of several lengths, and pads short trees with guesses of token 0 for the
    first place, so that there are branches even where the tree may be one guess broad.

    Args:
        tokens: of all trees, each of `size` nodes, parents before their children.
        mask: of all trees [size, size]: which nodes a node sees, itself and its ancestors.

    Returns:
        tokens and mask in the same form. A chain that is too short ends with token 0, which is
        then one more guess.
    """
    trees, sees = tokens.reshape(-1, size), mask.reshape(-1, size, size) != 0
    chains = np.zeros_like(trees)
    for chain, tree, ancestors in zip(chains, trees, sees, strict=True):
        branch = tree[ancestors[ancestors.sum(1).argmax()]]
        chain[: len(branch)] = branch
    causal = np.tri(size, dtype=mask.dtype)
    return chains.reshape(-1), np.broadcast_to(causal, sees.shape).reshape(-1)


AS_ABLE = "triton"
_judging: ContextVar[bool] = ContextVar("judging", default=False)


def adjust_to_model(original: Original, server_args: Any) -> Any:
    """What SGLang does for single models, which is when it judges attention backends by name."""
    token = _judging.set(True)
    try:
        return original(server_args)
    finally:
        _judging.reset(token)


def backends_to_judge(original: Original, view: Any) -> tuple[str | None, str | None]:
    """The backends of prefill and decode; where SGLang judges ours, one of those that can do as
    much: gpt-oss needs sliding windows and learned sinks, Gemma 4 needs layers that share keys, and
    there are lists of names that have them.
    """
    found: tuple[str | None, str | None] = original(view)
    return (AS_ABLE, AS_ABLE) if _judging.get() and all(map(is_ours, found)) else found


HOOKS: dict[str, Callable[..., Any]] = {
    f"{CONFIGURATOR}._build_mha_kv_pool": build_pool,
    f"{CONFIGURATOR}._build_hybrid_linear_kv_pool": build_pool,
    f"{CONFIGURATOR}._build_hybrid_swa_kv_pool": build_pool,
    f"{CONFIGURATOR}.config_from_budget": config_from_budget,
    f"{CONFIGURATOR}.resolve_max_num_reqs": resolve_max_num_reqs,
    f"{CELLS}._compute_cell_size": compute_cell_size,
    f"{TWO_CELLS}.__init__": two_cell_sizes,
    **{f"{tree}.{PREFIX_METHOD}": reprefill_tail_tokens for tree in TREES},
    "sglang.srt.mem_cache.common.free_swa_out_of_window_slots": keep_windows_of_prefixes,
}


JUDGING_HOOKS: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (
        adjust_to_model,
        (
            "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
            "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
        ),
    ),
    (
        backends_to_judge,
        (
            "sglang.srt.arg_groups.model_override_base.attention_backends_of",
            "sglang.srt.arg_groups.overrides.attention_backends_of",
        ),
    ),
)
"""Hooks, and where newer and older versions have the method. Without them SGLang itself refuses
the models that they are for, so that `check` does not ask."""


NGRAM_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens": draft_chains,
}
"""Of engines that draft by n-grams; others do not import what these are in."""


@functools.cache  # SGLang would apply hooks twice, and memory would be reserved twice
def register() -> None:
    """Tells SGLang of the hooks, once; it applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in {**HOOKS, _first(SETTLING): settle_arguments}.items():
        HookRegistry.register(target, _with_probe(hook), HookType.AROUND)
    for hook, targets in JUDGING_HOOKS:
        if _resolve(target := _first(targets)) is not None:
            HookRegistry.register(target, hook, HookType.AROUND)


@functools.cache
def register_ngrams() -> None:
    """Applies the hooks of drafts by n-grams, once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in NGRAM_HOOKS.items():
        HookRegistry.register(target, _with_probe(hook), HookType.AROUND)
    HookRegistry.apply_hooks()


def check(version: str, ngrams: bool = False) -> None:
    """Raises RuntimeError unless every hook is in place.

    Args:
        version: of SGLang.
        ngrams: whether the engine drafts by n-grams.
    """
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    wanted = [_first(SETTLING), *HOOKS, *(NGRAM_HOOKS if ngrams else ())]
    missing = [target for target in wanted if not _took(_resolve(target))]
    for tree in _subclasses(BasePrefixCache):
        own = vars(tree).get(PREFIX_METHOD)
        if own is not None and tree.__name__ not in OTHER_TREES and not _took(own):
            missing.append(f"{tree.__module__}.{tree.__name__}.{PREFIX_METHOD}")
    if missing:
        raise RuntimeError(
            f"torch_turboquant: SGLang {version} does not ask the plug-in in "
            f"{', '.join(sorted(set(missing)))}: install SGLang {' or '.join(TESTED)}, or a newer "
            "torch_turboquant"
        )


def _with_probe(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def answer(original: Original, owner: Any, *arguments: Any, **more: Any) -> Any:
        if isinstance(owner, Probe):
            return owner
        return hook(original, owner, *arguments, **more)

    return answer


def _first(targets: Sequence[str]) -> str:
    """The first method that this version has, or else the last."""
    return next((target for target in targets if _resolve(target) is not None), targets[-1])


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (AttributeError, ImportError):
        return None


def _took(method: Any) -> bool:
    """Whether a hook answers in place of this method."""
    probe = Probe()
    try:
        return method(probe) is probe
    except Exception:  # whatever a method without a hook does with a probe
        return False


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [*direct, *(below for one in direct for below in _subclasses(one))]
