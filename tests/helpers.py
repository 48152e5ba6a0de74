"""What several test files share: the parameter space, inputs that are meant to break things, and
byte comparison. The references that ops are compared with live in the package, next to each op.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_turboquant.codebook import Codebook
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.signs import random_signs, rotation_matrix

HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256, 512, 576)
CODEBOOKS = (
    (1, "lloyd"),
    (2, "lloyd"),
    (3, "lloyd"),
    (4, "lloyd"),
    (5, "lloyd"),
    (2, "uniform"),
    (3, "uniform"),
    (4, "uniform"),
    (5, "uniform"),
    (8, "uniform"),
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str) -> ModuleType:
    """A program of this project that is not installed, as a module; `path` is from its root.

    It stays in sys.modules with those of its folder that it imports, which another folder's program
    would find there.
    """
    folder = (ROOT / path).parent
    for beside in folder.glob("*.py"):
        found = getattr(sys.modules.get(beside.stem), "__file__", None)
        assert found is None or Path(found).parent == folder, f"{beside} is hidden by {found}"
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    sys.path.insert(0, str(folder))  # as if it had been started
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


WORDS = [f"w{i}" for i in range(64)]


def save_words_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that knows WORDS, which spaces part."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def tiny_llama(**changes: Any) -> torch.nn.Module:
    """A Llama of two layers with the same random weights every time; changes: of its config."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "eos_token_id": None,  # answers have the length that is asked for
        "bos_token_id": None,
        "pad_token_id": 0,  # prompts of other tokens have no padding
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})).eval()


def snippets(document: str) -> list[str]:
    """The Python code of a document, in order; `document` is its path from the root."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


class SnippetTokenizer:
    """What snippets take for the tokenizer of a public model: a random token for each word.

    Short texts have 80 tokens, and a text that goes on begins with the same tokens.
    """

    def __call__(self, text: str | list[str], return_tensors: str | None = None) -> Any:
        from transformers import BatchEncoding

        texts = text if isinstance(text, list) else [text]
        length = max(80, *(len(words.split()) for words in texts))
        ids = torch.randint(1, 64, (length,), generator=generator(1)).expand(len(texts), -1).clone()
        if return_tensors is None:
            return BatchEncoding({"input_ids": ids[0].tolist()})
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids: Tensor) -> str:
        return " ".join(str(int(i)) for i in ids)


def without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets snippets load a tiny model where they name a public one."""
    transformers = pytest.importorskip("transformers")
    from torch_turboquant.integrations.transformers import quantize

    load = transformers.AutoModelForCausalLM.from_pretrained

    def model(name: str, quantization_config: Any = None, **_: Any) -> torch.nn.Module:
        if Path(name).is_dir():
            return load(name)
        tiny = tiny_llama(max_position_embeddings=2048)
        if quantization_config is not None:
            quantize(tiny, quantization_config)
        return tiny

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", model)
    tokenizer = lambda name: SnippetTokenizer()  # noqa: E731
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def codebook_tensors(
    d: int, bits: int, grid: str, search: int, device: torch.device | str = "cpu"
) -> tuple[Tensor | None, Tensor]:
    """(levels, steps) of the ops."""
    book = Codebook.make(d, bits, grid)
    return book.levels_tensor(device), book.steps_tensor(search, device)


def hard_vectors(d: int, signs: Tensor) -> Tensor:
    """float32 [n, d]: structured directions, extreme sizes, and vectors that cannot be coded."""
    noise = randn(9, d, seed=d)
    rows = [torch.zeros(d), -torch.zeros(d), torch.ones(d), torch.full((d,), -3.0)]
    for channel in (0, 1, d // 2, d - 1):  # one-hot: all rotated coordinates alike, or nearly
        rows += [torch.eye(d)[channel], -0.37 * torch.eye(d)[channel]]
    rotation = torch.from_numpy(rotation_matrix(d, signs))
    for row in (0, 1, d // 2, d - 1):  # Walsh rows: a single rotated coordinate
        rows.append(rotation[row].float())
    rows.append(signs * (torch.arange(d) % 2 * 2.0 - 1.0))
    outliers = noise[0].clone()
    outliers[3] = 1e3
    rows.append(outliers)
    rows += [noise[1] * 1e-30, noise[2] * 1e30, noise[3] * 1e-42, noise[4] * 1e5]
    rows.append(torch.full((d,), 3e38))
    spread = noise[5].clone()
    spread[: d // 2] *= 1e-36
    spread[-1] = 3e38
    rows.append(spread)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = noise[6].clone()
        spoiled[d // 3] = bad
        rows.append(spoiled)
    rows.append(torch.round(noise[7] * 2) / 2)
    rows.append(noise[8])
    return torch.stack(rows)


def at_the_end_of_memory(x: Tensor) -> Tensor:
    """A copy of x whose last byte is followed by a page that must not be read or written."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    whole = -(-max(size, 1) // page) * page
    memory = mmap.mmap(-1, whole + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # keeps it from being unmapped
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + whole), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=whole - size)
    copy = copy.view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy


class PeakOfMemory:
    """What the process takes at most from here on, beyond what it has now."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        except OSError:
            pytest.skip("needs a kernel that resets the peak of memory")
        self.before = self.bytes_of("VmRSS")

    def grown(self) -> int:
        """In bytes."""
        return self.bytes_of("VmHWM") - self.before

    @staticmethod
    def bytes_of(name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1])


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bytes: NaN payloads and signs of zero included."""
    actual, expected = actual.cpu().contiguous(), expected.cpu().contiguous()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    a = actual.flatten().view(torch.uint8).numpy()
    b = expected.flatten().view(torch.uint8).numpy()
    if not np.array_equal(a, b):
        wrong = np.flatnonzero(a != b) // actual.element_size()
        place = np.unravel_index(wrong[0], actual.shape)
        raise AssertionError(
            f"{len(np.unique(wrong))} of {actual.numel()} elements differ, the first at "
            f"{tuple(map(int, place))}: {actual[place]} instead of {expected[place]}"
        )


def rounded_query_error(rotated: Tensor, length: Tensor, max_level: int) -> Tensor:
    """What CPU scores may lose to queries of 16-bit integers: float64 [..., queries, keys].

    A rotated query [..., queries, m] meets codes as multiples of a unit, its largest channel
    divided by 32639 (by less where m products with the largest level would leave int32). So a
    channel is off by at most half a unit, sigma 0.29 units, and channels are independent: five
    sigma of the sum over the channels of a key are 1.5 units times its length [..., keys].
    """
    steps = min(32639, (2**31 - 1) // (max_level * rotated.shape[-1]))
    unit = rotated.double().abs().amax(-1) / steps
    return 1.5 * unit[..., None] * length.double()[..., None, :]


def code_score_rounding(q: Tensor, signs: Tensor, length: Tensor, bits: int) -> Tensor:
    """The same for score; length [..., keys] is that of the decoded keys, without a center."""
    return rounded_query_error(hadamard(q.float(), signs), length, 128 if bits == 8 else 127)


def sketch_score_rounding(q: Tensor, norm: Tensor, projection: Tensor) -> Tensor:
    """The same for qjl_score; norm [..., keys] is that of the residuals."""
    m = projection.shape[0]
    if projection.dim() == 2:
        projected, factor = q.float() @ projection.T, math.sqrt(math.pi / 2) / m
    else:
        projected, factor = hadamard(q.float(), projection), math.sqrt(math.pi / (2 * m))
    return rounded_query_error(projected, factor * math.sqrt(m) * norm.double(), 1)


def scales(*shape: int, seed: int) -> Tensor:
    """Scales of channels: powers of two of exponents between -1 and 1."""
    return 2 ** torch.empty(shape).uniform_(-1, 1, generator=generator(seed))


def int32(*numbers: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@contextmanager
def busy_gpu() -> Iterator[None]:
    """The GPU sleeps all the while, and whoever makes torch wait for it fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        before = torch.cuda.Event()
        before.record()
        yield
        assert not before.query()  # it still sleeps
    finally:
        torch.cuda.set_sync_debug_mode("default")


def multiprocessors() -> int:
    """Of the GPU, but at least an H200's: how many vectors keep all of them busy."""
    if not torch.cuda.is_available():
        return 132
    return max(132, torch.cuda.get_device_properties(0).multi_processor_count)


def signs_of(d: int, seed: int = 0) -> Tensor:
    return random_signs(d, seed)


def paged(
    lengths: list[int], page_size: int, seed: int = 0, spare: int = 2
) -> tuple[int, Tensor, list[Tensor]]:
    """Pages for sequences, in shuffled order, some pages unused.

    Returns:
        num_pages; block_table int32 [seqs, max_pages + 1], garbage where no page is needed; and for
        each sequence the slots of its tokens, int64 [length].
    """
    need = [-(-n // page_size) for n in lengths]
    num_pages = sum(need) + spare
    free = torch.randperm(num_pages, generator=generator(seed)).tolist()
    table = torch.full((len(lengths), max([*need, 0]) + 1), -(2**31), dtype=torch.int32)
    slots = []
    for s, (length, pages) in enumerate(zip(lengths, need, strict=True)):
        mine = torch.tensor([free.pop() for _ in range(pages)], dtype=torch.int64)
        table[s, :pages] = mine.int()
        position = torch.arange(length)
        slots.append(mine[position // page_size] * page_size + position % page_size)
    return num_pages, table, slots


# cu_seqlens_q of three sequences that no batch has: backwards, behind the tokens, before them, and
# so far apart that the difference of two does not fit 32 bits.
WRONG_STARTS = [
    (5, 3, 2, 1),
    (0, 2**31 - 1, 2**31 - 1, 2**31 - 1),
    (0, -3, 11, 12),
    (7, -(2**31), 2**31 - 1, -(2**31)),
    (100_000, -(2**31), 0, 2),
    (-(2**31), 2**31 - 1, -1, 9),
    (0, 2**30, -(2**31) + 1, 0),
]


def with_space_around(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(a buffer of 7s, a contiguous tensor of this shape in the middle third of it)."""
    size = math.prod(shape)
    buffer = torch.full((3 * size,), 7, dtype=dtype, device=device)
    return buffer, buffer[size : 2 * size].view(shape)


def assert_space_around_is_left(buffer: Tensor) -> None:
    """Nobody wrote into the first or last third of what with_space_around made."""
    size = len(buffer) // 3
    assert (buffer[:size] == 7).all() and (buffer[2 * size :] == 7).all()


def entries_apart(t: Tensor, gap: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The entries of the first dimension, `gap` elements apart, as a layer's in an allocation for
    several layers.

    Returns:
        all the memory, flat, whose rest is NaN or 255; and the view of it that equals t.
    """
    size = t[0].numel() + gap
    rest = torch.nan if t.is_floating_point() else 255
    memory = torch.full((len(t) * size,), rest, dtype=t.dtype, device=device)
    view = torch.as_strided(memory, t.shape, (size, *t[:1].contiguous().stride()[1:]))
    view.copy_(t)
    return memory, view


def garbage_cache(config, num_pages: int, kv_heads: int, seed: int = 0) -> Tensor:
    """A cache full of stale bytes: NaN in every scale, random codes."""
    cache = torch.randint(
        256,
        (num_pages, kv_heads, config.record_bytes),
        generator=generator(seed),
        dtype=torch.uint8,
    )
    for token in range(config.page_size):
        for place in (config.record.key_scale(token), config.record.value_scale(token)):
            cache[..., place] = 0x00
            cache[..., place + 1] = 0x7E
    return cache


def launched(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that a call launches when it is made a second time."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == cuda]


def to_device(value, device):
    """Tensors of a named tuple, or a tensor, or None, on the device."""
    if isinstance(value, tuple):
        return type(value)(*(to_device(v, device) for v in value))
    return value.to(device) if isinstance(value, Tensor) else value
