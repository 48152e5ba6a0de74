"""The transformers cache on GPUs: the oracle, generation, and layers spread over devices."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file

from tests.transformers.harness import (
    DRAFTS,
    MODELS,
    check_against_oracle,
    feed,
    generate,
    make_calm_model,
    make_config,
    make_ids,
    make_model,
    padded,
    recorded,
)
from torch_turboquant.integrations.transformers import TurboQuantCache


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_cuda(name, dtype):
    """Against the oracle; how exact the kernels are is the matter of test_attention.py."""
    model, ids = make_model(name, dtype).cuda(), make_ids(150, 2).cuda()
    config = make_config(model, "k3v2")
    with recorded(model, config, max_batch_size=2, max_q_len=7) as (cache, recorder):
        feed(model, cache, ids, 80, 1, 1, 20, 1, 5, *[1] * 42)
        assert cache.cache_device.type == "cuda"
        for layer in cache.layers:
            held = layer.pages, layer.ring, *layer.tables
            assert all(t.is_cuda for t in held if t is not None)
        recorder.to_cpu()
        options = {"center": "auto", "pads": [0, 0]}
        check_against_oracle(recorder, config, 80, tolerance=0.03, coarse=2, **options)


@pytest.mark.cuda
def test_generation_on_cuda():
    """Batches with padding, drafts, beams: each against the same with eight bits, or greedy."""
    model = make_calm_model().cuda()
    ids, mask = padded([80, 30, 55], 80)
    ids, mask = ids.cuda(), mask.cuda()
    prompt = make_ids(20).repeat(1, 4).cuda()
    expected = generate(model, ids, attention_mask=mask)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=3) as cache:
        assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
        cache.reset()
        beams = generate(model, prompt, new=16, num_beams=3)
        assert torch.equal(generate(model, prompt, cache, new=16, num_beams=3), beams)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        greedy = generate(model, prompt, cache, new=30, eos_token_id=0)
        cache.reset()
        drafted = generate(model, prompt, cache, new=30, **DRAFTS)
    assert torch.equal(drafted[:, :110], greedy)


@pytest.mark.cuda
@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 256}])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_files_on_cuda(form, name, tmp_path):
    """Saved on a GPU and loaded there it goes on bit by bit; a CPU loads the same bytes."""
    model, ids = make_model(name, torch.bfloat16).cuda(), make_ids(150, 2).cuda()
    with TurboQuantCache.for_model(model, max_batch_size=2, **form) as cache:
        feed(model, cache, ids[:, :100])
        cache.save(tmp_path / "cuda")
        with TurboQuantCache.load(tmp_path / "cuda", model) as twin:
            assert twin.cache_device.type == "cuda"
            expected = feed(model, cache, ids[:, 100:], *[1] * 50)
            assert torch.equal(feed(model, twin, ids[:, 100:], *[1] * 50), expected)
    with TurboQuantCache.load(tmp_path / "cuda", model.cpu()) as twin:
        assert twin.cache_device.type == "cpu"
        twin.save(tmp_path / "cpu")
    mine, theirs = (load_file(tmp_path / device) for device in ("cpu", "cuda"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def spread(model, homes):
    """The model with every part on its device; inputs follow, as under a device_map."""

    def follow(module, args, kwargs):
        home = next(module.parameters()).device

        def move(x):
            if isinstance(x, tuple):
                return tuple(move(part) for part in x)
            return x.to(home) if isinstance(x, torch.Tensor) else x

        return move(args), {name: move(x) for name, x in kwargs.items()}

    for module, home in homes:
        module.to(home).register_forward_pre_hook(follow, with_kwargs=True)
    return model


@pytest.mark.cuda
@pytest.mark.parametrize("second", ["cpu", "cuda:1"])
@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 128}])
def test_every_layer_lives_where_its_model_layer_does(second, form):
    first = "cuda:0"
    if second == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, ids = make_calm_model(), make_ids(100)
    with TurboQuantCache.for_model(model, "k8v8") as cache:
        expected = generate(model, ids, cache)
    decoder = model.model
    fronts = [decoder.embed_tokens, decoder.layers[0]]
    backs = [*decoder.layers[1:], decoder.norm, model.lm_head]
    decoder.rotary_emb.to(first)
    spread(model, [(m, first) for m in fronts] + [(m, second) for m in backs])
    with TurboQuantCache.for_model(model, "k8v8", **form) as cache:
        tokens = generate(model, ids.to(first), cache, disable_compile=True)
        assert [str(layer.pages.device) for layer in cache.layers] == [first, second, second]
        cache.crop(-5)
        feed(model, cache, tokens[:, -5:], 1, 4)
    assert torch.equal(tokens.cpu(), expected)
