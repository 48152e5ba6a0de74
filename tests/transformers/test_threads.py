"""Threads that use one model: each with a cache of its own, or with none.

Nothing here is left to chance: a thread is stopped in the middle of a forward while others run.
"""

import gc
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.transformers.harness import feed, generate, make_calm_model, make_ids
from torch_turboquant.integrations.transformers import TurboQuantCache

FORMS = {"growing": {}, "static": {"static": True, "max_cache_len": 128}}


@contextmanager
def stopped(model, run):
    """A thread is inside of `run`, in front of the last layer, as long as the context lasts.

    Gives a list, in which its result stands afterwards.
    """
    inside, go_on, results = threading.Event(), threading.Event(), []

    def stop(*args):
        if threading.current_thread() is thread and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    def work():
        with torch.no_grad():
            try:
                results.append(run())
            except BaseException as error:
                results.append(error)
            finally:
                inside.set()

    thread = threading.Thread(target=work)
    hook = model.model.layers[-1].register_forward_pre_hook(stop)
    thread.start()
    assert inside.wait(60)
    try:
        yield results
    finally:
        go_on.set()
        thread.join()
        hook.remove()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", [True, False])
def test_every_thread_gets_its_own(form, prompt):
    """One with a cache is stopped in its prompt, or in a step; others begin and end meanwhile."""
    model, ids, others = make_calm_model(), make_ids(80), make_ids(75, seed=2)
    make = lambda: TurboQuantCache.for_model(model, "k4v4", **FORMS[form])  # noqa: E731
    plain, uncached = generate(model, others, new=4), model(ids).logits
    with make() as cache:
        expected = feed(model, cache, ids, 78, 1)
    with make() as cache:
        expected_others = generate(model, others, cache, new=4)

    def sizes():
        return (78, 1) if prompt else (1,)

    with make() as cache:
        if not prompt:
            feed(model, cache, ids[:, :78])
        run = lambda: feed(model, cache, ids if prompt else ids[:, 78:], *sizes())  # noqa: E731
        with stopped(model, run) as results:
            with make() as another:
                assert torch.equal(generate(model, others, another, new=4), expected_others)
            assert torch.equal(generate(model, others, new=4), plain)
            dynamic = DynamicCache(config=model.config)
            assert torch.equal(generate(model, others, dynamic, new=4), plain)
            assert torch.equal(model(ids).logits, uncached)
    assert torch.equal(results[0], expected if prompt else expected[:, 78:])


@pytest.mark.parametrize("form", FORMS)
def test_caches_come_and_go_beside_a_forward_without_one(form):
    model, ids = make_calm_model(), make_ids(80)
    uncached = model(ids).logits
    with stopped(model, lambda: model(ids).logits) as results:
        with TurboQuantCache.for_model(model, **FORMS[form]) as cache:
            feed(model, cache, ids, 70)
        assert model.config._attn_implementation == "sdpa"
    assert torch.equal(results[0], uncached)
    with TurboQuantCache.for_model(model, **FORMS[form]) as cache:
        with stopped(model, lambda: model(ids).logits) as results:
            cache.detach()
    assert torch.equal(results[0], uncached)


def test_a_cache_is_used_by_one_thread_at_a_time():
    model, ids = make_calm_model(), make_ids(80)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as cache:
        expected = feed(model, cache, ids, 79)
        cache.crop(-1)
        with stopped(model, lambda: feed(model, cache, ids[:, 79:])) as results:
            for use in (
                lambda: model(ids[:, :1], past_key_values=cache),
                cache.reset,
                cache.detach,
                lambda: cache.attach(model),
                lambda: cache.crop(-1),
                lambda: cache.reorder_cache(torch.tensor([0, 0])),
            ):
                with pytest.raises(RuntimeError, match="another thread uses this TurboQuantCache"):
                    use()
        assert torch.equal(results[0], expected[:, 79:])
        cache.crop(-1)  # and by another one afterwards
        assert torch.equal(feed(model, cache, ids[:, 79:]), expected[:, 79:])
        gone = threading.Thread(target=cache.lifecycle.exclusive.enter)  # ends inside of a forward
        gone.start()
        gone.join()
        assert feed(model, cache, ids[:, :1]).shape[1] == 1


@pytest.mark.parametrize("form", FORMS)
def test_another_thread_compiles_meanwhile(form, monkeypatch):
    model, ids = make_calm_model(), make_ids(75)
    with TurboQuantCache.for_model(model, "k4v4", **FORMS[form]) as cache:
        expected = feed(model, cache, ids, 70, *[1] * 5)
        cache.reset()
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as torch.compile sets it
        assert torch.compiler.is_compiling()
        assert torch.equal(feed(model, cache, ids, 70, *[1] * 5), expected)


def test_calibration_sees_its_own_thread_only():
    model, ids = make_calm_model(), make_ids(80)
    expected = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        logits = feed(model, cache, ids, 79)
        cache.crop(-1)
        with stopped(model, lambda: feed(model, cache, ids[:, 79:])) as results:
            centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
        assert torch.equal(results[0], logits[:, 79:])
        with stopped(model, lambda: TurboQuantCache.calibrate(model, make_ids(90, seed=5))) as more:
            feed(model, cache, ids[:, :1])
            model(ids)
    assert all(map(torch.equal, centers, expected)) and all(map(torch.equal, more[0], expected))


def test_many_caches_end_in_silence(monkeypatch):
    """Attached, forgotten and collected in several threads: nobody trips over another's end."""
    model, noise = make_calm_model(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: noise.append(found.exc_value))

    def come_and_go():
        for _ in range(25):
            cache = TurboQuantCache.for_model(model, "k4v4")
            ring = [cache]
            ring.append(ring)  # left to the collector
            del cache, ring
            gc.collect(0)

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    gc.collect()
    assert not noise
    assert model.config._attn_implementation == "sdpa" and "forward" not in vars(model.model)
