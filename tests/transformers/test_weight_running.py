"""Models of packed weights at work: with a packed cache, compiled, on devices and on GPUs."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.transformers.weights import IDS, TEXT, load, logits, make, packed_layers
from torch_turboquant.integrations.transformers import TurboQuantCache, TurboQuantConfig, quantize

# ------------------------------------------------------------------------------ running


def test_with_a_packed_cache(folder):
    """Both at once, and the cache of a packed model can be saved and loaded."""
    packed = load(folder(make()), TurboQuantConfig(), dtype=torch.float32)
    expected = packed.generate(IDS, max_new_tokens=8, do_sample=False)
    with TurboQuantCache.for_model(packed, "k8v8") as cache:
        found = packed.generate(IDS, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, expected)
        path = folder(packed, "packed") / "cache.safetensors"
        cache.save(path)
    with TurboQuantCache.load(path, packed) as cache:
        assert cache.get_seq_length() == 47
    other = load(folder(make(), "other"), TurboQuantConfig(bits=8), dtype=torch.float32)
    with pytest.raises(ValueError, match="another model"):
        TurboQuantCache.load(path, other)


@pytest.mark.parametrize("calibrated", [False, True])
def test_compiled_in_one_piece(calibrated, folder):
    model = make(dtype=torch.float32)
    if calibrated:
        quantize(model, text=TEXT)
        model = load(folder(model, "packed"))
    else:
        model = load(folder(model), TurboQuantConfig())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS).logits, logits(model), rtol=1e-3, atol=1e-3)


def test_on_devices_of_a_map(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    mapped = load(path, TurboQuantConfig(), device_map={"": "cpu"})
    assert torch.equal(logits(mapped), logits(load(path, TurboQuantConfig())))


def replica_of(model):
    """What nn.DataParallel makes of a model for one of its GPUs, on the CPU."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is None:
                    getattr(replica, kind)[name] = None
                else:
                    setattr(replica, name, tensor.detach())
    return replicas[model]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_replicas_of_data_parallel(family):
    model = make(family)
    quantize(model, text=TEXT)  # with scales of channels
    assert torch.equal(logits(replica_of(model)), logits(model))


def test_packed_weights_on_disk(folder, tmp_path):
    pytest.importorskip("accelerate")
    packed = load(folder(make()), TurboQuantConfig())
    path = folder(packed, "packed")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    spread = load(path, device_map=places, offload_folder=tmp_path / "offload")
    assert torch.equal(logits(spread), logits(packed))
    with pytest.raises(ValueError, match=r"1\.self_attn\.q_proj is offloaded .* cannot be made"):
        spread.dequantize()
    assert torch.equal(logits(spread), logits(packed))


def test_the_package_can_be_imported_again():
    import importlib

    from torch_turboquant.integrations.transformers import weights

    importlib.reload(weights)  # a second registration would raise


# ------------------------------------------------------------------------------ on GPUs


@pytest.mark.cuda
@pytest.mark.parametrize("calibrated", [False, True])
def test_packed_on_a_gpu(calibrated, folder):
    """The bytes are those of the CPU; a calibrated model has those that it was saved with."""
    model = make("qwen2").cuda()
    quantize(model, text=TEXT if calibrated else None)
    again = load(folder(model, "packed")).cuda()
    assert torch.equal(logits(again, IDS.cuda()), logits(model, IDS.cuda()))
    for name, layer in packed_layers(model).items():
        assert torch.equal(layer.weight, again.get_submodule(name).weight), name
        assert calibrated == (layer.channel_inverse is not None)
    if not calibrated:
        on_cpu = make("qwen2")
        quantize(on_cpu)
        for name, layer in packed_layers(on_cpu).items():
            assert torch.equal(layer.weight, model.get_submodule(name).weight.cpu()), name


@pytest.mark.cuda
def test_packed_while_it_loads_on_a_gpu(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    model = load(path, TurboQuantConfig(), device_map={"": "cuda"})
    on_cpu = load(path, TurboQuantConfig())
    for name, layer in packed_layers(on_cpu).items():
        assert torch.equal(layer.weight, model.get_submodule(name).weight.cpu()), name
    found, expected = logits(model, IDS.cuda()).float().cpu(), logits(on_cpu).float()
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_computes_what_a_cpu_does(dtype):
    model = make(dtype=dtype)
    quantize(model)
    expected = logits(model).float()
    found = logits(model.cuda(), IDS.cuda()).float().cpu()
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.cuda
def test_weights_and_cache_in_a_graph():
    """A captured step gives the logits of the same step without a graph."""
    model = make().cuda()
    quantize(model)
    prompt, tokens = IDS[:, :30].cuda(), IDS[:, 30:].cuda()
    with TurboQuantCache.for_model(model, "k5v4u", static=True, max_cache_len=96) as cache:
        model(prompt, past_key_values=cache)
        expected = [model(token, past_key_values=cache).logits for token in tokens.split(1, 1)]
        cache.reset()
        model(prompt, past_key_values=cache)
        token = tokens[:, :1].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(model(token, past_key_values=cache).logits, expected[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(token, past_key_values=cache).logits
        for number in range(1, tokens.shape[1]):
            token.copy_(tokens[:, number : number + 1])
            graph.replay()
            assert torch.equal(found, expected[number]), number


@pytest.mark.cuda
def test_a_model_may_move():
    model = make()
    quantize(model, text=TEXT)
    expected = logits(model)
    assert torch.equal(logits(model.cuda().cpu()), expected)
