"""The layers of a language model, read from its configuration: what each layer keeps of a token.

Everybody who needs to know asks this reader. The memory planner hands it the content of a
config.json, the transformers integration the configuration object of a loaded model. They differ in
one respect: the object has the defaults of its class filled in, while a file holds only what its
author wrote. Where a file leaves a value to the class, the reader knows families by their
`model_type`, and raises IncompleteConfig for all others instead of guessing.

The reader states facts. Which of them a cache supports is decided by its callers, each in its own
words. transformers is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Kind(Enum):
    """How a layer uses the tokens before the current one."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    CHUNKED = "chunked attention"
    LATENT = "latent attention (MLA)"
    SHARED = "attention to the keys and values of an earlier layer"
    STATE = "a state of fixed size, or none (linear attention, convolution, MLP)"
    OTHER = "unknown"


KEEPS_KEYS = frozenset({Kind.FULL, Kind.SLIDING})
"""Kinds of layers that keep one key and one value per token and KV head."""
KEEPS_TOKENS = KEEPS_KEYS | {Kind.LATENT}
"""Kinds of layers that keep something of every token, or of those that their window shows."""

# Names of layer types in layer_types and layers_block_type.
_FULL_TYPES = frozenset({"full_attention", "attention"})
_STATE_TYPES = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe"})

# Families whose class takes hidden_size / num_attention_heads where the file names no head_dim.
# Other families have defaults of their own, which only transformers knows.
DERIVED_HEAD_DIM = frozenset(
    "apertus arcee cohere cohere2 diffllama flex_olmo granite granite_swa granitemoe "
    "granitemoehybrid granitemoeshared jamba lfm2 llama ministral mistral mixtral nemotron-nas "
    "olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe smollm3 stablelm starcoder2".split()
)
# Every n-th layer has full attention where the file names no pattern: n by family.
_SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_FULL_INTERVAL = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
# Families that slide in all layers where the file names a window.
_ALL_SLIDING = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
# Families whose blocks attend twice; their files count the blocks.
_TWO_ATTENTIONS = frozenset({"longcat_flash"})
# Where files of multimodal models keep the configuration of their language model.
_TEXT_CONFIGS = ("text_config", "thinker_config", "llm_config", "language_config")


class IncompleteConfig(ValueError):
    """The file leaves to its class what the reader needs to know.

    Attributes:
        missing: what the caller can provide instead: "layers", "attending" (the number of layers
            that attend), "kv_heads", "head_dim", "layer_types" or "sliding_window".
    """

    def __init__(self, text: str, missing: str) -> None:
        super().__init__(text)
        self.missing = missing

    def with_advice(self, advice: Mapping[str, str]) -> IncompleteConfig:
        """The same error, with the caller's advice (by `missing`) at the end of its text."""
        if self.missing not in advice:
            return self
        return IncompleteConfig(f"{self}; give {advice[self.missing]}", self.missing)


# ---- fields of a configuration


class Fields:
    """Values of a configuration by name; None where it has none.

    Args:
        source: the content of a config.json, or a configuration object of transformers.
        changes: values that stand in place of those of `source`.
    """

    def __init__(self, source: Any, changes: Mapping[str, Any] | None = None) -> None:
        self._source, self._changes = source, changes or {}
        self.is_file = isinstance(source, Mapping)

    def get(self, name: str) -> Any:
        if name in self._changes:
            return self._changes[name]
        if self.is_file:
            return self._source.get(name)
        try:
            return getattr(self._source, name, None)
        except RuntimeError:  # transformers refuses to name one value where layers differ
            return None

    def number(self, name: str, missing: str) -> int:
        """A positive integer.

        Raises:
            IncompleteConfig: the configuration has something else.
        """
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise IncompleteConfig(
                f"the configuration (model type {self.get('model_type')!r}) has {name} = {value!r}",
                missing,
            )
        return value

    def window(self, *names: str) -> int:
        """Tokens of a sliding window, from the first of the names that has one; 0: none.

        Raises:
            IncompleteConfig: the configuration has something else.
        """
        for name in names:
            value = self.get(name)
            if value is None or (value == 0 and not isinstance(value, bool)):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise IncompleteConfig(
                    f"the configuration (model type {self.get('model_type')!r}) has {name} = "
                    f"{value!r}, which is neither a number of tokens nor null, for no window",
                    "sliding_window",
                )
            return value
        return 0

    def has(self, name: str) -> bool:
        """Whether a file mentions the name, be it with the value null."""
        return name in self._changes or (self.is_file and name in self._source)

    def names_beginning_with(self, *beginnings: str) -> list[str]:
        """Names of a file; an object is never asked, since it names the types of its layers."""
        names: Iterable[str] = self._source if self.is_file else ()
        return sorted(name for name in names if name.startswith(beginnings))

    def of_layer(self, index: int, full: bool) -> Fields:
        """The same fields with what one layer has of its own.

        full: the layer has full attention. Such layers of Gemma 4 have larger heads, and fewer.
        """
        source, changes = self._source, dict(self._changes)
        if full and self.get("global_head_dim"):
            changes["head_dim"] = self.get("global_head_dim")
            keys_are_values = self.get("attention_k_eq_v")
            if keys_are_values is None or keys_are_values:
                if heads := self.get("num_global_key_value_heads"):
                    changes["num_key_value_heads"] = heads
        if self.is_file:
            if blocks := self.get("block_configs"):  # nemotron-nas
                if group := blocks[index]["attention"].get("n_heads_in_group"):
                    heads = self.number("num_attention_heads", "kv_heads")
                    changes["num_key_value_heads"] = heads // group
            for key, values in (self.get("per_layer_config") or {}).items():
                if int(key) == index:
                    changes |= values
        elif getattr(source, "is_heterogeneous", False):
            source = source.per_layer_config[index]
        return Fields(source, changes)


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a transformers model, given as the file or its folder.

    Raises:
        ValueError: no such file, or not a JSON object.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = path / "config.json"
        found = path.exists()
    except OSError as error:  # a folder that this user may not enter, a name that is too long
        raise ValueError(f"cannot read the model configuration {path}: {error}") from error
    if not found:
        names_a_model = len(path.parts) == 2 and not path.is_absolute() and path.suffix != ".json"
        raise ValueError(
            f"there is no {path}, and nothing is downloaded. To fetch one: hf download "
            f"{path if names_a_model else 'NAME'} config.json --local-dir FOLDER"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # of JSON, of UTF-8, too deep
        raise ValueError(f"cannot read the model configuration {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no model configuration: expected a JSON object")
    return config


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a config.json names; a causal language model if it names none.

    An automatic class for causal language models would give a model of another kind another head,
    or know nothing of it. But several kinds of models can have one class, as EXAONE has Llama's.
    Such a class would read and write the configuration as Llama's, so the automatic class that
    gives it to this kind of model is returned.
    """
    import transformers

    names = config.get("architectures") or ["AutoModelForCausalLM"]
    named = getattr(transformers, str(names[0]), transformers.AutoModelForCausalLM)
    kind, own = config.get("model_type"), getattr(named, "config_class", None)
    if own is None or own.model_type == kind or kind not in transformers.CONFIG_MAPPING:
        return named
    automatic = (getattr(transformers, n) for n in dir(transformers) if n.startswith("AutoModel"))
    for candidate in automatic:
        given = candidate._model_mapping.get(transformers.CONFIG_MAPPING[kind], None)
        if given is named:
            return candidate
    return named


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model: a file's or an object's."""
    if not isinstance(config, Mapping):
        return config.get_text_config(decoder=True)
    for key in _TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def quant_method(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantised that a config.json comes with; None: they are not.

    Files of multimodal models may say it of their language model alone, as transformers reads it.
    """
    for part in (config, text_config(config)):
        found = part.get("quantization_config")
        if found is not None:
            return str(found.get("quant_method") if isinstance(found, Mapping) else found)
    return None


# ---- layers


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    head_dim and kv_heads are read when they are asked for, and raise IncompleteConfig where the
    file does not name them: layers that keep nothing need neither.
    """

    kind: Kind
    type: str
    """The layer's type in the configuration's own word."""
    window: int
    """Sliding window in tokens; 0: none, or a SLIDING layer whose window is not named."""
    fields: Fields = field(repr=False, compare=False)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; a missing number means one for every query head."""
        name = "num_key_value_heads"
        if self.fields.get(name) is None and (self.fields.has(name) or not self.fields.is_file):
            name = "num_attention_heads"
        return self.fields.number(name, "kv_heads")

    @property
    def head_dim(self) -> int:
        """As named; derived only where the model's class does so, since many have another one."""
        fields = self.fields
        derived = not fields.is_file or fields.get("model_type") in DERIVED_HEAD_DIM
        if fields.get("head_dim") is None and derived:
            hidden = fields.number("hidden_size", "head_dim")
            return hidden // fields.number("num_attention_heads", "head_dim")
        return fields.number("head_dim", "head_dim")

    @property
    def latent_dims(self) -> tuple[int, int]:
        """Of a LATENT layer: channels of a token's latent row, and of its key with RoPE.

        Such a layer keeps one row of both per token, in place of keys and values of every head.
        """
        return self.fields.get("kv_lora_rank"), self.fields.get("qk_rope_head_dim") or 0


def read_layers(config: Any, slides: Callable[[], bool] | None = None) -> list[Layer]:
    """The layers of a model in order; as many as the configuration names types for.

    Args:
        config: a language model's configuration (text_config): the content of config.json, or an
            object of transformers.
        slides: asked where the configuration does not name the types of its layers: whether the
            model's code makes sliding-window masks. None: there is no code to ask, and
            the reader goes by the fields and the family.

    Raises:
        IncompleteConfig: the types of the layers cannot be known from the configuration.
        ValueError: a file has a field of another type than all files of transformers.
    """
    fields = Fields(config)
    try:
        return _layers(fields, slides)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        if not fields.is_file:  # the class of an object has checked its types
            raise
        raise ValueError(f"the configuration cannot be read: {error!r}") from error


def _layers(fields: Fields, slides: Callable[[], bool] | None) -> list[Layer]:
    if not isinstance(family := fields.get("model_type"), str | None):
        raise TypeError(f"model_type is {family!r}")
    types = _layer_types(fields, slides)
    shared = len(types) - (fields.get("num_kv_shared_layers") or 0)
    modes = fields.get("kv_sharing_modes") or ()
    layers = []
    for index, name in enumerate(types):
        if not isinstance(name, str):
            raise TypeError(f"the type of layer {index} is {name!r}")
        kind = _kind(name)
        if kind in KEEPS_KEYS:
            if index >= shared or (index < len(modes) and modes[index] == "reuse"):
                kind = Kind.SHARED
            elif is_latent(fields):
                kind = Kind.LATENT
        own = fields.of_layer(index, name in _FULL_TYPES)
        window = 0
        if name == "sliding_attention":
            window = own.window("sliding_window", "attention_window_size")
        layers.append(Layer(kind, name, window, own))
    return layers


def is_latent(fields: Fields) -> bool:
    """Whether attention keeps a latent row per token in place of keys and values (MLA)."""
    return bool(fields.get("kv_lora_rank"))


def has_indexer(fields: Fields) -> bool:
    """Whether an indexer chooses for every query which tokens it attends to (sparse attention)."""
    return bool(fields.get("index_topk"))


def unsupported_attention(config: Any) -> str | None:
    """Attention that no cache of this package holds, in words; None if there is none.

    config: of the whole model or of its language model.
    """
    text = Fields(text_config(config))
    if any(f.get("is_encoder_decoder") for f in (text, Fields(config))):
        return "cross attention"
    if text.get("add_cross_attention") or text.get("cross_attention_layers"):
        return "cross attention"
    if is_latent(text) and has_indexer(text):
        return f"{Kind.LATENT.value} with an indexer (index_topk)"
    if not is_latent(text) and text.get("v_head_dim") not in (None, text.get("head_dim")):
        return "values of another size than keys (v_head_dim)"
    if text.get("n_recurrent_loops") not in (None, 1):
        return "layers that run several times (n_recurrent_loops), each time with other keys"
    return None


def layer_count(config: Any) -> int:
    """How many layers the configuration says there are.

    Raises:
        IncompleteConfig: it does not say.
    """
    return _count(Fields(config))


def _count(fields: Fields) -> int:
    if fields.is_file and fields.get("model_type") in _TWO_ATTENTIONS:
        return 2 * fields.number("num_layers", "layers")
    return fields.number("num_hidden_layers", "layers")


def _kind(name: str) -> Kind:
    if name in _FULL_TYPES:
        return Kind.FULL
    if name in _STATE_TYPES:
        return Kind.STATE
    by_name = {"sliding_attention": Kind.SLIDING, "chunked_attention": Kind.CHUNKED}
    return by_name.get(name, Kind.OTHER)


def _layer_types(fields: Fields, slides: Callable[[], bool] | None) -> list[str]:
    """One type per layer: named, or in the code of a model, or worked out from an older file."""
    types = fields.get("layer_types")
    if types is None or (fields.is_file and not types):
        types = fields.get("layers_block_type")  # hybrid models of older versions
    if types:
        return list(types)
    count = _count(fields)
    if slides is not None:
        sliding = fields.get("sliding_window") and slides()
        return ["sliding_attention" if sliding else "full_attention"] * count
    return _types_of_older_files(fields, count)


def _types_of_older_files(fields: Fields, count: int) -> list[str]:
    """One type per layer, from whichever of the fields in use says it."""
    kind = fields.get("model_type")
    window = fields.get("sliding_window")
    if fields.get("use_sliding_window") is False:
        window = None
    if named := (fields.get("linear_attn_config") or {}).get("full_attn_layers"):  # from 1 on
        return ["full_attention" if i + 1 in named else "linear_attention" for i in range(count)]
    if (kinds := fields.get("attn_type_list")) is not None:  # MiniMax
        return ["full_attention" if attends else "linear_attention" for attends in kinds]
    if blocks := fields.get("block_configs"):  # nemotron-nas
        return [_type_of_block(block["attention"]) for block in blocks]
    if fields.get("attention_chunk_size"):  # Llama 4
        rotated = fields.get("no_rope_layers")
        if not rotated:
            nth = fields.get("no_rope_layer_interval") or 4
            rotated = [(i + 1) % nth for i in range(count)]
        return ["chunked_attention" if rope else "full_attention" for rope in rotated]
    interval = fields.get("full_attention_interval") or _FULL_INTERVAL.get(kind)
    pattern = (
        fields.get("sliding_window_pattern")
        or fields.get("_sliding_window_pattern")
        or _SLIDING_PATTERN.get(kind)
    )
    if interval:
        return _every(interval, "linear_attention", count)
    if fields.get("attn_layer_indices") is not None:
        attending = set(fields.get("attn_layer_indices"))
        return ["attention" if i in attending else "mamba" for i in range(count)]
    if period := fields.get("attn_layer_period"):
        offset = fields.get("attn_layer_offset") or 0
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    if blocks := fields.get("block_types"):  # repeated through all layers
        name = "sliding_attention" if fields.get("attention_window_size") else "full_attention"
        types = [name if block == "attention" else block for block in blocks]
        return [types[i % len(types)] for i in range(count)]
    if hints := fields.names_beginning_with("mamba_", "ssm_", "linear_", "conv_L"):
        raise IncompleteConfig(
            f"the configuration (model type {kind!r}) has {hints[0]} but does not say which layers "
            "attend",
            "attending",
        )
    if window and pattern:
        return _every(pattern, "sliding_attention", count)
    if window and (first := fields.get("max_window_layers")) is not None:
        return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    if window and kind not in _ALL_SLIDING:
        raise IncompleteConfig(
            f"the configuration (model type {kind!r}) has sliding_window = {window} but does not "
            "say in which layers; add layer_types to it",
            "layer_types",
        )
    return ["sliding_attention" if window else "full_attention"] * count


def _type_of_block(attention: Mapping[str, Any]) -> str:
    """The type of a block of nemotron-nas, whose attention may be gone, or a linear layer."""
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return "mlp"
    return "windowed_attention" if attention.get("window_length") else "full_attention"


def _every(period: int, other: str, count: int) -> list[str]:
    """Full attention in every `period`-th layer."""
    return [other if (i + 1) % period else "full_attention" for i in range(count)]
