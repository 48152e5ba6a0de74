"""Models with latent attention (MLA): steps against attention in float64, and engines."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV2ForCausalLM

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

from torch_turboquant.integrations.vllm.adapter import INTERFACE

if not INTERFACE.latents:
    pytest.skip("this vLLM is too old for models with latents", allow_module_level=True)

from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends import registry
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import torch_turboquant as tt
from tests.helpers import randn
from tests.oracle import flash_attention
from tests.vllm.harness import (
    MEMORY,
    ON_GPU,
    engine,
    pages_of,
    prompt,
    save_deepseek,
    told,
)
from tests.vllm.steps import LONG_STEPS, STEPS, Steps, asked_of_flash, vllm_layer, vllm_started
from torch_turboquant.integrations import vllm as plugin
from torch_turboquant.integrations.engine import prompts
from torch_turboquant.integrations.vllm import adapter
from torch_turboquant.integrations.vllm.latent import (
    LatentBackend,
    LatentImpl,
    LatentMetadataBuilder,
)
from torch_turboquant.integrations.vllm.prompts import attend_padded
from torch_turboquant.latent import latent_preset_of, make_latent_tables, norm_center

NOPE, VALUE = 24, 20
# As DeepSeek's published models have it. Without it vLLM 0.32 rotates queries wrongly on a CPU,
# whatever the cache.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    save_deepseek(folder, rope_parameters=YARN)
    return folder


# ---- steps


@pytest.fixture(scope="module")
def started(folder):
    if ON_GPU:
        pytest.skip("these layers compute on a CPU")
    with vllm_started(folder, preset="k5u") as configure:
        yield configure


class Layer(Steps):
    """One layer of our backend, with memory for its pages, and a builder of its steps."""

    def __init__(self, config, heads=4, dims=(128, 32), page_size=32, number=0, tells=True):
        self.heads, self.dims, self.page_size, self.number = heads, dims, page_size, number
        latent, rope = dims
        config.cache_config.block_size = page_size
        self.w = randn(heads, NOPE + VALUE, latent, seed=90) / latent**0.5
        self.norm = SimpleNamespace(weight=torch.logspace(-1.5, 0.5, latent))

        def kv_b_proj(x):
            return (x @ self.w.flatten(0, 1).T,)

        with set_current_vllm_config(config):
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            self.scale = (NOPE + rope) ** -0.5
            self.impl = LatentImpl(
                *(heads, latent + rope, self.scale, 1, None, None, "auto", None, "decoder", None),
                q_lora_rank=None,
                kv_lora_rank=latent,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=rope,
                qk_head_dim=NOPE + rope,
                v_head_dim=VALUE,
                kv_b_proj=kv_b_proj,
            )
            torch.set_default_dtype(default)
            self.impl.latent_norm = self.norm if tells else None
            name = f"model.layers.{number}.self_attn.attn"
            layers = config.compilation_config.static_forward_context
            w_uk, w_uv = self.w.split([NOPE, VALUE], dim=1)
            layers[name] = self.module = vllm_layer(
                impl=self.impl, W_UK_T=w_uk, W_UV=w_uv.transpose(1, 2).contiguous()
            )
            self.impl.process_weights_after_loading(torch.float32)
            spec = MLAAttentionSpec(
                block_size=page_size, num_kv_heads=1, head_size=latent + rope, dtype=torch.uint8
            )
            self.builder = LatentMetadataBuilder(spec, [name], config, torch.device("cpu"))
        del layers[name]
        shape = (512, 2, page_size, self.impl.plan.bytes_per_token(self.impl.config))
        self.pages = torch.full(shape, 0x5A, dtype=torch.uint8)[:, number % 2]
        self.first_token = config.additional_config["turboquant"].get("first_token") != "codes"

    def forward(self, m, q, rows):
        """What vLLM's layer does with a step whose tokens have these rows [tokens, latent + rope]:
        it cuts what was padded for graphs off."""
        latent, rope = rows.split(self.dims, dim=1)
        built = self.builder.build(0, m)
        assert built.num_actual_tokens == len(q) and built.num_decode_tokens == 0
        rope = rope[:, None]
        self.impl.do_kv_cache_update(latent, rope, self.pages, m.slot_mapping, "auto", None)
        out = torch.full((len(q), self.heads * VALUE), torch.nan)
        self.impl.forward_mha(q, latent, rope, self.pages, built, None, out)
        return out.view(len(q), self.heads, VALUE)

    def run(self, steps, q, rows, exact=True):
        """Attends to new tokens after older ones; returns the output and what is right."""
        m = self.metadata(steps)
        for s, (total, new) in enumerate(steps):
            if total > new:
                old = rows[s][: total - new]
                earlier = self.metadata([(len(old), len(old))], m.block_table_tensor[s : s + 1])
                self.forward(earlier, torch.zeros(len(old), *q.shape[1:]), old)
        new_rows = [rows[s][total - new :] for s, (total, new) in enumerate(steps)]
        found, right, first = self.forward(m, q, torch.cat(new_rows)), [], 0
        for s, (_, new) in enumerate(steps):
            right.append(self.right(q[first : first + new], rows[s], new, exact))
            first += new
        return found, torch.cat(right)

    def right(self, q, rows, new, exact):
        """Dense attention over the keys and values of all heads, in float64."""
        seen = self.through_codes(rows)
        if self.first_token:
            seen[0] = rows[0]
        if exact:
            seen[len(seen) - new :] = rows[len(seen) - new :]
        latent, rope = seen.double().split(self.dims, dim=1)
        nope, values = torch.einsum("tr,hnr->htn", latent, self.w.double()).split([NOPE, VALUE], 2)
        keys = torch.cat([nope, rope.expand(self.heads, -1, -1)], dim=2)
        score = self.scale * torch.einsum("qhd,hkd->hqk", q.double(), keys)
        hidden = torch.ones(new, len(rows), dtype=torch.bool).triu(len(rows) - new + 1)
        score.masked_fill_(hidden, -torch.inf)
        return torch.einsum("hqk,hkd->qhd", score.softmax(-1), values)

    def through_codes(self, rows):
        """Rows as pages give them back, by ops that have tests of their own."""
        config = latent_preset_of("k5u", *self.dims, page_size=32)
        tables = make_latent_tables(config, self.number, center=norm_center(self.norm.weight))
        pages = -(-len(rows) // 32)
        cache = tt.allocate_latent_cache(config, pages)
        latent, rope = (part.contiguous() for part in rows.split(self.dims, dim=1))
        tt.mla_store(latent, rope, cache, torch.arange(len(rows)), config, tables)
        table, lengths = torch.arange(pages).int()[None], torch.tensor([len(rows)]).int()
        found = tt.mla_load(cache, table, lengths, config, tables, len(rows), torch.float32)
        return torch.cat(found, dim=2)[0]


def tensors(steps, heads=4, dims=(128, 32)):
    """Queries, and rows of each sequence whose channels are as large as the norm's weight."""
    q = 3 * randn(sum(new for _, new in steps), heads, NOPE + dims[1], seed=0)
    size = torch.cat([torch.logspace(-1.5, 0.5, dims[0]), torch.ones(dims[1])])
    rows = [randn(total, sum(dims), seed=1 + s) * size for s, (total, _) in enumerate(steps)]
    return q, rows


def assert_right(found, right):
    """The CPU kernel rounds to 16 bits: an output is off by 10^-4 of its length (docs/ops.md)."""
    error = ((found.double() - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
    assert error < 5e-4, f"off by {error:.1g} of its length"


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps(started, steps):
    assert_right(*Layer(started({})).run(steps, *tensors(steps)))


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps_from_codes(started, steps):
    """Decode steps read their tokens from codes, prompts beside them do not."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    layer = Layer(started({"exact_steps": False}, speculative_config=drafts))
    q, rows = tensors(steps)
    found, exact = layer.run(steps, q, rows)
    _, coded = layer.run(steps, q, rows, exact=False)
    # Sequences come in this order: at most four new tokens, then more.
    decoding = sum(new for _, new in steps if new <= 4)
    if decoding:
        assert_right(found[:decoding], coded[:decoding])
    if decoding < len(q):
        assert_right(found[decoding:], exact[decoding:])


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize(
    ("heads", "dims"), [(16, (512, 64)), (20, (512, 64)), (5, (256, 32)), (8, (128, 64))]
)
def test_shapes_and_pages(started, heads, dims, page_size):
    steps = STEPS["few mixed"]
    layer = Layer(started({}), heads, dims, page_size, number=1)
    assert_right(*layer.run(steps, *tensors(steps, heads, dims)))


def test_the_first_token_from_its_codes(started):
    steps = STEPS["few mixed"]
    layer = Layer(started({"first_token": "codes"}))
    found, right = layer.run(steps, *tensors(steps))
    assert_right(found, right)
    layer.first_token = True  # the reference can tell
    _, exact = layer.run(steps, *tensors(steps))
    with pytest.raises(AssertionError, match="of its length"):
        assert_right(found, exact)


def test_memory_that_moves_is_bound_again(started):
    steps = STEPS["few mixed"]
    layer = Layer(started({}))
    first, _ = layer.run(steps, *tensors(steps))
    layer.pages = torch.zeros(layer.pages.shape, dtype=torch.uint8)
    second, right = layer.run(steps, *tensors(steps))
    assert_right(second, right)
    assert torch.equal(first, second)


def test_weights_that_are_loaded_again(started):
    """The scales of channels follow the norm, at the same address."""
    steps = STEPS["few mixed"]
    layer = Layer(started({}))
    address = layer.impl.tables.center.data_ptr()
    layer.norm.weight = layer.norm.weight.sqrt()
    layer.impl.process_weights_after_loading(torch.float32)
    assert layer.impl.tables.center.data_ptr() == address
    assert_right(*layer.run(steps, *tensors(steps)))


def test_an_engine_that_sleeps_keeps_its_constants(started):
    layer = Layer(started({}))
    kept = dict(layer.module.named_buffers())
    mine = {f"turboquant_{name}": t for name, t in layer.impl.tables._asdict().items()}
    assert kept.keys() == {name for name, t in mine.items() if t is not None}
    assert all(kept[name] is mine[name] for name in kept)


def test_padding_of_graphs(started):
    """Rows of length 0 behind the sequences of a step."""
    layer = Layer(started({}))
    m = layer.metadata([(9, 1), (8, 1)])
    m.seq_lens[1], m.slot_mapping[1] = 0, -1
    q, (rows, _) = tensors([(9, 1), (9, 1)])
    layer.forward(layer.metadata([(8, 8)], m.block_table_tensor[:1]), q.new_zeros(8, *q.shape[1:]),
                  rows[:8])  # fmt: skip
    out = layer.forward(m, q, rows[8:].expand(2, -1))
    assert_right(out[:1], layer.right(q[:1], rows, 1, True))
    assert not out[1].any()


def test_a_layer_that_does_not_tell_its_norm_is_refused(started):
    with pytest.raises(ValueError, match=r"layers\.0.* does not tell the norm of its latents"):
        Layer(started({}), tells=False)


# ---- prompts by FlashAttention, where vLLM has it


def with_flash(layer, flash, options=None):
    layer.impl.prompt_attention = prompts.PromptAttention(
        flash, {"softmax_scale": layer.scale} if options is None else options, 0
    )
    layer.builder.splits_prompts = True
    return layer


@pytest.mark.parametrize("steps", LONG_STEPS.values(), ids=LONG_STEPS)
def test_long_chunks_over_decoded_pages(started, monkeypatch, steps):
    monkeypatch.setattr(prompts, "SEGMENT", 128)
    calls = []

    def flash(**arguments):
        calls.append(arguments["causal"])
        return flash_attention(**arguments)

    layer = Layer(started({}))
    q, rows = tensors(steps)
    m = layer.metadata(steps)
    for s, (total, new) in enumerate(steps):  # by the op for pages
        old = rows[s][: total - new]
        if len(old):
            earlier = layer.metadata([(len(old), len(old))], m.block_table_tensor[s : s + 1])
            layer.forward(earlier, q.new_zeros(len(old), *q.shape[1:]), old)
    with_flash(layer, flash)
    new_rows = torch.cat([rows[s][total - new :] for s, (total, new) in enumerate(steps)])
    found, first = layer.forward(m, q, new_rows), 0
    for s, (_, new) in enumerate(steps):
        own = slice(first, first + new)
        assert_right(found[own], layer.right(q[own], rows[s], new, True))
        first += new
    assert calls == asked_of_flash(steps, 128)


def test_fresh_prompts(started):
    steps = STEPS["fresh prompts"]
    layer = with_flash(Layer(started({})), flash_attention)
    assert_right(*layer.run(steps, *tensors(steps)))


def test_short_chunks_stay_with_the_pages(started):
    """Making keys and values of old latents would cost more than it gains."""

    def flash(**arguments):
        raise AssertionError("not for these")

    steps = [(1024, 127), (9, 1)]
    layer, (q, rows) = Layer(started({})), tensors(steps)
    _, right = layer.run(steps, q, rows)
    new_rows = torch.cat([rows[s][total - new :] for s, (total, new) in enumerate(steps)])
    assert_right(with_flash(layer, flash).forward(layer.metadata(steps), q, new_rows), right)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("given_out", [True, False])
def test_values_of_fewer_channels_are_padded(lse, given_out):
    """For a FlashAttention whose values have as many channels as keys."""

    def flash(**arguments):
        assert arguments["v"].shape[-1] == arguments["q"].shape[-1]
        return flash_attention(**arguments)

    q, k, v = randn(30, 4, 56, seed=1), randn(30, 4, 56, seed=2), randn(30, 4, 20, seed=3)
    starts = torch.tensor([0, 10, 30]).int()
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True, "softmax_scale": 0.1}
    out = torch.empty(30, 4, 20) if given_out else None
    found = attend_padded(flash, q=q, k=k, v=v, out=out, return_softmax_lse=lse, **given)
    right, right_lse = flash_attention(q, k, v, return_softmax_lse=True, **given)
    if lse:
        found, found_lse = found
        assert torch.equal(found_lse, right_lse)
    assert found.is_contiguous() and (out is None or found is out)
    torch.testing.assert_close(found, right)


# ---- engines


def started_engine(folder, settings, **options):
    """Pages of latents have 32 tokens at least; on a CPU vLLM chooses."""
    return engine(folder, settings, **{"block_size": 64, **options})


PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]
NEAR = 0.05  # nats: what 16 bits of a position and 8 of a latent change; 5 bits change 0.24


def logprobs(llm, count=12):
    """Of each prompt the tokens of a greedy answer with the likeliest tokens' logarithms."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=20
    )
    given = [{"prompt_token_ids": p} for p in PROMPTS]
    return [
        [(token, {t: x.logprob for t, x in found.items()})
         for token, found in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in llm.generate(given, params, use_tqdm=False)
    ]  # fmt: skip


def assert_same(found, right, near=NEAR):
    for answer, expected in zip(found, right, strict=True):
        for (token, mine), (other, theirs) in zip(answer, expected, strict=True):
            for likeliest in (token, other):
                pair = [of.get(likeliest, -torch.inf) for of in (mine, theirs)]
                apart = abs(pair[0] - pair[1])
                assert apart < near, f"token {likeliest} is {apart:.2g} nats off"
            if token != other:
                break  # as likely; what follows has another past


AMX = not ON_GPU and torch.cpu._is_amx_tile_supported()
VLLMS_OWN = {"attention_backend": "CPU_MLA"} if AMX else {}
"""What vLLM chooses by itself on CPUs with AMX takes no weights of float32."""


@pytest.fixture(scope="module")
def plain(folder):
    with started_engine(folder, None, **VLLMS_OWN) as llm:
        return logprobs(llm)


@pytest.mark.skipif(ON_GPU, reason="16 bits round in other places there")
@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
def test_answers_are_those_of_transformers(tmp_path, rope):
    """Of the rotation, too, which vLLM computes before the layer."""
    save_deepseek(tmp_path, **({} if rope is None else {"rope_parameters": rope}))
    with started_engine(tmp_path, {"preset": "k8"}) as llm:
        found = logprobs(llm)
    model = DeepseekV2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for p, answer in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([[*p, *(token for token, _ in answer)]])
        with torch.no_grad():
            right = model(tokens).logits[0, len(p) - 1 : -1].log_softmax(-1)
        for (token, mine), theirs in zip(answer, right, strict=True):
            assert abs(mine[token] - theirs[token]) < NEAR


@pytest.mark.skipif(ON_GPU, reason="vLLM's own backends round in other places")
@pytest.mark.parametrize("exact_steps", [True, False])
def test_answers_are_those_of_vllms_own_cache(folder, plain, exact_steps):
    """With 8 bits they are the same, and with 5 bits one can tell."""
    settings = {"preset": "k8", "exact_steps": exact_steps}
    with told() as lines, started_engine(folder, settings) as llm:
        assert_same(logprobs(llm), plain)
    assert lines == [
        "TurboQuant: preset k8, 678 bytes per token and layer on this rank, 36 of them for exact "
        "first tokens; 3.40 times the tokens of float32 fit. Centers: scales of channels from the "
        "norm of latents; seed 0; format 1"
    ]
    with started_engine(folder, {"preset": "k5u"}) as llm:
        coarse = logprobs(llm)
    with pytest.raises(AssertionError, match="nats off"):
        assert_same(coarse, plain)


def test_pages_and_layers_with_presets_of_their_own(folder, request):
    """Every layer takes its own bytes and no padding. vLLM's blocks on a CPU have 16 tokens."""
    settings = {"preset": "k8v8", "layers": {"0": "k4"}, "first_token": "codes"}
    with started_engine(folder, settings) as llm:
        pages = pages_of(llm)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert {layer.kv_cache.shape[1] for layer in layers.values()} == {64}
        found = logprobs(llm)
    assert MEMORY // (64 * (642 + 386)) - pages in (0, 1)
    if not ON_GPU:  # vLLM's own backends round in other places there
        assert_same(found, request.getfixturevalue("plain"), near=1)  # 4 bits change 0.8


@pytest.mark.skipif(ON_GPU, reason="vLLM has other backends there")
def test_nothing_happens_unasked(folder, plain):
    with told() as lines, started_engine(folder, None, **VLLMS_OWN) as llm:
        (layer, *_) = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert layer.attn_backend.__name__ == "CPUMLABackend"
    assert lines == []


@pytest.mark.parametrize(
    ("settings", "options", "text"),
    [
        ({"centers": "file"}, {}, '"centers" has no meaning for latent attention'),
        ({"calibrate": True}, {}, '"calibrate" has no meaning for latent attention'),
        ({"preset": "k2v2"}, {}, "bits is 2, supported for latents: 3, 4, 5, 8"),
        ({"preset": "k6"}, {}, "unknown preset 'k6'"),
        ({"layers": {"2": "k8"}}, {}, "names layer 2, the model has 2 layers"),
        pytest.param(
            # not VLLMS_OWN, because vLLM chooses only once in a process for equal arguments
            *({}, {"attention_backend": "AMX_MLA" if AMX else "CPU_MLA"}),
            "pass --attention-backend CUSTOM",
            marks=pytest.mark.skipif(ON_GPU, reason="a name of CPUs"),
        ),
    ],
)
def test_refusals_when_an_engine_starts(folder, settings, options, text):
    with pytest.raises(Exception, match=text), started_engine(folder, settings, **options):
        pass


@pytest.mark.parametrize("name", ["CPU_MLA", "AMX_MLA"])
def test_versions_without_latents_refuse_them_on_a_cpu(started, monkeypatch, name):
    """There vLLM ignores --attention-backend, and would serve from its own cache."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(adapter, "INTERFACE", INTERFACE._replace(latents=False))
    plugin.register()
    with (
        set_current_vllm_config(started({})),
        pytest.raises(ValueError, match=r"latent attention \(MLA\) need vLLM 0\.32"),
    ):
        registry.AttentionBackendEnum[name].get_class()


def test_layers_of_other_shapes_are_refused(tmp_path):
    save_deepseek(tmp_path, kv_lora_rank=64)  # with 64 of the position as many as 128 and none
    with (
        pytest.raises(ValueError, match="128, 256 or 512 of a latent"),
        started_engine(tmp_path, {}),
    ):
        pass


def test_what_vllm_asks_a_backend():
    assert LatentBackend.is_mla() and not LatentBackend.supports_sink()
    assert not LatentBackend.supports_sliding_window()
    assert LatentBackend.supports_head_size(576) and LatentBackend.supports_head_size(288)
    assert not LatentBackend.supports_head_size(320 + 64)
    assert LatentBackend.supports_block_size(64) and not LatentBackend.supports_block_size(16)
    asked = (576, torch.bfloat16, "fp8", None, True, False, False, False, None)
    assert "pass --kv-cache-dtype bfloat16" in LatentBackend.supports_combination(*asked)
    asked = (576, torch.bfloat16, "auto", None, True, False, True, False, None)
    assert "with an indexer" in LatentBackend.supports_combination(*asked)
    asked = (576, torch.bfloat16, "auto", None, True, False, False, False, None)
    assert LatentBackend.supports_combination(*asked) is None
