"""Steps of every mixture through the backend's own interface, against attention in float64.

The shapes are those of vLLM's tests of its backends: decoding, prompts and mixtures, short and
long, whole models and the heads of tensor-parallel ranks. Every token goes into the cache through
the backend; keys and values that the reference sees come from through_codes.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.helpers import randn
from tests.oracle import exact_attention, flash_attention
from tests.vllm.harness import ON_GPU, save_llama, told
from tests.vllm.reference import through_codes
from tests.vllm.steps import LONG_STEPS, STEPS, Steps, asked_of_flash, vllm_layer, vllm_started
from torch_turboquant.integrations.engine import prompts
from torch_turboquant.integrations.vllm import backend, choice, limits
from torch_turboquant.integrations.vllm.backend import (
    TurboQuantBackend,
    TurboQuantImpl,
    TurboQuantMetadataBuilder,
)
from torch_turboquant.integrations.vllm.sizes import needs_of

HEADS = {"whole": (8, 2), "half": (4, 1), "no groups": (2, 2), "wide groups": (16, 1)}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    if ON_GPU:
        pytest.skip("these layers compute on a CPU")
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)

    with vllm_started(folder, preset="k5v4u", learn=False) as configure:
        yield configure


class Layer(Steps):
    """One layer of our backend, with memory for its pages, and a builder of its steps."""

    def __init__(self, config, heads=(8, 2), d=64, page_size=32, number=0, reads=None, **options):
        """reads: the name of the layer whose keys this one reads."""
        self.kv_heads, self.d, self.page_size, self.number = heads[1], d, page_size, number
        config.cache_config.block_size = page_size
        with set_current_vllm_config(config):
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            self.impl = TurboQuantImpl(heads[0], d, d**-0.5, heads[1], **options)
            torch.set_default_dtype(default)
            name = f"model.layers.{number}.self_attn.attn"
            layers = config.compilation_config.static_forward_context
            layers[name] = self.module = vllm_layer(impl=self.impl)
            self.module.kv_sharing_target_layer_name = reads
            self.impl.process_weights_after_loading(torch.float32)
            spec = FullAttentionSpec(
                block_size=page_size, num_kv_heads=heads[1], head_size=d, dtype=torch.uint8
            )
            self.builder = TurboQuantMetadataBuilder(spec, [name], config, torch.device("cpu"))
        del layers[name]
        # Pages of two layers in one allocation: a layer's own lie apart.
        shape = (512, 2, heads[1], page_size, self.impl.plan.bytes_per_token(self.impl.config))
        self.pages = torch.full(shape, 0x5A, dtype=torch.uint8)[:, number % 2]
        self.first_token = config.additional_config["turboquant"].get("first_token") != "codes"

    def store(self, k, v, pages):
        """The first tokens of a sequence, in an earlier step."""
        m = self.metadata([(len(k), len(k))], pages[None])
        self.impl._bind(self.pages)
        self.impl._store(self.builder.build(0, m), k, v)

    def run(self, steps, q, k, v, exact=True, **options):
        """Attends to new tokens after older ones; returns the output and what is right."""
        m = self.metadata(steps)
        for s, (total, new) in enumerate(steps):
            before = total if self.impl.owner else total - new  # who else would store them?
            if before:
                self.store(k[s][:before], v[s][:before], m.block_table_tensor[s])
        new_k = torch.cat([k[s][total - new :] for s, (total, new) in enumerate(steps)])
        new_v = torch.cat([v[s][total - new :] for s, (total, new) in enumerate(steps)])
        built = self.builder.build(0, m)
        out = torch.full_like(q, torch.nan)
        padding = torch.zeros(3, *new_k.shape[1:])  # as beside graphs: more rows than tokens
        found = self.impl.forward(
            None,
            q,
            torch.cat([new_k, padding]),
            torch.cat([new_v, padding]),
            self.pages,
            built,
            out,
        )
        assert found is out
        totals, new = zip(*steps, strict=True)
        codes = [through_codes(k[s], v[s], "k5v4u", self.number) for s in range(len(steps))]
        right, _ = exact_attention(
            q,
            padded([c[0] for c in codes]),
            padded([c[1] for c in codes]),
            list(totals),
            list(new),
            exact_k=padded(k),
            exact_v=padded(v),
            sinks=1 if self.first_token else 0,
            own=exact,
            **options,
        )
        return found, right


def padded(parts):
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def tensors(steps, heads, d=64):
    q = randn(sum(new for _, new in steps), heads[0], d, seed=0)
    k = [randn(total, heads[1], d, seed=1 + s) for s, (total, _) in enumerate(steps)]
    v = [randn(total, heads[1], d, seed=101 + s) for s, (total, _) in enumerate(steps)]
    return q, k, v


def assert_right(found, right):
    """The CPU kernel rounds to 16 bits: an output is off by 10^-4 of its length (docs/ops.md)."""
    error = ((found.double() - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
    assert error < 5e-4, f"off by {error:.1g} of its length"


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps(started, steps, heads):
    layer = Layer(started({}), heads)
    assert_right(*layer.run(steps, *tensors(steps, heads)))


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps_from_codes(started, steps):
    """Decode steps read their tokens from codes, prompts beside them do not."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    layer = Layer(started({"exact_steps": False}, speculative_config=drafts), page_size=16)
    q, k, v = tensors(steps, (8, 2))
    found, exact = layer.run(steps, q, k, v)
    _, coded = layer.run(steps, q, k, v, exact=False)
    # Sequences come in this order: at most four new tokens, then more.
    decoding = sum(new for _, new in steps if new <= 4)
    if decoding:
        assert_right(found[:decoding], coded[:decoding])
    if decoding < len(q):
        assert_right(found[decoding:], exact[decoding:])


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_head_dims_and_pages(started, d, page_size):
    steps = STEPS["few mixed"]
    layer = Layer(started({}), (4, 2), d, page_size)
    assert_right(*layer.run(steps, *tensors(steps, (4, 2), d)))


@pytest.mark.parametrize("window", [1, 24, 200])
@pytest.mark.parametrize("name", ["decode steps", "mixed", "a hit beside a fresh prompt"])
def test_sliding_windows(started, name, window):
    layer = Layer(started({}), sliding_window=window)
    found, right = layer.run(STEPS[name], *tensors(STEPS[name], (8, 2)), sliding_window=window)
    assert_right(found, right)


@pytest.mark.parametrize("name", ["decode steps", "mixed", "fresh prompts"])
def test_soft_caps_and_sinks(started, name):
    """Sinks are weights: loaded again, they are read at the same address."""
    sinks = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
    layer = Layer(started({}), logits_soft_cap=2.0, sinks=sinks)
    address = layer.impl.sink_logits.data_ptr()
    sinks.copy_(torch.linspace(-1, 3, 8))
    layer.impl.process_weights_after_loading(torch.float32)
    assert layer.impl.sink_logits.data_ptr() == address
    found, right = layer.run(
        STEPS[name], *tensors(STEPS[name], (8, 2)), soft_cap=2.0, sink_logits=sinks.float()
    )
    assert_right(found, right)


OWNER = "model.layers.1.self_attn.attn"


@pytest.fixture
def shared(started):
    """A configuration in which layer 1 is there for others to read its keys, and that layer."""
    config = started({})
    owner = Layer(config, number=1)
    config.compilation_config.static_forward_context[OWNER] = owner.module
    return config, owner


def test_a_layer_that_reads_the_pages_of_another_one(shared):
    """It has no keys of its own, whatever it is given, and the tables of the other layer."""
    steps = STEPS["few mixed"]
    layer = Layer(shared[0], number=4, reads=OWNER)
    assert layer.impl.index == layer.number - 3
    layer.number = 1
    assert_right(*layer.run(steps, *tensors(steps, (8, 2)), exact=False))


def test_a_layer_that_gets_no_keys(shared):
    """vLLM gives None to layers that share those of another one."""
    layer = Layer(shared[0], number=4, reads=OWNER)
    steps = STEPS["few mixed"]
    q, k, v = tensors(steps, (8, 2))
    layer.number = 1
    expected, _ = layer.run(steps, q, k, v, exact=False)
    forward = layer.impl.forward
    layer.impl.forward = lambda layer_, q, k, v, *more: forward(layer_, q, None, None, *more)
    found, _ = layer.run(steps, q, k, v, exact=False)
    assert torch.equal(found, expected)


def test_a_layer_that_is_told_later_whose_keys_it_reads(shared):
    """Drafts of Gemma 4, once both models are loaded: before vLLM asks for the bytes of pages."""
    config, owner = shared
    layer = Layer(config, number=4)
    own = layer.impl.tables
    layer.module.kv_sharing_target_layer_name = OWNER
    layers = {OWNER: owner.module, "draft.layers.4.self_attn.attn": layer.module}
    assert [*needs_of(layers, alike=False)] == [OWNER]
    with told() as lines:
        plan = owner.impl.plan
        plan.tell(logging.getLogger("vllm.torch_turboquant"), owner.impl, layers)
    each = 2 * plan.bytes_per_token(owner.impl.config)
    assert f"{each:,} bytes per token and layer on this rank" in lines[0]

    steps = STEPS["few mixed"]
    q, k, v = tensors(steps, (8, 2))
    layer.number = 1
    layer.impl._bind(layer.pages)  # what follows stores for the owner, whose records are written
    assert layer.impl.tables is owner.impl.tables is not own
    forward = layer.impl.forward
    layer.impl.forward = lambda layer_, q, k, v, *more: forward(layer_, q, None, None, *more)
    assert_right(*layer.run(steps, q, k, v, exact=False))


def test_keys_of_another_backend_s_layer_are_not_read(started):
    config = started({})
    layers = config.compilation_config.static_forward_context
    layers[OWNER] = SimpleNamespace(impl=object())
    with pytest.raises(ValueError, match='leave "attention_backend" out of --speculative-config'):
        Layer(config, number=4, reads=OWNER)


@pytest.mark.parametrize("named", ["2", "-1"])
def test_a_layer_that_reads_another_s_pages_has_no_preset_of_its_own(started, monkeypatch, named):
    config = started({"layers": {"0": "k8v8", named: "k8v8"}})
    owner = Layer(config, number=1)
    config.compilation_config.static_forward_context[OWNER] = owner.module
    assert Layer(config, number=2, reads=OWNER).impl.owner is owner.impl  # a draft, made later
    monkeypatch.setattr(backend, "are_for_drafts", lambda config: False)
    with pytest.raises(ValueError, match='"layers" names layer 2, which keeps no keys and values'):
        Layer(config, number=2, reads=OWNER)


def test_a_layer_that_reads_another_s_pages_has_its_center(started):
    """One that is learned as well, after both were made."""
    config = started({"learn": True})
    owner = Layer(config, number=1)
    config.compilation_config.static_forward_context[OWNER] = owner.module
    reader = Layer(config, number=4, reads=OWNER)
    assert owner.impl.learns and not reader.impl.learns
    owner.impl.tables.center.fill_(3)  # as learning does
    assert reader.impl.tables.center is owner.impl.tables.center
    for one in (owner, reader):
        one.impl.process_weights_after_loading(torch.float32)
    assert (owner.impl.tables.center == 3).all()


def test_an_engine_that_sleeps_keeps_its_constants(started):
    """Level 2 gives up all that was there when its model was loaded; vLLM copies buffers out before
    and back afterwards, and callers may load weights without telling layers. A center that was
    learned stays, since pages hold keys without it."""
    sinks = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    layer = Layer(started({"learn": True}), sinks=sinks)
    layer.impl.tables.center.fill_(3)  # as learning does
    mine = [*(t for t in layer.impl.tables if t is not None), layer.impl.sink_logits]
    held = [t.clone() for t in mine]
    model = torch.nn.ModuleList([layer.module])
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for t in mine:
        t.zero_()
    for name, buffer in model.named_buffers():
        buffer.data.copy_(saved[name])
    assert all(map(torch.equal, mine, held))
    assert not model.state_dict()  # nothing that a checkpoint would hold


def test_weights_that_are_loaded_again_leave_constants_in_place(started):
    """vLLM moves the tensors of layers to the meta device meanwhile."""
    from vllm.model_executor.model_loader import reload

    layer = Layer(started({"learn": True}))
    layer.impl.tables.center.fill_(3)
    model = torch.nn.ModuleList([layer.module])
    before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    reload.initialize_layerwise_reload(model)
    assert not [*model.buffers()]
    reload.finalize_layerwise_reload(model, layer.impl.vllm_config.model_config)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == before
    assert layer.impl.tables.center.data_ptr() == before["0.turboquant_center"]
    assert (layer.impl.tables.center == 3).all()


def test_several_attentions_of_a_layer_are_refused():
    assert limits.layer_index("model.layers.7.self_attn.attn") == 7
    with pytest.raises(ValueError, match="is one of several attentions of a layer"):
        limits.layer_index("model.layers.0.self_attn.1.attn")


def test_an_attention_without_a_number_is_refused():
    with pytest.raises(ValueError, match=r"model\.head\.attn has no number"):
        limits.layer_index("model.head.attn")


def test_memory_that_moves_is_bound_again(started):
    """A sleeping engine gives its pages back and gets others."""
    steps = STEPS["few mixed"]
    layer = Layer(started({}))
    first, _ = layer.run(steps, *tensors(steps, (8, 2)))
    layer.pages = torch.zeros(layer.pages.shape, dtype=torch.uint8)
    second, right = layer.run(steps, *tensors(steps, (8, 2)))
    assert_right(second, right)
    assert torch.equal(first, second)


def test_a_layer_without_metadata_answers_zero(started):
    """vLLM measures memory before there are pages."""
    layer, out = Layer(started({})), torch.full((3, 8, 64), torch.nan)
    q, kv = torch.zeros(3, 8, 64), torch.zeros(3, 2, 64)
    assert not layer.impl.forward(None, q, kv, kv, torch.zeros(0), None, out).any()


# ---- prompts by FlashAttention, where vLLM has it


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
@pytest.mark.parametrize("steps", LONG_STEPS.values(), ids=LONG_STEPS)
def test_long_chunks_over_decoded_pages(started, monkeypatch, steps, heads):
    monkeypatch.setattr(prompts, "SEGMENT", 128)
    layer, calls = Layer(started({}), heads), []

    def flash(**arguments):
        calls.append(arguments["causal"])
        return flash_attention(**arguments)

    options = {"softmax_scale": layer.impl.scale}
    layer.impl.prompt_attention = prompts.PromptAttention(flash, options, 0)
    layer.builder.splits_prompts = True
    layer.builder.long_chunk, layer.builder.least_fresh = 512, 0
    assert_right(*layer.run(steps, *tensors(steps, heads)))
    assert calls == asked_of_flash(steps, 128)


def test_short_chunks_and_windows_stay_with_the_pages(started):
    """Decoding pages would cost more than it gains; a window needs the positions of keys."""

    def flash(**arguments):
        raise AssertionError("not for these")

    for steps, window in ([(1024, 511), (9, 1)], 0), ([(1200, 600)], 64):
        layer = Layer(started({}), sliding_window=window or None)
        layer.impl.prompt_attention = prompts.PromptAttention(flash, {}, window)
        layer.builder.splits_prompts = True
        right = {"sliding_window": window} if window else {}
        assert_right(*layer.run(steps, *tensors(steps, (8, 2)), **right))


# ---- chunks of the context, which see nothing of each other (Llama 4)


def chunks_of(steps, chunk):
    """(sequence, first token, (tokens with the new ones, new ones)) of every chunk of a step."""
    found = []
    for s, (total, new) in enumerate(steps):
        old = total - new
        for first in range(old // chunk * chunk, total, chunk):
            end = min(total, first + chunk)
            found.append((s, first, (end - first, end - max(first, old))))
    return found


@pytest.mark.parametrize("by_flash", [False, True])
@pytest.mark.parametrize(
    "name", ["decode steps", "mixed", "fresh prompts", "a hit beside a fresh prompt"]
)
def test_chunks_of_the_context(started, name, by_flash):
    """vLLM makes sequences of them, each with an exact first token of its own."""
    from vllm.model_executor.layers.attention import chunked_local_attention as local

    layer, steps, chunk = Layer(started({})), STEPS[name], 128
    layer.builder.__class__ = local.create_chunked_local_attention_backend(
        TurboQuantBackend, chunk
    ).get_builder_cls()
    if by_flash:
        options = {"softmax_scale": layer.impl.scale}
        layer.impl.prompt_attention = prompts.PromptAttention(flash_attention, options, 0)
        layer.builder.splits_prompts = True
        layer.builder.long_chunk, layer.builder.least_fresh = 32, 0
    q, k, v = tensors(steps, (8, 2))
    found, whole = layer.run(steps, q, k, v)

    chunks = chunks_of(steps, chunk)
    pieces = [(s, slice(first, first + total)) for s, first, (total, _) in chunks]
    codes = [through_codes(k[s], v[s], "k5v4u", layer.number) for s in range(len(steps))]
    right, _ = exact_attention(
        q,
        padded([codes[s][0][piece] for s, piece in pieces]),
        padded([codes[s][1][piece] for s, piece in pieces]),
        [total for _, _, (total, _) in chunks],
        [new for _, _, (_, new) in chunks],
        exact_k=padded([k[s][piece] for s, piece in pieces]),
        exact_v=padded([v[s][piece] for s, piece in pieces]),
        sinks=1,
        own=True,
    )
    assert_right(found, right)
    if name != "fresh prompts":
        with pytest.raises(AssertionError, match="of its length"):  # chunks are not the whole
            assert_right(found, whole)


# ---- what a step is made of


def parts_of(
    started, steps, exact_steps=True, drafts=0, on_cuda=True, long_chunk=512, least_fresh=0
):
    options = {}
    if drafts:
        method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
        options["speculative_config"] = method
    layer = Layer(started({"exact_steps": exact_steps}, **options))
    layer.builder.splits_prompts = on_cuda
    layer.builder.long_chunk, layer.builder.least_fresh = long_chunk, least_fresh
    return [
        (part.first, part.end, len(part.seq_lens), part.longest, part.exact, part.by_flash)
        for part in layer.builder.build(0, layer.metadata(steps)).parts
    ]


def test_tokens_of_earlier_steps_of_a_draft_model(started, monkeypatch):
    """A draft model by itself begins with the token that the model has found, which vLLM's bounds
    of lengths do not count."""
    monkeypatch.setattr(backend, "are_for_drafts", lambda _: True)
    model = started({}).model_config.model
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    layer = Layer(started({}, speculative_config=drafts))
    layer.builder.splits_prompts = True
    layer.builder.long_chunk, layer.builder.least_fresh = 512, 0
    for steps, old in ([(1201, 601), (9, 2)], [600]), ([(601, 601)], []):
        m = layer.metadata(steps)
        m.seq_lens_cpu_upper_bound = m.seq_lens_cpu_upper_bound - 1
        contexts = [c for part in layer.builder.build(0, m).parts for c in part.contexts]
        assert [sum(one.tokens for one in c.segments) for c in contexts] == old


@pytest.mark.parametrize(
    ("method", "at_once", "tokens"),
    [("draft_model", False, 1), ("draft_model", True, 5), ("eagle", False, 0), ("mtp", True, 4)],
)
def test_tokens_that_bounds_of_lengths_leave_out(method, at_once, tokens):
    given = SimpleNamespace(method=method, parallel_drafting=at_once, num_speculative_tokens=5)
    assert choice.tokens_left_out(given) == tokens
    assert choice.tokens_left_out(None) == 0


def test_most_steps_have_one_part(started):
    assert parts_of(started, [(9, 1), (8, 1)]) == [(0, 2, 2, 1, True, False)]
    assert parts_of(started, [(9, 1), (9, 1)], exact_steps=False) == [(0, 2, 2, 1, False, False)]
    assert parts_of(started, [(9, 1), (20, 9)]) == [(0, 10, 2, 9, True, False)]
    assert parts_of(started, [(9, 4), (20, 2)], drafts=3) == [(0, 6, 2, 4, True, False)]


def test_fresh_prompts_are_a_part_of_their_own(started):
    """On GPUs, and only where every one of them is fresh (vllm#46460)."""
    mixed = [(9, 1), (20, 20), (7, 7)]
    assert parts_of(started, mixed) == [(0, 1, 1, 1, True, False), (1, 28, 2, 20, True, True)]
    assert parts_of(started, mixed, on_cuda=False) == [(0, 28, 3, 20, True, False)]
    assert parts_of(started, mixed[1:]) == [(0, 27, 2, 20, True, True)]
    assert parts_of(started, [*mixed, (48, 16)]) == [(0, 44, 4, 20, True, False)]


def test_few_fresh_tokens_stay_in_the_call_of_the_step(started):
    mixed = [(9, 1), (20, 20), (7, 7)]
    flash = [(0, 1, 1, 1, True, False), (1, 28, 2, 20, True, True)]
    assert parts_of(started, mixed, least_fresh=27) == flash
    assert parts_of(started, mixed, least_fresh=28) == [(0, 28, 3, 20, True, False)]
    assert parts_of(started, mixed[1:], least_fresh=28) == [(0, 27, 2, 20, True, False)]
    codes = parts_of(started, mixed, least_fresh=28, exact_steps=False)
    assert codes == [(0, 1, 1, 1, False, False), (1, 28, 2, 20, True, False)]


def test_long_chunks_are_parts_of_their_own(started):
    """And short ones are one call with those beside them, however many there are."""
    steps = [(9, 1), (20, 9), (1600, 600), (30, 5), (80, 7)]
    own = (10, 610, 1, 600, True, True)
    behind = (610, 622, 2, 7, True, False)
    assert parts_of(started, steps) == [(0, 10, 2, 9, True, False), own, behind]
    assert parts_of(started, steps, long_chunk=601) == [(0, 622, 5, 600, True, False)]
    assert parts_of(started, steps, on_cuda=False) == [(0, 622, 5, 600, True, False)]
    assert parts_of(started, steps, exact_steps=False) == [
        (0, 1, 1, 1, False, False),
        (1, 10, 1, 9, True, False),
        own,
        behind,
    ]
    # not in one call with decoding sequences
    assert parts_of(started, [steps[0], (600, 600), (700, 600)]) == [
        (0, 1, 1, 1, True, False),
        (1, 1201, 2, 600, True, True),
    ]


def test_how_long_a_chunk_is_depends_on_its_heads(started, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    found = [prompts.long_chunk(heads, cpu) for heads in (32, 28, 8, 1, 0)]
    assert found == [1024, 1171, 4096, 32768, 32768]
    builder = Layer(started({})).builder
    of_model = prompts.long_chunk(4, cpu)
    assert (builder.long_chunk, builder.least_fresh) == (of_model, of_model)
    for capability, wanted in (((9, 0), (512, 512)), ((8, 0), (512, 0)), ((10, 0), (512, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (prompts.long_chunk(64, cuda), prompts.least_fresh(64, cuda)) == wanted


@pytest.mark.parametrize("exact_steps", [True, False])
def test_layers_without_flash_attention_have_few_calls(started, exact_steps):
    """Such as those with sliding windows: runs are cut for the other layers of the step."""
    steps = [(9, 1), (20, 9), (1600, 600), (30, 5), (1400, 520)]
    layer = Layer(started({"exact_steps": exact_steps}), sliding_window=64)
    layer.impl.prompt_attention = prompts.PromptAttention(None, {}, 64)
    layer.builder.splits_prompts, layer.builder.long_chunk = True, 512
    built = layer.builder.build(0, layer.metadata(steps))
    ends = [part.end for part in built.by_op]
    assert ends == ([1135] if exact_steps else [1, 1135]) and len(built.parts) > 2
    if exact_steps:
        assert_right(*layer.run(steps, *tensors(steps, (8, 2)), sliding_window=64))


def test_decode_steps_from_codes_are_a_part_of_their_own(started):
    parts = parts_of(started, [(9, 1), (20, 9), (7, 3)], exact_steps=False)
    assert parts == [(0, 1, 1, 1, False, False), (1, 13, 2, 9, True, False)]


def test_padding_of_graphs(started):
    """Rows of length 0 behind the sequences of a step."""
    layer = Layer(started({}))
    m = layer.metadata([(9, 1), (8, 1)])
    m.seq_lens[1], m.slot_mapping[1] = 0, -1
    (part,) = layer.builder.build(0, m).parts
    assert part.cu_seqlens is None
    q, k = torch.randn(2, 8, 64), torch.randn(2, 2, 64)
    layer.store(torch.randn(8, 2, 64), torch.randn(8, 2, 64), m.block_table_tensor[0])
    out = layer.impl.forward(
        None, q, k, k, layer.pages, layer.builder.build(0, m), torch.empty(2, 8, 64)
    )
    assert out[0].any() and not out[1].any()


def test_attention_that_is_not_causal_is_refused(started):
    layer = Layer(started({}))
    m = layer.metadata([(9, 9)])
    m.causal = False
    with pytest.raises(ValueError, match="attention that is not causal is not supported"):
        layer.builder.build(0, m)


def test_what_vllm_asks_a_backend():
    assert TurboQuantBackend.supports_sink() and TurboQuantBackend.supports_sliding_window()
    assert TurboQuantBackend.supports_head_size(128) and not TurboQuantBackend.supports_head_size(8)
    assert TurboQuantBackend.supports_kv_cache_dtype("auto")
    assert not TurboQuantBackend.supports_kv_cache_dtype("fp8")
    assert not TurboQuantBackend.is_mla() and not TurboQuantBackend.supports_attn_type("encoder")
    asked = (128, torch.bfloat16, "fp8", None, False, False, False, False, None)
    assert "pass --kv-cache-dtype bfloat16" in TurboQuantBackend.supports_combination(*asked)
    assert TurboQuantBackend.supports_combination(128, torch.bfloat16, "auto", *asked[3:]) is None
    asked = (576, torch.bfloat16, "auto", None, True, False, False, False, None)
    assert "latent attention (MLA) need" in TurboQuantBackend.supports_combination(*asked)
