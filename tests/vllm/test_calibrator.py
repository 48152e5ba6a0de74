"""Sums of keys in vLLM's workers, without vLLM: steps of any kind, ranks of any kind, one file."""

from types import SimpleNamespace

import pytest
import torch

from torch_turboquant import centers as files
from torch_turboquant.integrations.engine.centers import LayerConstants
from torch_turboquant.integrations.vllm import calibrator
from torch_turboquant.integrations.vllm.calibrator import Calibrator, KeySums, join, rotary_partners
from torch_turboquant.ops.center import learn_center_reference, query_energy_reference

LAYERS, HEADS, KV_HEADS, DIM, SINKS = 2, 8, 4, 32, 4
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rope_theta": 10000.0,
}
LENGTHS = (50, 61)  # of the prompts


def vectors(heads, seed):
    """Of both prompts in all layers, one behind the other: [layers, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(LAYERS, sum(LENGTHS), heads, DIM, generator=generator)
    return x * torch.rand(DIM, generator=generator) + 3 * torch.rand(
        heads, DIM, generator=generator
    )


QUERIES, KEYS = vectors(HEADS, 1), vectors(KV_HEADS, 2)
# Steps of an engine: how many tokens of each prompt it takes, chunks and both prompts mixed.
STEPS = ((3, 0), (30, 20), (1, 41), (16, 0))
NEOX = [DIM, DIM, True]


def tokens_of(prompt):
    first = sum(LENGTHS[:prompt])
    return torch.arange(first, first + LENGTHS[prompt])


def gathered(layer, rank=0, size=1, padding=5):
    """The sums of a layer on one rank, after all steps, each padded as a CUDA graph would."""
    heads = calibrator.heads_of_rank(KV_HEADS, rank, size)
    query_heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
    queries, keys = QUERIES[layer][:, query_heads], KEYS[layer][:, heads]
    sums, done = KeySums(keys.shape[1], DIM), [0] * len(LENGTHS)
    for step in STEPS:
        here = [n for n in range(len(LENGTHS)) if step[n]]
        rows = [tokens_of(n)[done[n] : done[n] + step[n]] for n in here]
        for n in here:
            done[n] += step[n]
        starts = torch.tensor([0, *(len(r) for r in rows)], dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor([done[n] for n in here], dtype=torch.int32)
        rows = torch.cat([*rows, torch.zeros(padding, dtype=torch.int64)])
        sums.add(queries[rows], keys[rows], starts, lengths)
    assert tuple(done) == LENGTHS
    return sums


def part(rank=0, size=1, layers=range(LAYERS), ropes=(NEOX,)):
    packed = {str(i): calibrator.pack(gathered(i, rank, size)) for i in layers}
    return {"rank": rank, "size": size, "ropes": [list(r) for r in ropes], "layers": packed}


def expected():
    """By the definition in float64, from all tokens but the first of each prompt."""
    kept = torch.cat([tokens_of(n)[SINKS:] for n in range(len(LENGTHS))])
    keys = [k[None, kept].transpose(1, 2) for k in KEYS]
    queries = [q[None, kept].transpose(1, 2) for q in QUERIES]
    energies = list(query_energy_reference(queries, KV_HEADS).float())
    return learn_center_reference(keys, energies, torch.arange(DIM).roll(DIM // 2)).float()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_are_joined(size):
    """Of eight ranks two share a KV head, and each has half of its queries."""
    found = join([part(rank, size) for rank in range(size)], LLAMA)
    torch.testing.assert_close(torch.stack(found), expected(), rtol=1e-5, atol=1e-6)


def test_pipeline_ranks_have_layers_of_their_own():
    found = join([part(layers=[0]), part(layers=[1])], LLAMA)
    torch.testing.assert_close(torch.stack(found), expected(), rtol=1e-5, atol=1e-6)
    means = join([part()], LLAMA, scaled=False)
    torch.testing.assert_close(torch.stack(means), expected()[:, 0], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_joined():
    with pytest.raises(ValueError, match="no rank has gathered all keys of layer 1: calibrate thr"):
        join([part(layers=[0])], LLAMA)
    with pytest.raises(ValueError, match="no rank has gathered all keys of layer 0"):
        join([part(0, 2)], LLAMA)
    few = part()
    few["layers"]["1"]["count"] = 63
    with pytest.raises(ValueError, match="layer 1 has seen 63 tokens behind the first 4 of"):
        join([few], LLAMA)


def test_partners():
    identity = list(range(8))
    assert rotary_partners(8, []).tolist() == identity
    assert rotary_partners(8, [(8, 8, True)]).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert rotary_partners(8, [(8, 4, True), (16, 16, True)]).tolist() == [2, 3, 0, 1, 4, 5, 6, 7]
    assert rotary_partners(8, [(8, 8, False)]).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert rotary_partners(8, [(8, 8, True), (8, 4, True)]).tolist() == identity


class Worker(Calibrator):
    """A worker of vLLM, as far as the extension sees it."""

    def __init__(self, sums):
        impls = [SimpleNamespace(index=i, key_sums=s) for i, s in enumerate(sums)]
        impls.append(SimpleNamespace(index=0, key_sums=None))  # reads the keys of layer 0
        layers = {f"model.layers.{i}.attn": SimpleNamespace(impl=x) for i, x in enumerate(impls)}
        layers["model.layers.9.conv"] = SimpleNamespace()
        config = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=config)

    def get_model(self):
        rope = torch.nn.Module()
        rope.head_size, rope.rotary_dim, rope.is_neox_style = DIM, DIM, True
        return torch.nn.Sequential(rope, torch.nn.Linear(2, 2))


@pytest.fixture
def engine(monkeypatch):
    """An LLM of one worker, whose warm-up has left sums."""
    import sys

    distributed = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1
    )
    params = SimpleNamespace(SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", params)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    sums = [gathered(i) for i in range(LAYERS)]
    worker = Worker(sums)

    def generate(prompts, params, use_tqdm):
        assert [len(p["prompt_token_ids"]) for p in prompts] == list(LENGTHS)
        assert params["max_tokens"] == 1
        for layer, target in enumerate(sums):
            new = gathered(layer)
            target.sums += new.sums
            target.count += new.count

    model_config = SimpleNamespace(hf_config=LLAMA)
    return SimpleNamespace(
        generate=generate,
        collective_rpc=lambda name: [getattr(worker, name)()],
        llm_engine=SimpleNamespace(model_config=model_config),
    )


def test_a_file_of_the_engine(engine, tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / files.FILE_NAME
    prompts = [list(range(n)) for n in LENGTHS]
    assert calibrator.calibrate(engine, prompts, path) == sum(LENGTHS)
    center, scale = LayerConstants.of(path, LLAMA, 1, 2).for_layer(1, 2, DIM)
    torch.testing.assert_close(center, expected()[1, 0, 2:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale, expected()[1, 1, 2:], rtol=1e-5, atol=1e-6)


def test_arguments_of_an_engine_that_calibrates():
    given = {"tensor_parallel_size": 4, "enforce_eager": True}
    options = calibrator.engine_options(given)
    assert options["tensor_parallel_size"] == 4 and options["enforce_eager"]
    module, name = options["worker_extension_cls"].rsplit(".", 1)
    assert (module, name) == (calibrator.__name__, "Calibrator")
    assert options["additional_config"]["turboquant"]["calibrate"] is True
    options = calibrator.engine_options({"additional_config": {"another": {"preset": 3}}})
    assert options["additional_config"]["another"] == {"preset": 3}
    assert options["additional_config"]["turboquant"]["preset"] == "k8v8"
    assert calibrator.engine_options({"additional_config": None})["enforce_eager"]


@pytest.mark.parametrize(("given", "named"), [
    ({"attention_backend": "FLASH_ATTN"}, "attention_backend='FLASH_ATTN'"),
    ({"enforce_eager": False, "dtype": "float16"}, "enforce_eager=False"),
    ({"enable_prefix_caching": True}, "enable_prefix_caching=True"),
    ({"worker_extension_cls": "a.B", "enforce_eager": False},
     "enforce_eager=False, worker_extension_cls='a.B'"),
    ({"additional_config": {"turboquant": {"preset": "k4v4"}}},
     "'turboquant' in additional_config"),
])  # fmt: skip
def test_arguments_that_a_calibration_needs_itself(given, named):
    with pytest.raises(ValueError) as caught:
        calibrator.engine_options(given)
    assert str(caught.value).endswith(f"itself: leave {named} out")


def test_an_engine_that_does_not_calibrate():
    with pytest.raises(RuntimeError, match="no layer gathers keys: start vLLM with"):
        Worker([]).turboquant_start()
    with pytest.raises(RuntimeError, match="no layer gathers keys"):
        Worker([None]).turboquant_start()


def test_layers_of_a_draft_model():
    worker = Worker([KeySums(1, 8), KeySums(1, 8)])
    worker.turboquant_start()
    layers = worker.vllm_config.compilation_config.static_forward_context
    layers["model.layers.1.attn"].impl.index = 0
    with pytest.raises(RuntimeError, match="two layers have the same number"):
        worker.turboquant_start()


def test_nothing_is_summed_up_into_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    query = SimpleNamespace(is_cuda=True)
    with pytest.raises(RuntimeError, match="needs every step to run anew"):
        KeySums(1, 8).add(query, None, None, None)
