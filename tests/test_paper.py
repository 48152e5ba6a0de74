"""The paper's quantisers against its theory, and the dense cache against a plain float64 oracle."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import code_score_rounding, sketch_score_rounding
from torch_turboquant.codebook import distortion, lloyd_max
from torch_turboquant.ops.codec import decode_reference, encode_reference
from torch_turboquant.ops.group import group_decode_reference, group_encode_reference
from torch_turboquant.ops.qjl import qjl_score_reference, qjl_sketch_reference
from torch_turboquant.paper import QuantizedProd, TurboQuantKVCache, TurboQuantMSE, TurboQuantProd
from torch_turboquant.signs import SignKind, gaussian_projection, random_signs

# Expected squared error of a unit vector, 1 to 4 bits.
MSE_TOTALS = {
    64: (0.35839, 0.11453, 0.03339, 0.00913),
    128: (0.36089, 0.11600, 0.03397, 0.00931),
    256: (0.36214, 0.11674, 0.03426, 0.00941),
}
# d times the expected squared error of an inner product of unit vectors, two stages, 2 to 5 bits.
PROD_TOTALS = {
    64: (0.563, 0.180, 0.0525, 0.0143),
    96: (0.566, 0.181, 0.0531, 0.0145),
    128: (0.567, 0.182, 0.0534, 0.0146),
}


def unit_vectors(count: int, d: int, seed: int) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal((count, d))
    return torch.from_numpy((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32))


# ---------------------------------------------------------------- Algorithm 1


@pytest.mark.parametrize("bits", (1, 2, 3, 4))
@pytest.mark.parametrize("d", MSE_TOTALS)
def test_mse_distortion(d, bits, device):
    x = unit_vectors(20_000, d, seed=bits).to(device)
    quantizer = TurboQuantMSE(d, bits, seed=bits, device=device)
    error = (quantizer.dequantize(quantizer.quantize(x)) - x).square().sum(-1).mean().item()
    assert error == pytest.approx(MSE_TOTALS[d][bits - 1], rel=0.02)


def test_mse_keeps_lengths():
    """The error is relative to the length, from tiny vectors to those near float16's end."""
    x = unit_vectors(500, 96, seed=0)
    lengths = torch.logspace(-3, 3, 500)[:, None]
    quantizer = TurboQuantMSE(96, 3)
    error = (quantizer.dequantize(quantizer.quantize(x * lengths)) / lengths - x).square().sum(-1)
    assert error.mean().item() == pytest.approx(0.03377, rel=0.05)
    assert error.max().item() < 3 * 0.03377


def test_mse_bytes():
    quantized = TurboQuantMSE(80, 3).quantize(torch.randn(2, 5, 80))
    assert quantized.packed.shape == (2, 5, 30) and quantized.packed.dtype == torch.uint8
    assert quantized.scale.shape == (2, 5) and quantized.scale.dtype == torch.float16


def test_mse_search_and_grids():
    x = unit_vectors(5_000, 128, seed=1)

    def error(bits: int, **options) -> float:
        quantizer = TurboQuantMSE(128, bits, scale_mode="mse", **options)
        return (quantizer.dequantize(quantizer.quantize(x)) - x).square().sum(-1).mean().item()

    assert error(4, search=8) == pytest.approx(0.00790, rel=0.02)
    assert error(4, search=8, grid="uniform") == pytest.approx(0.00998, rel=0.02)
    assert error(8) == pytest.approx(8.0e-5, rel=0.05)


def test_seed_layer_and_kind_choose_the_rotation():
    x = unit_vectors(3, 64, seed=2)
    first = TurboQuantMSE(64, 4).quantize(x).packed
    assert torch.equal(first, TurboQuantMSE(64, 4).quantize(x).packed)
    for other in ({"seed": 1}, {"layer": 1}, {"kind": SignKind.VALUES}):
        assert not torch.equal(first, TurboQuantMSE(64, 4, **other).quantize(x).packed)


def slope_and_mean(estimate: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """Bias of an estimator relative to the signal: of its slope, and of its mean."""
    estimate, true = estimate.double(), true.double()
    slope = (estimate * true).sum() / true.square().sum() - 1.0
    mean = (estimate - true).mean() / true.square().mean().sqrt()
    return slope.item(), mean.item()


@pytest.mark.parametrize("bits", (1, 2, 4))
def test_mse_scores_shrink_unless_unbiased(bits):
    """1e6 pairs: "norm" shrinks inner products by the distortion, "unbiased" does not."""
    keys, queries = unit_vectors(1000, 128, seed=3), unit_vectors(1000, 128, seed=4)
    true = queries @ keys.T
    quantizer = TurboQuantMSE(128, bits)
    slope, mean = slope_and_mean(quantizer.score(queries, quantizer.quantize(keys)), true)
    assert slope == pytest.approx(-MSE_TOTALS[128][bits - 1], abs=0.003)
    assert abs(mean) < 0.02
    quantizer = TurboQuantMSE(128, bits, scale_mode="unbiased")
    slope, mean = slope_and_mean(quantizer.score(queries, quantizer.quantize(keys)), true)
    assert abs(slope) < 0.003 and abs(mean) < 0.02


def test_mse_score_is_the_product_with_the_decoded(device):
    for d, bits in ((64, 1), (96, 3), (128, 4), (80, 5), (128, 8)):
        x = torch.randn(2, 3, 40, d, device=device)
        q = torch.randn(2, 3, 7, d, device=device)
        quantizer = TurboQuantMSE(d, bits, device=device)
        quantized = quantizer.quantize(x)
        decoded = quantizer.dequantize(quantized).double()
        error = (quantizer.score(q, quantized) - q.double() @ decoded.transpose(-1, -2)).abs()
        assert error.shape == (2, 3, 7, 40)
        rounding = code_score_rounding(q, quantizer.signs, decoded.norm(dim=-1), bits)
        assert (error <= 1e-5 * d + rounding).all()


# ---------------------------------------------------------------- Algorithm 2


@pytest.mark.parametrize("sketch", ("gaussian", "hadamard"))
@pytest.mark.parametrize("bits", (2, 3, 4, 5))
@pytest.mark.parametrize("d", PROD_TOTALS)
def test_prod_is_unbiased_and_has_the_variance_of_theory(d, bits, sketch, device):
    """1e6 (query, key) pairs, over 16 rotations and projections."""
    error, estimates, truths = 0.0, [], []
    for seed in range(16):
        keys = unit_vectors(250, d, seed=1000 + seed).to(device)
        queries = unit_vectors(250, d, seed=2000 + seed).to(device)
        quantizer = TurboQuantProd(d, bits, seed, sketch, device=device)
        estimates.append(quantizer.score(queries, quantizer.quantize(keys)))
        truths.append(queries.double() @ keys.double().T)
    estimate, true = torch.cat(estimates), torch.cat(truths)
    assert estimate.numel() == 1_000_000
    slope, mean = slope_and_mean(estimate, true)
    assert abs(slope) < 0.02 and abs(mean) < 0.02

    error = d * (estimate - true).square().mean().item()
    first_stage = distortion(quantizer.mse.codebook.values, d)
    if sketch == "gaussian":
        assert error == pytest.approx((math.pi / 2 - 1 / d) * first_stage, rel=0.02)
        assert error == pytest.approx(PROD_TOTALS[d][bits - 2], rel=0.03)
    else:
        # |r| times the mean of a coordinate of the sphere is what the orthonormal signs recover
        recovered = math.sqrt(math.pi / 2) * lloyd_max(d, 1)[1]
        assert error == pytest.approx((math.pi / 2 + 1 - 2 * recovered) * first_stage, rel=0.02)


@pytest.mark.parametrize("vector", ("basis", "outlier", "constant"))
def test_the_gaussian_sketch_is_unbiased_for_one_pair(vector):
    """Over seeds, for vectors that one signed transform does not make Gaussian."""
    d, trials = 64, 1500
    x = {
        "basis": torch.eye(d)[5],
        "outlier": torch.cat([torch.tensor([10.0]), unit_vectors(1, d - 1, seed=5)[0]]),
        "constant": torch.full((d,), 0.125),
    }[vector][None]
    q = 0.7 * x + x.norm() * unit_vectors(1, d, seed=6)
    found, first = [], []
    for seed in range(trials):
        quantizer = TurboQuantProd(d, 2, seed)
        quantized = quantizer.quantize(x)
        found.append(quantizer.score(q, quantized).item())
        first.append(quantizer.mse.score(q, quantized[:2]).item())
    true = (q @ x.T).item()
    tolerance = 4.0 * np.std(found) / math.sqrt(trials)
    assert tolerance < 0.02 * true
    assert abs(np.mean(found) - true) < tolerance
    assert abs(np.mean(first) - true) > 0.1 * true  # what the sketch repairs


@pytest.mark.parametrize("sketch", ("gaussian", "hadamard"))
def test_prod_score_is_the_product_with_the_decoded(sketch, device):
    for d, bits in ((64, 2), (96, 3), (80, 6)):
        x = 3.0 * torch.randn(2, 3, 40, d, device=device)
        q = torch.randn(2, 3, 7, d, device=device)
        quantizer = TurboQuantProd(d, bits, sketch=sketch, device=device)
        quantized = quantizer.quantize(x)
        expected = q.double() @ quantizer.dequantize(quantized).double().transpose(-1, -2)
        first = quantizer.mse.dequantize(quantized[:2])
        rounding = code_score_rounding(q, quantizer.mse.signs, first.norm(dim=-1), bits - 1)
        rounding += sketch_score_rounding(q, quantized.residual_norm, quantizer.projection)
        assert ((quantizer.score(q, quantized) - expected).abs() <= 1e-5 * d + rounding).all()


def test_prod_stages():
    """The second stage is the sketch of what the first one leaves, with its exact norm."""
    x = torch.randn(50, 64)
    quantizer = TurboQuantProd(64, 3)
    quantized = quantizer.quantize(x)
    first = TurboQuantMSE(64, 2)
    assert torch.equal(quantized.packed, first.quantize(x).packed)
    residual = x - first.dequantize(first.quantize(x))
    torch.testing.assert_close(quantized.residual_norm, residual.norm(dim=-1))
    projected = residual.double() @ gaussian_projection(64, 64, seed=0).double().T
    bits = np.unpackbits(quantized.sign_bits.numpy(), axis=-1, bitorder="little")
    clear = projected.abs() > 1e-5
    assert clear.double().mean() > 0.999
    assert (torch.from_numpy(bits)[clear] == (projected >= 0)[clear]).all()
    assert quantized.sign_bits.shape == (50, 8)


@pytest.mark.parametrize(
    "sketch, times", [("gaussian", math.pi / 2), ("hadamard", math.pi / 2 - 1)]
)
def test_prod_squared_error(sketch, times):
    """What the second stage does to the squared error of the first one."""
    x = unit_vectors(2000, 128, seed=3)
    quantizer = TurboQuantProd(128, 3, seed=1, sketch=sketch)
    packed = quantizer.quantize(x)
    first = quantizer.mse.dequantize(quantizer.mse.quantize(x)) - x
    both = quantizer.dequantize(packed) - x
    ratio = both.square().sum().item() / first.square().sum().item()
    assert ratio == pytest.approx(times, rel=0.03)


def test_an_exact_first_stage_leaves_nothing():
    x = torch.zeros(3, 64)
    for sketch in ("gaussian", "hadamard"):
        quantizer = TurboQuantProd(64, 2, sketch=sketch)
        quantized = quantizer.quantize(x)
        assert quantized.residual_norm.tolist() == [0.0] * 3
        assert quantizer.dequantize(quantized).abs().max() == 0.0


def test_unsupported_quantisers():
    for bits in (3.0, True):
        with pytest.raises(ValueError, match=f"bits is {bits}, which is no whole number"):
            TurboQuantMSE(64, bits)
    with pytest.raises(ValueError, match="scale_mode is 'paper', supported: norm, preserve, mse"):
        TurboQuantMSE(64, 3, scale_mode="paper")
    with pytest.raises(ValueError, match="1 to 5 bits"):
        TurboQuantMSE(64, 6)
    for bits in (1, 7):
        with pytest.raises(ValueError, match="bits must be 2 to 6"):
            TurboQuantProd(64, bits)
    with pytest.raises(ValueError, match="sketch must be one of"):
        TurboQuantProd(64, 3, sketch="sparse")
    for dim in (11, 22, 8192):
        with pytest.raises(ValueError, match=f"the last dimension of vectors is {dim}, supported"):
            TurboQuantMSE(dim, 3)
    with pytest.raises(ValueError, match="steps has 65 candidates, supported: 1 to 64"):
        TurboQuantMSE(64, 3, search=65)
    for sketch in ("gaussian", "hadamard"):
        with pytest.raises(ValueError, match="dim must be a multiple of 8 with a sketch, got 12"):
            TurboQuantProd(12, 3, sketch=sketch)


# ---------------------------------------------------------------- the cache


class Oracle:
    """The cache as dense float64 tensors, from the references of the ops."""

    def __init__(self, cache: TurboQuantKVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.heads, d = keys.shape[1], cache.head_dim
        mse = cache.key_quantizer.mse
        self.signs = mse.signs
        codec = (mse.signs, mse.levels)
        past = max(0, keys.shape[2] - cache.buffer_size)
        coded = encode_reference(keys[:, :, :past], *codec, mse.steps, mse.bits, "norm")
        first = decode_reference(*coded, *codec, mse.bits)
        residual = keys[:, :, :past].float() - first
        self.first, self.exact = first.double(), keys[:, :, past:].double()
        self.projection = cache.key_quantizer.projection
        self.sketch = qjl_sketch_reference(residual, self.projection)
        grouped = group_encode_reference(values[:, :, :past], cache.group_size, cache.value_bits)
        restored = group_decode_reference(*grouped, cache.group_size, cache.value_bits, d)
        self.values = torch.cat([restored.double(), values[:, :, past:].double()], dim=2)

    def _per_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.query_heads // self.heads, dim=1)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        self.query_heads, query = query.shape[1], query.double()
        products = query @ self._per_head(self.first).transpose(-1, -2)
        sketch = map(self._per_head, self.sketch)
        products += qjl_score_reference(query, *sketch, self.projection)
        exact = query @ self._per_head(self.exact).transpose(-1, -2)
        return torch.cat([products, exact], dim=-1) / math.sqrt(query.shape[-1])

    def rounding(self, query: torch.Tensor) -> torch.Tensor:
        """What the scores may lose to queries of 16-bit integers."""
        length = self._per_head(self.first.norm(dim=-1))
        lost = code_score_rounding(query, self.signs, length, 4)
        lost += sketch_score_rounding(query, self._per_head(self.sketch[1]), self.projection)
        exact = lost.new_zeros((*query.shape[:3], self.exact.shape[2]))
        return torch.cat([lost, exact], dim=-1) / math.sqrt(query.shape[-1])

    def attend(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.double() @ self._per_head(self.values)


def random_tokens(tokens: int, d: int, dtype=torch.float32, batch=2, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, d)
    return (torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "options",
    (
        {"head_dim": 64},
        {"head_dim": 128, "key_bits": 4, "value_bits": 4, "group_size": 64},
        {"head_dim": 96, "buffer_size": 0, "sketch": "hadamard"},
        {"head_dim": 64, "buffer_size": 500},
        {"head_dim": 64, "key_bits": 2, "buffer_size": 1, "layer": 3, "seed": 9},
    ),
)
def test_cache_against_the_oracle(options, dtype):
    cache = TurboQuantKVCache(**options)
    d = cache.head_dim
    keys, values = random_tokens(150, d, dtype)
    cache.prefill(keys, values)
    oracle = Oracle(cache, keys, values)
    query = random_tokens(5, d, dtype, heads=6, seed=1)[0]
    scores = cache.attention_scores(query)
    assert scores.shape == (2, 6, 5, 150) and scores.dtype == torch.float32
    assert ((scores - oracle.scores(query)).abs() <= 2e-5 + oracle.rounding(query)).all()
    weights = scores.softmax(-1)
    out = cache.attend(weights)
    assert out.shape == (2, 6, 5, d) and out.dtype == dtype
    expected = oracle.attend(weights)
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((out - expected).abs() <= 1e-5 + rounding * expected.abs()).all()


def test_cache_scores_are_near_the_true_ones():
    """4 bit keys: the error of the scores is that of theory, not of a lucky oracle."""
    cache = TurboQuantKVCache(128, key_bits=4, buffer_size=0)
    keys, values = random_tokens(1000, 128)
    cache.prefill(keys, values)
    query = random_tokens(100, 128, seed=1)[0]
    true = query @ keys.transpose(-1, -2) / math.sqrt(128)
    error = (cache.attention_scores(query) - true).square().mean().sqrt().item()
    assert error == pytest.approx(math.sqrt(PROD_TOTALS[128][2]), rel=0.05)


def held_tensors(cache: TurboQuantKVCache) -> list[torch.Tensor]:
    return [*(cache._packed or ()), *cache._exact]


@pytest.mark.parametrize("chunks", ([1] * 100, [40, 1, 1, 30, 28], [99, 1], [3, 97]))
@pytest.mark.parametrize("buffer_size", (0, 1, 16, 64, 200))
def test_any_chunking_holds_the_same_bytes(buffer_size, chunks, device):
    keys, values = (x.to(device) for x in random_tokens(100, 64, torch.bfloat16))

    def new_cache() -> TurboQuantKVCache:
        return TurboQuantKVCache(64, buffer_size=buffer_size, device=device)

    whole, parts = new_cache(), new_cache()
    whole.prefill(keys, values)
    for k, v in zip(keys.split(chunks, dim=2), values.split(chunks, dim=2), strict=True):
        parts.append(k, v)
    assert len(whole) == len(parts) == 100
    tensors = list(zip(held_tensors(whole), held_tensors(parts), strict=True))
    assert len(tensors) == (9 if buffer_size < 100 else 2)
    for a, b in tensors:
        assert a.dtype == b.dtype and torch.equal(a, b)
    query = random_tokens(1, 64, torch.bfloat16, seed=1)[0].to(device)
    assert torch.equal(whole.attention_scores(query), parts.attention_scores(query))


def test_the_buffer_is_exact_and_the_rest_is_not():
    cache = TurboQuantKVCache(64, buffer_size=10)
    keys, values = random_tokens(30, 64)
    cache.prefill(keys, values)
    one_hot = torch.eye(30).expand(2, 2, 30, 30)
    error = (cache.attend(one_hot) - values).abs().amax((0, 1, 3))
    assert (error[20:] == 0).all() and (error[:20] > 0.1).all()
    query = random_tokens(1, 64, seed=1)[0]
    true = query @ keys.transpose(-1, -2) / 8
    error = (cache.attention_scores(query) - true).abs().amax((0, 1, 2))
    assert (error[20:] < 1e-6).all() and (error[:20] > 1e-3).all()


def test_every_token_answers_for_itself():
    keys, values = random_tokens(40, 64)
    query = random_tokens(2, 64, seed=1)[0]
    cache = TurboQuantKVCache(64, buffer_size=8)
    cache.prefill(keys, values)
    before = cache.attention_scores(query)
    for token in (0, 31, 32, 39):
        changed = keys.clone()
        changed[:, :, token] *= -1.5
        other = TurboQuantKVCache(64, buffer_size=8)
        other.prefill(changed, values)
        moved = (other.attention_scores(query) - before).abs().amax((0, 1, 2))
        assert moved[token] > 0.1
        moved[token] = 0
        assert (moved == 0).all()


def test_scale_of_the_logits():
    cache = TurboQuantKVCache(64)
    cache.prefill(*random_tokens(100, 64))
    query = random_tokens(1, 64, seed=1)[0]
    torch.testing.assert_close(
        cache.attention_scores(query, scale=1.0), 8.0 * cache.attention_scores(query)
    )


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "group", "sketch"),
    ((3, 2, 32, "gaussian"), (4, 4, 64, "hadamard"), (2, 2, 64, "gaussian")),
)
def test_memory_bytes(key_bits, value_bits, group, sketch):
    d, tokens, buffer = 128, 300, 64
    cache = TurboQuantKVCache(d, key_bits, value_bits, buffer, group, sketch=sketch)
    constants = 4 * d + 2 ** (key_bits - 1) + 4 + 4 * (d * d if sketch == "gaussian" else d)
    assert cache.memory_bytes()["total"] == cache.memory_bytes()["constants"] == constants

    cache.prefill(*random_tokens(tokens, d, torch.float16, batch=1, heads=3))
    vectors, exact = 3 * (tokens - buffer), 3 * buffer
    expected = {
        "key_codes": vectors * d * (key_bits - 1) // 8,
        "key_scales": vectors * 2,
        "key_sign_bits": vectors * d // 8,
        "key_residual_norms": vectors * 4,
        "value_codes": vectors * d * value_bits // 8,
        "value_scales": vectors * d // group * 2,
        "value_zeros": vectors * d // group * 2,
        "buffer_keys": exact * d * 2,
        "buffer_values": exact * d * 2,
        "constants": constants,
    }
    assert cache.memory_bytes() == {**expected, "total": sum(expected.values())}
    # and no tensor is a window into a larger one
    for tensor in held_tensors(cache):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_views_are_right():
    """Keys of [batch, tokens, heads, d] models come transposed."""
    keys, values = random_tokens(80, 64)
    plain, viewed = TurboQuantKVCache(64, buffer_size=16), TurboQuantKVCache(64, buffer_size=16)
    plain.prefill(keys, values)
    viewed.prefill(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)))
    for a, b in zip(held_tensors(plain), held_tensors(viewed), strict=True):
        assert torch.equal(a, b)
    query = random_tokens(3, 64, heads=4, seed=1)[0]
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(plain.attention_scores(query), viewed.attention_scores(turned))


def test_the_key_stages_are_those_of_prod():
    keys, values = random_tokens(20, 64)
    cache = TurboQuantKVCache(64, buffer_size=0, seed=4, layer=2)
    cache.prefill(keys, values)
    alone = TurboQuantProd(64, 3, seed=4, layer=2).quantize(keys)
    for a, b in zip(QuantizedProd(*cache._packed[:4]), alone, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cache.key_quantizer.mse.signs, random_signs(64, 4, layer=2))


def test_unsupported_caches():
    for options, message in (
        ({"key_bits": 1}, "bits must be 2 to 6"),
        ({"value_bits": 3}, "value_bits must be one of"),
        ({"group_size": 16}, "group_size must be one of"),
        ({"buffer_size": -1}, "buffer_size must be 0 or more"),
        ({"sketch": "sparse"}, "sketch must be one of"),
        ({"buffer_size": 2.5}, "buffer_size is 2.5, which is no whole number"),
        ({"key_bits": 3.0}, "key_bits is 3.0, which is no whole number"),
        ({"value_bits": 2.0}, "value_bits is 2.0, which is no whole number"),
        ({"group_size": 32.0}, "group_size is 32.0, which is no whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            TurboQuantKVCache(64, **options)
    with pytest.raises(ValueError, match="multiple of group_size"):
        TurboQuantKVCache(80)
    with pytest.raises(ValueError, match="the last dimension of vectors is 352, supported"):
        TurboQuantKVCache(352)  # at once, and not when the first token leaves the buffer


def test_caches_without_queries_or_tokens():
    """A rank of a batch may have none: sizes that cannot be divided are said, not worked out."""
    cache = TurboQuantKVCache(64, buffer_size=8)
    cache.append(*random_tokens(20, 64))
    assert cache.attention_scores(torch.zeros(2, 4, 0, 64)).shape == (2, 4, 0, 20)
    assert cache.attend(torch.zeros(2, 4, 0, 20)).shape == (2, 4, 0, 64)
    for batch, tokens in ((0, 20), (2, 0)):
        cache = TurboQuantKVCache(64, buffer_size=8)
        cache.append(*(x[:batch] for x in random_tokens(tokens, 64)))
        scores = cache.attention_scores(torch.zeros(batch, 4, 3, 64))
        assert scores.shape == (batch, 4, 3, tokens)
        assert cache.attend(scores).shape == (batch, 4, 3, 64)


def test_unsupported_calls():
    cache = TurboQuantKVCache(64)
    with pytest.raises(RuntimeError, match="empty"):
        cache.attention_scores(torch.zeros(2, 2, 1, 64))
    with pytest.raises(RuntimeError, match="empty"):
        cache.attend(torch.zeros(2, 2, 1, 0))
    for shape in ((2, 2, 64), (2, 2, 5, 128)):
        with pytest.raises(ValueError, match="keys must have shape"):
            cache.append(torch.zeros(shape), torch.zeros(2, 2, 5, 64))
        with pytest.raises(ValueError, match="values must have shape"):
            cache.append(torch.zeros(2, 2, 5, 64), torch.zeros(shape))
    with pytest.raises(ValueError, match="one shape"):
        cache.append(torch.zeros(2, 2, 5, 64), torch.zeros(2, 2, 4, 64))
    with pytest.raises(TypeError, match="float64"):
        cache.append(*(x.double() for x in random_tokens(5, 64)))

    cache.append(*random_tokens(70, 64))
    with pytest.raises(RuntimeError, match="holds 70 tokens"):
        cache.prefill(*random_tokens(1, 64))
    for other in (random_tokens(1, 64, heads=3), random_tokens(1, 64, torch.float16)):
        with pytest.raises(ValueError, match="continue the cache's"):
            cache.append(*other)
    for shape in ((2, 3, 1, 64), (1, 2, 1, 64), (2, 2, 1, 32), (2, 2, 64)):
        with pytest.raises(ValueError, match="query must have shape"):
            cache.attention_scores(torch.zeros(shape))
    with pytest.raises(ValueError, match="weights must have shape"):
        cache.attend(torch.zeros(2, 2, 1, 69))
    assert len(cache) == 70


@pytest.mark.parametrize("tokens", [5, 70])
def test_what_is_refused_does_not_depend_on_the_tokens_held(tokens):
    cache = TurboQuantKVCache(64)
    with pytest.raises(ValueError, match="keys must be on the cache's device, cpu, got meta"):
        cache.append(*(x.to("meta") for x in random_tokens(tokens, 64)))
    cache.append(*random_tokens(tokens, 64))
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(TypeError, match="query has dtype"):
            cache.attention_scores(torch.ones(2, 2, 3, 64, dtype=dtype))
    query = torch.randn(2, 2, 64, 3).mT
    expected = cache.attention_scores(query.contiguous())
    torch.testing.assert_close(cache.attention_scores(query), expected)


def test_sizes_of_numpy():
    """np.uint8(200) tokens of a buffer minus 210 held ones are not 246."""
    cache = TurboQuantKVCache(np.uint8(64), buffer_size=np.uint8(200), group_size=np.uint8(32))
    cache.append(*random_tokens(100, 64))
    assert cache._packed is None


def test_gradients_are_refused():
    keys, values = random_tokens(70, 64)
    keys.requires_grad_()
    cache = TurboQuantKVCache(64)
    for tokens in (70, 10):  # some leave the buffer, or none
        with pytest.raises(RuntimeError, match="takes no gradient"):
            cache.append(keys[:, :, :tokens], values[:, :, :tokens])
    with torch.no_grad():
        cache.append(keys, values)
    assert len(cache) == 70
    exact = TurboQuantKVCache(64, buffer_size=99)  # packs nothing yet
    exact.append(keys.detach(), values)
    for held in (cache, exact):
        with pytest.raises(RuntimeError, match="takes no gradient"):
            held.attention_scores(keys[:, :, :1])
        with torch.no_grad():
            held.attention_scores(keys[:, :, :1])


def test_tokens_without_heads_are_refused():
    cache = TurboQuantKVCache(64)
    with pytest.raises(ValueError, match="at least one head"):
        cache.append(torch.zeros(2, 0, 5, 64), torch.zeros(2, 0, 5, 64))
    assert len(cache) == 0


def test_appends_that_fail_leave_nothing(monkeypatch):
    """Memory that runs out at the last copy."""
    cache = TurboQuantKVCache(64, buffer_size=16)
    cache.append(*random_tokens(16, 64))
    before = cache.attention_scores(torch.ones(2, 2, 1, 64))

    def no_memory(*args, **options):
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.Tensor, "clone", no_memory)
        cache.append(*random_tokens(16, 64))
    assert len(cache) == 16
    assert torch.equal(cache.attention_scores(torch.ones(2, 2, 1, 64)), before)


def test_tokens_in_any_order_of_memory():
    keys, values = random_tokens(70, 64)
    one, other = TurboQuantKVCache(64), TurboQuantKVCache(64)
    one.append(keys, values)
    other.append(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (keys, values)))
    query = torch.ones(2, 2, 1, 64)
    assert torch.equal(one.attention_scores(query), other.attention_scores(query))
