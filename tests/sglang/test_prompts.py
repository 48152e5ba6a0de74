"""Prompts by FlashAttention, as SGLang has it on a GPU: on a CPU the oracle takes its place."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.oracle import flash_attention
from tests.sglang.harness import ON_GPU, engine, in_32_bits, replay, save_gemma
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference
from torch_turboquant.integrations.engine import prompts as of_engines
from torch_turboquant.integrations.sglang import prompts
from torch_turboquant.integrations.sglang.steps import DeviceRings

TOKENS = 8
WINDOW = 24
LAYERS = 3
LONG = 48


@pytest.fixture
def flash(monkeypatch):
    """Chunks are long from LONG tokens on; what FlashAttention is asked: (new tokens, causal)."""
    calls, of_device = [], prompts.flash_attention

    def on_cpu(**arguments):
        found = flash_attention(**arguments)
        return (*found, None) if isinstance(found, tuple) else found  # as SGLang's does

    def for_device(head_dim, device):
        own = of_device(head_dim, device) if ON_GPU else on_cpu
        assert own is not None, "SGLang has no FlashAttention for this GPU"

        def attend(**arguments):
            calls.append((len(arguments["q"]), arguments["causal"]))
            return own(**arguments)

        return attend

    monkeypatch.setattr(prompts, "flash_attention", for_device)
    monkeypatch.setattr(prompts, "long_chunk", lambda q_heads, device: LONG)
    monkeypatch.setattr(of_engines, "SEGMENT", 64)
    return calls


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder, head_dim=64, num_hidden_layers=LAYERS)


@pytest.mark.parametrize("window", [0, WINDOW])
def test_new_prompts(model, flash, window):
    """Also short ones, and decode steps behind them: those are not for FlashAttention."""
    folder, llama = model
    reference = Reference(llama, "k5v4u", window=window)
    asked = [prompt(n, seed=n) for n in (1, 5, 90, 33)]
    with engine(folder, {"preset": "k5v4u", "window": window}) as loop:
        flash.clear()  # what graphs of prompts were captured with
        answers = loop.generate(asked, TOKENS)
    assert flash == [(sum(map(len, asked)), True)] * LAYERS
    for p, answer in zip(asked, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize(
    ("preset", "window"),
    [("k5v4u", 0), ("k5v4u", WINDOW), pytest.param("k3v2", 70, marks=in_32_bits)],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_long_chunks(model, flash, preset, window, page_size):
    """The pages of a chunk's past are decoded 64 tokens at a time; its end is shorter."""
    folder, llama = model
    reference = Reference(llama, preset, window=window)
    reference.long_chunk = LONG
    p = prompt(230, seed=1)
    options = {"chunked_prefill_size": 64, "page_size": page_size}
    with engine(folder, {"preset": preset, "window": window}, **options) as loop:
        flash.clear()
        (answer,) = loop.generate([p], TOKENS)
    ends = [call.end for call in answer.calls if call.begin < len(p)]
    assert ends == [64, 128, 192, 230]
    # own tokens, then each segment of the past; the last chunk has fewer than LONG tokens
    once = [(64, True)] * LAYERS
    for past in (1, 2):
        once += [(64, True), *[(64, False)] * past] * LAYERS
    assert flash == once
    replay(reference, p, answer)


def test_everything_at_once(model, flash):
    """Decoding requests, prefix hits with short and long new parts, and new prompts."""
    folder, llama = model
    reference = Reference(llama, "k5v4u", window=WINDOW)
    reference.long_chunk = LONG
    first = prompt(100, seed=1)
    others = [[*first[:90], *prompt(n, seed=n)] for n in (5, 120)]
    asked = [others[0], prompt(20, seed=20), others[1], prompt(70, seed=70)]
    options = {"enable_mixed_chunk": True, "chunked_prefill_size": 512}
    with engine(folder, {"preset": "k5v4u", "window": WINDOW}, **options) as loop:
        (source,) = loop.generate([first], TOKENS)
        running = loop.add(prompt(10, seed=3), 3 * TOKENS)
        for _ in range(3):
            loop.step()
        flash.clear()
        reqs = [loop.add(p, TOKENS) for p in asked]
        loop.run()
        assert loop.mixed > 0
        answers = [loop.answer(req) for req in reqs]
        long_answer = loop.answer(running)
    assert {causal for _, causal in flash} == {True, False}
    replay(reference, prompt(10, seed=3), long_answer)
    for p, answer in zip(asked, answers, strict=True):
        assert answer.cached in (0, 64, 80)
        replay(reference, p, answer, source.calls if answer.cached else ())


def test_sliding_windows(tmp_path, flash):
    """FlashAttention takes new prompts of such layers, the op all others."""
    gemma = save_gemma(tmp_path)
    reference = Reference(gemma, "k8v8", window=8)
    asked = [prompt(n, seed=n) for n in (150, 30)]
    settings = {"preset": "k8v8", "window": 8}
    with engine(tmp_path, settings, chunked_prefill_size=64) as loop:
        flash.clear()
        answers = [loop.generate([p], TOKENS)[0] for p in asked]
    second = [(64, True), (64, False)]  # in the layer with full attention only
    assert flash == [*[(64, True)] * LAYERS, *second, *[(30, True)] * LAYERS]
    for p, answer in zip(asked, answers, strict=True):
        replay(reference, p, answer)


def runs(new, old):
    return [
        (run.first_sequence, run.end_sequence, run.first, run.end, run.longest, run.by_flash)
        for run in prompts.runs_of(new, old, 512, "cpu")
    ]


def test_runs():
    assert runs([], []) == []
    assert runs([5, 1], [0, 0]) == [(0, 2, 0, 6, 5, True)]
    assert runs([5, 511], [0, 9]) == []
    assert runs([512], [9]) == [(0, 1, 0, 512, 512, True)]
    assert runs([600, 512, 1, 1], [0, 9, 7, 70]) == [
        (0, 2, 0, 1112, 600, True),
        (2, 4, 1112, 1114, 1, False),
    ]
    (only,) = prompts.runs_of([600, 512], [0, 9], 512, "cpu")
    assert [(c.sequence, c.first, c.end) for c in only.contexts] == [(1, 600, 1112)]


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("old", [1, 5, 8, 9, 30])
def test_what_a_ring_holds(sinks, old):
    """Against a ring that tokens have been put into one by one since position `since`."""
    ring, since, row = 8, 4, 2
    generations = torch.zeros(3, dtype=torch.int64)
    rings = DeviceRings(
        SimpleNamespace(req_generation=generations), sinks, ring, torch.device("cpu")
    )
    rings.valid[row, 1] = since
    held = {}
    for position in range(max(since, sinks), old):
        held[sinks + (position - sinks) % ring] = position
    (run,) = prompts.runs_of([600], [old], 512, "cpu")
    recent = rings.seen_by(run, torch.tensor([row]), [old]).recent[0]
    found = {
        int(entry): recent.first + i
        for i, (entry, there) in enumerate(zip(recent.entries, recent.held, strict=True))
        if there
    }
    assert found == held


class NumbersOnTheHost(TorchDispatchMode):
    """Raises where the host asks a tensor for a number, for which it would wait."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_a_ring():
    generations = torch.zeros(3, dtype=torch.int64)
    rings = DeviceRings(SimpleNamespace(req_generation=generations), 1, 8, torch.device("cpu"))
    (run,) = prompts.runs_of([600, 700], [30, 9], 512, "cpu")
    with NumbersOnTheHost():
        rings.seen_by(run, torch.tensor([2, 1]), [30, 9])
