"""Models for pictures and sounds: the text that they write is that of transformers' own cache."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.helpers import ROOT
from tests.transformers.families import VERSION
from tests.transformers.harness import generate
from tests.transformers.multimodal import (
    FIRST,
    ITEM,
    MULTIMODAL,
    make_multimodal,
    text_ids,
    with_item,
)
from torch_turboquant.integrations.transformers import TurboQuantCache

FORMS = [{}, {"static": True, "max_cache_len": 160}]
WITH_MASKS = ["gemma3", "gemma4"]  # whose decoder gets masks that the model around it has made


def packed(model, **options):
    return TurboQuantCache.for_model(model, "k8v8", page_size=16, recent_window=4, **options)


def dynamic(model):
    return DynamicCache(config=model.config.get_text_config())


def answer(*args, **options):
    return generate(*args, return_dict_in_generate=True, output_logits=True, **options)


def assert_same_tokens(actual, expected, prompt):
    """Tokens are equal, as far as a choice does not hang on the last bit of 8-bit keys.

    Logits have a standard deviation of 0.4 to 0.9 and are 0.11 off at most, with 4 bits 0.5 or
    more. Versions of transformers draw other random weights.
    """
    differ = (actual.sequences != expected.sequences).any(0).nonzero().flatten().tolist()
    same = differ[0] - prompt if differ else len(expected.logits)
    for ours, theirs in list(zip(actual.logits, expected.logits, strict=True))[: same + 1]:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.12)
    if differ:
        best = expected.logits[same].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() < 0.2


@pytest.mark.parametrize("family", MULTIMODAL)
def test_tokens_are_those_of_transformers(family):
    """After a text in the growing form, after a picture or sound in the static one."""
    model, ids = make_multimodal(family), text_ids(90)
    tried = [({}, ids, {})]
    if MULTIMODAL[family][2]:
        tried.append((FORMS[1], *with_item(family, ids)))
    for form, prompt, inputs in tried:
        expected = answer(model, prompt, dynamic(model), **inputs)
        with packed(model, **form) as cache:
            assert_same_tokens(answer(model, prompt, cache, **inputs), expected, 90)
            assert cache.memory_bytes()["pages"] > 0


def test_a_picture_matters():
    """Or the test above would compare texts."""
    for family in ("qwen2_vl", "llava", "gemma3", "voxtral"):
        model, (ids, inputs) = make_multimodal(family), with_item(family, text_ids(90))
        name = "input_features" if "input_features" in inputs else "pixel_values"
        other = {**inputs, name: 3 - inputs[name]}
        seen, unseen = (model(ids, **x).logits[0, -1] for x in (inputs, other))
        assert (seen - unseen).abs().max() > 1e-3, family


def test_the_documented_models():
    text = (ROOT / "docs/transformers.md").read_text()
    section = re.search(r"^## Pictures and sounds\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.M)[1]
    (listed,) = [part for part in section.split("\n\n") if part.startswith("`")]
    assert set(re.findall(r"`([\w-]+)`", listed)) == set(MULTIMODAL)


# ---- decoders that get masks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", WITH_MASKS)
def test_padded_batches(family, form):
    model, ids = make_multimodal(family), text_ids(90, 3)
    mask = torch.ones(3, 90).long()
    mask[1, :17], mask[2, :60] = 0, 0
    ids[mask == 0] = 0
    expected = answer(model, ids, dynamic(model), attention_mask=mask)
    with packed(model, max_batch_size=3, **form) as cache:
        assert_same_tokens(answer(model, ids, cache, attention_mask=mask), expected, 90)
        assert cache.sequences.pads == [0, 17, 60]
        right = mask.flip(1)
        cache.reset()
        with pytest.raises(ValueError, match="only left padding"):
            model(ids, attention_mask=right, past_key_values=cache)


has_turns = pytest.mark.skipif(
    VERSION == (5, 16),
    reason="5.16 makes a mask of another size in the second turn, with any cache",
)


@has_turns
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", WITH_MASKS)
@pytest.mark.parametrize("batch", [1, 2])
def test_turns_of_a_chat(family, form, batch):
    """Processors give types of tokens in every turn, from which masks for pictures are made."""
    model = make_multimodal(family)
    name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    with packed(model, max_batch_size=2, **form) as cache:
        plain, text = dynamic(model), text_ids(70, batch)
        for turn in range(4):
            text = torch.cat([text, text_ids(10, batch, seed=turn + 5)], 1)
            types = {name: torch.zeros_like(text)}
            expected = answer(model, text, plain, 1, **types)
            assert_same_tokens(answer(model, text, cache, 1, **types), expected, text.shape[1])
            text = expected.sequences


@has_turns
@pytest.mark.parametrize("form", FORMS)
def test_a_picture_in_the_first_turn_only(form):
    """Its tokens attend in both directions, which only the model's own attention can."""
    model, (ids, inputs) = make_multimodal("gemma3"), with_item("gemma3", text_ids(90))
    plain, cache = dynamic(model), packed(model, **form)
    expected = answer(model, ids, plain, 1, **inputs)
    assert_same_tokens(answer(model, ids, cache, 1, **inputs), expected, 90)
    text = torch.cat([expected.sequences, text_ids(20, seed=4)], 1)
    types = {"token_type_ids": (text == ITEM).long()}
    expected = answer(model, text, plain, 1, **types)
    assert_same_tokens(answer(model, text, cache, 1, **types), expected, text.shape[1])
    text = expected.sequences
    past = cache.get_seq_length()
    later = torch.cat([text, text_ids(20, seed=5)], 1)
    later[:, -10:-6] = ITEM
    types = (later == ITEM).long()
    more = {"token_type_ids": types, "pixel_values": inputs["pixel_values"]}
    if VERSION > (5, 20):
        with pytest.raises(ValueError, match="first forward only"):
            generate(model, later, cache, 5, **more)
        assert cache.get_seq_length() == past
    else:  # these give it a causal mask
        expected = answer(model, later, plain, 1, **more)
        assert_same_tokens(answer(model, later, cache, 1, **more), expected, later.shape[1])
    cache.detach()


@pytest.mark.parametrize("family", WITH_MASKS)
def test_the_model_without_its_head(family):
    """The module that makes masks, given to for_model or called by hand."""
    model, ids = make_multimodal(family), text_ids(90)
    expected = model.model(ids).last_hidden_state[:, -1]
    for owner in (model, model.model):
        with packed(owner) as cache:
            model.model(ids[:, :85], past_key_values=cache)
            for i in range(85, 90):
                out = model.model(ids[:, i : i + 1], past_key_values=cache)
            torch.testing.assert_close(out.last_hidden_state[:, -1], expected, rtol=0, atol=0.06)
            text = model.model.language_model(ids[:, :1], past_key_values=cache)
            assert text.past_key_values.get_seq_length() == 91
        assert not any("forward" in vars(module) for module in model.modules())


def test_a_failure_before_the_decoder():
    """Of a picture that does not fit: the forward had begun, and is forgotten."""
    model, (ids, inputs) = make_multimodal("gemma3"), with_item("gemma3", text_ids(90))
    with packed(model) as cache:
        wrong = {**inputs, "pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)}
        with pytest.raises(Exception, match="do not match"):
            model(ids, past_key_values=cache, **wrong)
        assert cache.get_seq_length() == 0
        expected = answer(model, ids, dynamic(model), **inputs)
        assert_same_tokens(answer(model, ids, cache, **inputs), expected, 90)


def test_their_steps_compile():
    model, ids = make_multimodal("gemma3"), text_ids(100)
    with packed(model, static=True, max_cache_len=128) as cache:
        expected = [model(ids[:, :90], past_key_values=cache).logits[:, -1:]]
        expected += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(90, 92)]
        cache.reset()
        model(ids[:, :90], past_key_values=cache)
        step = torch.compile(model, fullgraph=True, backend="eager")
        for i in range(90, 92):
            logits = step(ids[:, i : i + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected[1 + i - 90], rtol=0, atol=1e-4)


def test_a_picture_is_where_tests_expect_it():
    ids, _ = with_item("llava", text_ids(90))
    assert (ids[0] == ITEM).nonzero().flatten().tolist() == list(range(FIRST, FIRST + 4))
