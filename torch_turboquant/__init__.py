"""TurboQuant for PyTorch: KV caches of 2 to 8 bits per channel that attention reads directly."""

# the compiled libraries register the ops: before everything else
try:
    from torch_turboquant._library import build_info  # isort: skip
except ImportError as error:
    from torch_turboquant._command import exit_from_command

    exit_from_command(error)  # who typed a command gets one line, and no traceback
    raise
from torch_turboquant import _autograd  # noqa: F401  refuses inputs that require grad
from torch_turboquant._version import __version__
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.choices import KernelChoice, kernel_choice
from torch_turboquant.codebook import Codebook
from torch_turboquant.config import (
    NAMED_PRESETS,
    PRESETS,
    CacheConfig,
    NamedPreset,
    Preset,
    preset,
)
from torch_turboquant.eviction import Eviction
from torch_turboquant.format import LatentRecord, Record
from torch_turboquant.heavy_hitters import HeavyHitters
from torch_turboquant.latent import (
    LATENT_PRESETS,
    LatentConfig,
    LatentPreset,
    LatentTables,
    allocate_latent_cache,
    allocate_latent_tail,
    fold_latent_rotation,
    latent_preset,
    make_latent_tables,
    rotate_latent,
)
from torch_turboquant.layer import PagedLayer
from torch_turboquant.ops.attention import merge_attention, paged_attention, store_and_attend
from torch_turboquant.ops.cache import (
    allocate_cache,
    cache_load,
    cache_store,
    cache_store_layers,
)
from torch_turboquant.ops.center import learn_center, query_energy
from torch_turboquant.ops.codec import SCALE_MODES, decode, encode, scaled_center
from torch_turboquant.ops.group import group_decode, group_encode
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.ops.linear import (
    linear_experts,
    linear_packed,
    weight_decode,
    weight_encode,
    weight_pack,
    weight_unpack,
)
from torch_turboquant.ops.mass import paged_mass
from torch_turboquant.ops.mla import mla_attention, mla_load, mla_store
from torch_turboquant.ops.move import cache_move
from torch_turboquant.ops.pack import pack, unpack
from torch_turboquant.ops.qjl import gaussian_projection, qjl_score, qjl_sketch
from torch_turboquant.ops.score import score
from torch_turboquant.paper import TurboQuantKVCache, TurboQuantMSE, TurboQuantProd
from torch_turboquant.pool import (
    ExportedSequence,
    PagedKVPool,
    PoolBatch,
    PoolBytes,
    PoolExhausted,
    PoolSequence,
    PoolStatistics,
    SwappedSequence,
)
from torch_turboquant.signs import SignKind, random_signs
from torch_turboquant.tables import CacheTables, make_tables
from torch_turboquant.tail import Tail, allocate_tail
from torch_turboquant.weights import PackedLinear, WeightFormat, decode_weight, encode_weight

__all__ = [
    "LATENT_PRESETS",
    "NAMED_PRESETS",
    "PRESETS",
    "SCALE_MODES",
    "AttentionBatch",
    "AttentionOptions",
    "CacheConfig",
    "CacheTables",
    "Codebook",
    "Eviction",
    "ExportedSequence",
    "HeavyHitters",
    "KernelChoice",
    "LatentConfig",
    "LatentPreset",
    "LatentRecord",
    "LatentTables",
    "NamedPreset",
    "PackedLinear",
    "PagedKVPool",
    "PagedLayer",
    "PoolBatch",
    "PoolBytes",
    "PoolExhausted",
    "PoolSequence",
    "PoolStatistics",
    "Preset",
    "Record",
    "SignKind",
    "SwappedSequence",
    "Tail",
    "TurboQuantKVCache",
    "TurboQuantMSE",
    "TurboQuantProd",
    "WeightFormat",
    "__version__",
    "allocate_cache",
    "allocate_latent_cache",
    "allocate_latent_tail",
    "allocate_tail",
    "build_info",
    "cache_load",
    "cache_move",
    "cache_store",
    "cache_store_layers",
    "decode",
    "decode_weight",
    "encode",
    "encode_weight",
    "fold_latent_rotation",
    "gaussian_projection",
    "group_decode",
    "group_encode",
    "hadamard",
    "kernel_choice",
    "latent_preset",
    "learn_center",
    "linear_experts",
    "linear_packed",
    "make_latent_tables",
    "make_tables",
    "merge_attention",
    "mla_attention",
    "mla_load",
    "mla_store",
    "pack",
    "paged_attention",
    "paged_mass",
    "preset",
    "qjl_score",
    "qjl_sketch",
    "query_energy",
    "random_signs",
    "rotate_latent",
    "scaled_center",
    "score",
    "store_and_attend",
    "unpack",
    "weight_decode",
    "weight_encode",
    "weight_pack",
    "weight_unpack",
]
