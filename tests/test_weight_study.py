"""The pieces of benchmarks/bench_weights.py: references, formats of ours and of others, rows."""

import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from tests.helpers import load_script, tiny_llama
from torch_turboquant import WeightFormat, decode_weight, encode_weight, weight_encode
from torch_turboquant.weight_calibration import relative_error

language_models = load_script("benchmarks/bench_weights.py")
encoders = load_script("benchmarks/bench_weights_encoder.py")
study = language_models.study
references = sys.modules["weight_references"]
formats = sys.modules["weight_formats"]
Format = formats.Format


def weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_error(decoded, w):
    return ((decoded - w).square().sum() / w.square().sum()).item()


# ---- the reference


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_stored_steps_are_those_of_the_grid(kind):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(weights(6, 128).numpy(), kind)
    steps = references.stored_steps(data, kind)
    stored = torch.from_numpy(gguf.dequantize(data, kind))
    assert steps.shape == stored.shape and (steps > 0).all()
    for values, step in zip(stored.reshape(-1, 32), steps.reshape(-1, 32), strict=True):
        places = (values - values.min()) / step
        torch.testing.assert_close(places, places.round(), atol=2e-3, rtol=0)
        assert places.max() > 2  # a smaller step would also divide all differences
        gaps = places.sort().values.diff().round()
        assert gaps[gaps > 0].min() <= 2


def test_a_dithered_model_lies_in_the_cells_of_its_weights(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = tiny_llama()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    steps = {}
    for layer, ours in enumerate(model.model.layers):
        for stored, name in references._NAMES.items():
            weight = ours.get_submodule(name).weight
            data = gguf.quantize(weight.detach().numpy(), gguf.GGMLQuantizationType.Q4_1)
            steps[name, layer] = references.stored_steps(data, gguf.GGMLQuantizationType.Q4_1)
            values = gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_1)
            weight.data.copy_(torch.from_numpy(values))
            if stored in ("attn_q", "attn_k"):  # as llama.cpp permutes them
                data = data.reshape(-1, 2, 16, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(
                f"blk.{layer}.{stored}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1
            )
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    references.dither(model, tmp_path / "model.gguf")
    for (name, layer), step in steps.items():
        key = f"model.layers.{layer}.{name}.weight"
        moved = (model.state_dict()[key] - before[key]).abs()
        rounding = before[key].abs().max() / 128  # to bfloat16
        assert (moved <= step / 2 + rounding).all() and moved.mean() > 0.2 * step.mean()
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


# ---- formats


def there_and_back(w, form):
    """The study's own quantiser, in the basis of the weights."""
    return formats.rotate(formats.encode(formats.rotate(w, form.block), form), form.block, True)


@pytest.mark.parametrize(
    "form", [WeightFormat(), WeightFormat(sub=0), WeightFormat(bits=8)], ids=str
)
@pytest.mark.parametrize("group", [64, 128])
def test_our_format_has_the_errors_of_the_packages(form, group):
    """Where two candidates are nearly equal, each may choose another one."""
    w = weights(48, 256)
    form = WeightFormat(form.bits, form.grid, form.sub, group)
    ours = Format(form.bits, form.grid, group, form.sub or None, block=group)
    ours = replace(ours, search=4 if form.sub else 8)
    decoded = decode_weight(encode_weight(w, form), form, 48), there_and_back(w, ours)
    errors = [(x - w).unflatten(1, (-1, group)).square().sum(-1) for x in decoded]
    torch.testing.assert_close(errors[0], errors[1], rtol=0.1, atol=0)
    assert errors[1].sum() == pytest.approx(errors[0].sum().item(), rel=2e-3)
    assert ours.size(256) == form.bits_per_weight(256)


@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
def test_our_format_is_the_packages_if_there_is_nothing_to_choose(grid):
    w, form = weights(48, 256), WeightFormat(grid=grid, sub=0, group=128)
    signs, levels = form.signs(128), form.levels(128)
    step = form.codebook(128).steps_tensor(1)
    packed = weight_encode(w, signs, levels, step, 4, 0)
    decoded = decode_weight(packed, form, 48)
    found = there_and_back(w, Format(grid=grid, search=1))
    # codes differ where a weight lies within 2^-9 of a boundary between two levels
    differ = (formats.rotate(found - decoded, 128).abs() > 0.02).float().mean()
    assert differ < 0.01
    assert (found - decoded).square().sum() < 0.05 * (decoded - w).square().sum()


def test_candidate_steps_are_the_packages():
    steps = [formats.grid_of(4, "lloyd", 128).step * ratio for ratio in formats.SUB_STEPS]
    package = WeightFormat(group=128).steps(128) * (12 + 7.5) / 16
    torch.testing.assert_close(package, torch.tensor(steps))


def test_channels_that_fill_no_group_have_smaller_ones():
    assert list(formats.runs(576, 128)) == [(0, 512, 128), (512, 576, 64)]
    assert list(formats.runs(960, 256)) == [(0, 768, 256), (768, 896, 128), (896, 960, 64)]
    assert formats.bounds(320, 128) == [(0, 128), (128, 256), (256, 320)]
    assert Format(sub=32).size(576) == pytest.approx(4 + 4 / 32 + 16 * 5 / 576)
    assert Format(bits=3, sub=16).size(1536) == pytest.approx(3 + 4 / 16 + 16 / 128)


@pytest.mark.parametrize("block", [None, 64, 128, 0])
def test_transforms_are_orthogonal(block):
    x, w = weights(2, 10, 192), weights(2, 5, 192, seed=1)
    rx, rw = (formats.rotate(t, block) for t in (x, w))
    torch.testing.assert_close(rx @ rw.mT, x @ w.mT, atol=1e-4, rtol=0)
    torch.testing.assert_close(formats.rotate(rw, block, inverse=True), w, atol=1e-5, rtol=0)
    moment = formats.rotate_moments(x.mT @ x, block)
    torch.testing.assert_close(moment, rx.mT @ rx, atol=1e-3, rtol=0)


def test_transforms_with_other_signs():
    """They turn weights and moments alike, back again, and differ from each other."""
    x, w = weights(50, 192), weights(5, 192, seed=1)
    turned = [formats.rotate(w, 128, seed=seed) for seed in (0, 1)]
    assert (turned[0] - turned[1]).abs().max() > 0.5
    torch.testing.assert_close(formats.rotate(turned[1], 128, True, 1), w, atol=1e-5, rtol=0)
    rx = formats.rotate(x, 128, seed=1)
    moment = formats.rotate_moments(x.mT @ x, 128, 1)
    torch.testing.assert_close(moment, rx.mT @ rx, atol=1e-3, rtol=0)
    rows = [study.ours(Format(sub=32, search=4, seed=seed)) for seed in (0, 1)]
    assert [row.name for row in rows] == [study.DEFAULT.name, f"{study.DEFAULT.name}, signs 1"]
    linear = study.Linear("q_proj", w[None], (x.mT @ x)[None] / 50, w[None])
    errors = [squared_error(row.decoded(linear)[0], w) for row in rows]
    assert errors[0] != errors[1] == pytest.approx(errors[0], rel=0.2)


def test_errors_of_gaussian_weights():
    """Known values: those of Lloyd-Max, NF4 and int4, and the order of our formats."""
    w = weights(200, 512)
    found = {}
    for name, form in {
        "one step": Format(search=1),
        "plain": Format(),
        "sub 32": Format(sub=32, search=4),
        "sub 16": Format(sub=16, search=4),
        "three": Format(bits=3),
    }.items():
        found[name] = squared_error(formats.encode(w, form), w)
    assert found["one step"] == pytest.approx(0.00917, rel=0.03)
    assert found["plain"] == pytest.approx(0.0079, rel=0.03)
    assert found["sub 32"] == pytest.approx(0.0059, rel=0.03)
    assert found["sub 16"] == pytest.approx(0.0048, rel=0.03)
    assert found["three"] == pytest.approx(0.0317, rel=0.03)
    assert squared_error(formats.nf4(w), w) == pytest.approx(0.00846, rel=0.03)
    assert squared_error(formats.rtn(w), w) == pytest.approx(0.0101, rel=0.04)
    assert squared_error(formats.hqq(w), w) < 0.95 * squared_error(formats.rtn(w, group=64), w)
    assert squared_error(formats.q6_k(w), w) < 0.0005
    assert squared_error(formats.q4_k(w), w) < 0.006


def test_levels_of_normal_floats():
    """NF4 as published; at three bits zero and both ends are levels, too."""
    published = "-1 -0.6961928 -0.5250731 -0.3949175 -0.2844414 -0.1847734 -0.0910500 0 "
    published += "0.0795803 0.1609302 0.2461123 0.3379152 0.4407098 0.5626170 0.7229568 1"
    expected = torch.tensor([float(x) for x in published.split()])
    torch.testing.assert_close(formats.normal_levels(4), expected, atol=1e-6, rtol=0)
    three = formats.normal_levels(3)
    assert three[[0, 3, 7]].tolist() == [-1, 0, 1] and (three.diff() > 0).all()


def test_controls_of_three_bits_have_four_times_the_error():
    w, moment = weights(1, 64, 512), torch.eye(512)[None]
    for format3, format4 in [
        (formats.rtn(w, 3), formats.rtn(w)),
        (formats.gptq(w, moment, 3), formats.gptq(w, moment)),
        (formats.nf4(w, 3), formats.nf4(w)),
        (formats.q3_k(w), formats.q4_k(w)),
    ]:
        assert 3 < squared_error(format3, w) / squared_error(format4, w) < 6
    assert squared_error(formats.q3_k(w), w) < squared_error(formats.rtn(w, 3), w)
    assert squared_error(formats.higgs(w, 3), w) == pytest.approx(0.030, rel=0.05)


def test_four_bit_blocks_with_a_minimum_reproduce_a_grid_of_their_own():
    """Why references are dithered: a Q4_1 grid costs Q4_K nearly nothing."""
    steps, low = 0.02 + weights(64, 8, 1).abs(), weights(64, 8, 1, seed=1)
    codes = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(2))
    codes[..., 0], codes[..., 1] = 0, 15
    w = (low - steps * 15 + steps * codes).flatten(1)
    assert squared_error(formats.q4_k(w), w) < 0.002
    assert (
        squared_error(formats.encode(formats.rotate(w, 128), Format()), formats.rotate(w, 128))
        > 0.006
    )


def test_points_of_a_plane_beat_levels_of_a_line():
    formats.plane_points.cache_clear()
    points = formats.plane_points(64, torch.device("cpu"))
    samples = weights(20_000, 2, seed=5)
    error = torch.cdist(samples, points).amin(1).square().mean() / 2
    assert error == pytest.approx(0.0313, rel=0.05)  # 3 bits; one dimension: 0.0345


def test_rounding_with_moments_lowers_errors_of_outputs():
    mixing = weights(256, 256) / 16 + torch.eye(256)
    x = weights(2, 1000, 256, seed=1) @ mixing
    w, moment = weights(2, 24, 256, seed=2), x.mT @ x / 1000
    pairs = [
        (formats.rtn(w), formats.gptq(w, moment)),
        (formats.encode(w, Format()), formats.encode_rounded(w, moment, Format())),
        (
            formats.encode(w, Format(3, sub=16)),
            formats.encode_rounded(w, moment, Format(3, sub=16)),
        ),
    ]
    for plain, rounded in pairs:
        errors = [relative_error(w, decoded, moment) for decoded in (plain, rounded)]
        assert (errors[1] < 0.8 * errors[0]).all()


def test_importance_lowers_the_errors_of_important_channels():
    w, energy = weights(1, 64, 256), torch.ones(1, 256)
    energy[:, ::4] = 100
    plain, weighted = formats.q4_k(w), formats.q4_k(w, energy)
    assert squared_error(weighted[..., ::4], w[..., ::4]) < squared_error(
        plain[..., ::4], w[..., ::4]
    )


def test_the_mixture_of_q4_k_m():
    six = [i for i in range(16) if formats.q4_k_m_has_six_bits("down_proj", i, 16)]
    assert six == [0, 1, 4, 7, 10, 13, 14, 15]
    assert not any(formats.q4_k_m_has_six_bits("up_proj", i, 16) for i in range(16))


def test_activations_keep_seven_bits_of_their_largest():
    x = weights(3, 5, 192)
    inverse = torch.linspace(0.5, 2, 192)
    for block in (None, 128):
        y = study.quantise_activations(x, block, 128, inverse)
        assert 1e-7 < squared_error(y, x) < 1e-4


# ---- rows


@pytest.fixture(scope="module")
def small():
    network = tiny_llama(hidden_size=128, intermediate_size=192, vocab_size=99)
    network.requires_grad_(False)
    with torch.no_grad():  # random heads predict nothing; larger ones say more
        network.lm_head.weight.mul_(20)
    ids = torch.randint(0, 99, (4, 130), generator=torch.Generator().manual_seed(3))
    return study.Model.of(network, ids[:2], ids[2:])


def test_every_row_has_a_name_of_its_own():
    names = [row.name for row in study.all_rows()]
    assert len(names) == len(set(names)) > 50
    assert names[0] == study.DEFAULT.name


def test_second_moments_are_those_of_the_inputs(small):
    seen = []
    module = small.network.model.layers[1].mlp.down_proj
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
    study.hidden_states(small.network, small.ids)
    handle.remove()
    x = torch.cat(seen)
    torch.testing.assert_close(small.seen["down"][1], x.T @ x / len(x), atol=1e-6, rtol=1e-4)


def test_a_forward_can_begin_at_any_layer(small):
    """Of a network that is unchanged before it."""
    network = small.network
    prefix = study.Prefix(network, small.ids)
    assert torch.equal(prefix.hidden_states(0), small.hidden)
    weight = network.model.layers[1].self_attn.q_proj.weight
    own = weight.data.clone()
    weight.data.mul_(2)
    changed = study.hidden_states(network, small.ids)
    assert torch.equal(prefix.hidden_states(1), changed)
    assert not torch.equal(changed, small.hidden)
    weight.data.copy_(own)


def test_rows_and_predictions(small):
    names = [
        "4 bit, block 128",
        "3 bit, block 128",
        "8 bit, block 128",
        "4 bit, block 128, A8",
        "4 bit, block 128, sub 32, scales text, rounding",
        "Q4_K_M-like",
        "int4 GPTQ g128",
    ]
    rows = {row.name: row for row in study.all_rows()}
    before = {k: v.clone() for k, v in small.network.state_dict().items()}
    run = study.Bench(small, {"tokens": 130})
    run.measure(study.DEFAULT)
    found = {name: run.measure(rows[name]) for name in names}
    run.predict(200)
    assert all(torch.equal(v, before[k]) for k, v in small.network.state_dict().items())
    plain, three, eight = (found[f"{bits} bit, block 128"] for bits in (4, 3, 8))
    assert 0 < eight["kl"] < 0.1 * plain["kl"] < 0.1 * three["kl"]
    assert plain["predicted_kl"] == pytest.approx(plain["kl"], rel=0.5)
    assert 3 < three["predicted_kl"] / plain["predicted_kl"] < 5
    assert found["Q4_K_M-like"]["bits_per_weight"] > 4.6
    assert found["4 bit, block 128, A8"]["kl"] != plain["kl"]
    assert {row["needs_text"] for row in found.values()} == {False, True}
    assert abs(run.rows[0]["kl_above_default"]) == 0
    assert all(row["tokens"] == 130 for row in run.rows)


def test_mixed_formats_keep_their_budget(small):
    run = study.Bench(small)
    run.predict(200)
    options = [study.PLAIN, study.ours(Format(bits=8, grid="uniform"))]
    for row in options:
        run.measure(row)
    row = run.measure(study.mixed(run, options, 6.0, "mixed"))
    assert 5 < row["bits_per_weight"] <= 6
    assert run.rows[1]["kl"] < row["kl"] < run.rows[0]["kl"]
    assert sum(row["counts"].values()) == 2 * len(study.KINDS)


def test_segments_are_the_beginnings_of_long_articles():
    class Words:
        def __call__(self, text, truncation, max_length):
            return {"input_ids": [len(word) for word in text.split()][:max_length]}

    articles = ["a bb", "ccc dddd e f", "gg", "h ii jjj kk"]
    assert language_models.segments(Words(), articles, 2, 3).tolist() == [[3, 4, 1], [1, 2, 3]]
    with pytest.raises(SystemExit, match="has 2 articles of 3 tokens, 3 are needed"):
        language_models.segments(Words(), articles, 3, 3)


# ---- an encoder


class Letters:
    """A tokenizer: a token per letter, 1 before and 2 behind a text."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [3 + ord(letter) - ord("a") for letter in text]
        return Namespace(input_ids=[1, *ids, 2] if add_special_tokens else ids)


def test_passages_are_the_beginnings_of_long_articles():
    articles = ["abcdefghi", "abc", "hgfedcba", "aaaaaaaaaaaa", "b"]
    ids, rest = encoders.passages(Letters(), articles, 2, 2, 6)
    assert ids.tolist() == [
        [1, 3, 4, 5, 6, 2],
        [1, 7, 8, 9, 10, 2],
        [1, 10, 9, 8, 7, 2],
        [1, 6, 5, 4, 3, 2],
    ]
    assert rest == ["aaaaaaaaaaaa", "b"]
    with pytest.raises(SystemExit, match="has 1 articles of 12 tokens, 2 are needed"):
        encoders.passages(Letters(), articles, 2, 3, 6)


@pytest.fixture(scope="module")
def encoder():
    """With random weights, 24 passages that come in pairs, and a text."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    config = transformers.BertConfig(vocab_size=99, num_attention_heads=4, **shape)
    network = transformers.BertModel(config).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 99, (12, 1, 40), generator=draw).repeat(1, 2, 1)
    ids[:, 1, :8] = torch.randint(0, 99, (12, 8), generator=draw)
    text = torch.randint(0, 99, (16, 40), generator=draw)
    return encoders.Encoder(study.Model.of(network, ids.flatten(0, 1), text), {}, 2)


def test_an_encoder_is_like_itself(encoder):
    seen = encoder.compare(encoder.model)
    assert seen["distance"].abs().max() < 1e-6
    assert seen["neighbours"].min() == seen["nearest"].min() == seen["article"].min() == 1


def test_what_an_encoder_loses(encoder):
    """Measured against what its text says, with passages in another order than their own."""
    hidden = encoder.model.hidden.clone()
    hidden[0] = hidden[5]  # passage 0 becomes passage 5, of another article
    seen = encoder.compare(encoder.model, hidden)
    own = encoders.embeddings(encoder.model.hidden)
    assert seen["distance"][0] == pytest.approx(1 - (own[0] @ own[5]).item(), abs=1e-5)
    assert seen["distance"][1:].abs().max() < 1e-6
    # 0 and 5 are now each other's nearest, 1 has lost its own, and 4 has two that are as near
    assert seen["nearest"][[0, 1, 5]].tolist() == [0, 0, 0]
    assert seen["nearest"][[2, 3, *range(6, 24)]].min() == 1
    assert seen["article"][[0, 1]].tolist() == [0, 0]
    assert 0 < seen["neighbours"][0] < 1


def test_rows_of_an_encoder(encoder):
    names = ["4 bit, block 128", "3 bit, block 128", "8 bit, block 128", "int4 GPTQ g128"]
    names += ["4 bit, block 128, sub 32, scales text, rounding", "4 bit, block 128, A8"]
    rows = {row.name: row for row in study.all_rows()}
    encoder.measure(study.DEFAULT)
    found = {name: encoder.measure(rows[name]) for name in names}
    plain, three, eight = (found[f"{bits} bit, block 128"] for bits in (4, 3, 8))
    assert 0 < eight["distance"] < 0.1 * plain["distance"] < 0.1 * three["distance"]
    assert found[names[4]]["distance"] < 0.8 * plain["distance"]
    assert eight["neighbours"] >= three["neighbours"] < 1
    encoder.predict(400)
    assert plain["predicted_distance"] == pytest.approx(plain["distance"], rel=0.5)
    torch.testing.assert_close(
        study.hidden_states(encoder.model.network, encoder.model.ids), encoder.model.hidden
    )
