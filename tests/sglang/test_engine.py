"""SGLang's scheduler over our pages: the tokens that the same codes give without SGLang."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.sglang.harness import check_prefixes, check_retraction, engine, in_32_bits, replay
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference

TOKENS = 12
WINDOW = 24
PRESET = "k5v4u"
PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder, head_dim=64)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("preset", ["k8v8", pytest.param("k3v2", marks=in_32_bits)])
def test_prompts_of_a_batch(model, preset, window):
    folder, llama = model
    reference = Reference(llama, preset, window=window)
    with engine(folder, {"window": window}, f"turboquant:{preset}") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)


def test_the_reference_tells_windows_apart(model):
    folder, llama = model
    with engine(folder, {"window": WINDOW}, "turboquant:k3v2") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for wrong in (
        Reference(llama, "k3v2"),
        Reference(llama, "k3v2", window=WINDOW, first_token=False),
    ):
        with pytest.raises(AssertionError, match="below"):
            for p, answer in zip(PROMPTS, answers, strict=True):
                replay(wrong, p, answer)


@in_32_bits
@pytest.mark.parametrize("window", [0, WINDOW])
def test_the_first_token_from_its_codes(model, window):
    folder, llama = model
    reference = Reference(llama, "k3v2", first_token=False, window=window)
    settings = {"preset": "k3v2", "window": window, "first_token": "codes"}
    with engine(folder, settings) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("page_size", [16, 64])
def test_prompts_in_chunks(model, page_size, window):
    folder, llama = model
    reference = Reference(llama, PRESET, window=window)
    prompts = [prompt(n, seed=n) for n in (200, 150)]
    chunks = {"chunked_prefill_size": 64, "page_size": page_size}
    with engine(folder, {"preset": PRESET, "window": window}, **chunks) as loop:
        answers = loop.generate(prompts, TOKENS)
    for p, answer in zip(prompts, answers, strict=True):
        assert sum(call.end - call.begin > 1 for call in answer.calls) > 2
        replay(reference, p, answer)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("page_size", [16, 128])
def test_lengths_at_borders_of_pages(model, page_size, requests):
    """One token, a page less one, a page, one more: of requests one by one, and all at once."""
    folder, llama = model
    reference = Reference(llama, "k8v8", window=WINDOW)
    lengths = (1, 2, page_size - 1, page_size, page_size + 1, 2 * page_size)
    prompts = [prompt(n, seed=n) for n in lengths]
    options = {"page_size": page_size, "max_running_requests": requests}
    with engine(folder, {"preset": "k8v8", "window": WINDOW}, **options) as loop:
        answers = loop.generate(prompts, TOKENS)
        again = loop.generate(prompts, TOKENS)
    for p, answer, later in zip(prompts, answers, again, strict=True):
        replay(reference, p, answer)
        assert later.cached == max(0, len(p) - WINDOW) // page_size * page_size
        replay(reference, p, later, answer.calls)


def test_the_end_of_the_context(model):
    folder, llama = model
    reference = Reference(llama, "k8v8", window=WINDOW)
    p = prompt(100, seed=1)
    with engine(folder, {"preset": "k8v8", "window": WINDOW}, context_length=128) as loop:
        (answer,) = loop.generate([p], 100)
    assert 20 < len(answer.tokens) <= 28
    replay(reference, p, answer)


def test_the_tree_is_not_emptied_under_requests(model):
    folder, llama = model
    reference = Reference(llama, "k8v8", window=WINDOW)
    p = prompt(60, seed=1)
    with engine(folder, {"preset": "k8v8", "window": WINDOW}) as loop:
        req = loop.add(p, TOKENS)
        for _ in range(4):
            loop.step()
        assert not loop.scheduler.flush_cache()
        loop.run()
        answer = loop.answer(req)
    assert len(answer.tokens) == TOKENS
    replay(reference, p, answer)


def test_chunks_beside_decoding_requests(model):
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    prompts = [prompt(n, seed=n) for n in (20, 150, 130)]
    chunks = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}
    with engine(folder, {"preset": PRESET, "window": WINDOW}, **chunks) as loop:
        answers = loop.generate(prompts, TOKENS)
        assert loop.mixed > 0
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize("window", [0, WINDOW, 64])
def test_prefixes_of_the_tree(model, window):
    """A request that continues another one's prefix has that one's codes, and its own window."""
    folder, llama = model
    started = engine(folder, {"preset": PRESET, "window": window})
    check_prefixes(Reference(llama, PRESET, window=window), started, TOKENS)


@pytest.mark.parametrize(("window", "cached"), [(0, [96, 96]), (WINDOW, [64, 80]), (64, [32, 32])])
def test_prompts_that_the_tree_has(model, window, cached):
    """The last tokens are computed anew; their pages are given up for those of the tree."""
    folder, llama = model
    reference = Reference(llama, "k8v8", window=window)
    first = prompt(100, seed=1)
    again = [first, [*first, *prompt(10, seed=2)]]
    with engine(folder, {"preset": "k8v8", "window": window}) as loop:
        (source,) = loop.generate([first], TOKENS)
        answers = loop.generate(again, TOKENS)
    assert [answer.cached for answer in answers] == cached
    for p, answer in zip(again, answers, strict=True):
        replay(reference, p, answer, source.calls)


def test_a_prefix_with_its_answer(model):
    """The turns of a conversation: what was generated is part of the prefix."""
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    with engine(folder, {"preset": PRESET, "window": WINDOW}) as loop:
        (turn,) = loop.generate([prompt(40, seed=1)], 40)
        asked = [*prompt(40, seed=1), *turn.tokens, *prompt(30, seed=2)]
        (answer,) = loop.generate([asked], TOKENS)
    assert answer.cached == 64  # 79 tokens are stored, whole pages of them shared
    replay(reference, asked, answer, turn.calls)


def test_prefixes_are_not_searched_for(model):
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    settings = {"preset": PRESET, "window": WINDOW}
    with engine(folder, settings, disable_radix_cache=True) as loop:
        for _ in range(2):
            answers = loop.generate(PROMPTS, TOKENS)
            for p, answer in zip(PROMPTS, answers, strict=True):
                assert answer.cached == 0
                replay(reference, p, answer)


def test_retracted_requests_go_on(model):
    """What was generated before is computed again as a prompt."""
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    started = engine(folder, {"preset": PRESET, "window": WINDOW})
    check_retraction(reference, started)


def test_aborted_requests_leave_others_alone(model):
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    with engine(folder, {"preset": PRESET, "window": WINDOW}, chunked_prefill_size=64) as loop:
        kept = [loop.add(p, 20) for p in PROMPTS]
        gone = [loop.add(prompt(n, seed=n), 20) for n in (70, 150)]
        for _ in range(4):
            loop.step()
        for req in gone:
            loop.abort(req)
        loop.run()
        answers = [loop.answer(req) for req in kept]
        rest = [loop.answer(req) for req in gone]
        later = loop.generate([prompt(150, seed=8)], TOKENS)
    assert all("'abort'" in answer.reason or not answer.calls for answer in rest)
    for p, answer in zip([*PROMPTS, prompt(150, seed=8)], [*answers, *later], strict=True):
        replay(reference, p, answer)


def test_rows_of_others_are_not_read(model):
    """Rows of the tail and of the table go from request to request, also after a flush."""
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    settings = {"preset": PRESET, "window": WINDOW}
    with engine(folder, settings, max_running_requests=2) as loop:
        first = prompt(100, seed=1)
        (source,) = loop.generate([first], 4)
        for seed in range(3):
            p = [*first[:64], *prompt(60, seed=seed + 2)]
            other, hit = loop.generate([prompt(30, seed=seed), p], TOKENS)
            assert hit.cached > 0
            replay(reference, prompt(30, seed=seed), other)
            replay(reference, p, hit, source.calls)
            loop.flush()
            (source,) = loop.generate([first], 4)
