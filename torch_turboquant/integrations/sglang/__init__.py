"""An SGLang plug-in: an attention backend whose KV cache is packed pages.

    pip install 'torch_turboquant[sglang]'    # adds SGLang to the installed wheel
    python -m sglang.launch_server --model-path MODEL --attention-backend turboquant --page-size 64

SGLang finds `register` by the entry point group sglang.srt.plugins and calls it in every process.

    settings.py   what users write
    arguments.py  the arguments of the server, as an engine runs with them
    limits.py     what is refused at start, with the reason and the cure
    plan.py       the presets, sizes and constants of all layers of an engine
    layers.py     the attention layers of a model, and which of them read the keys of another
    hooks.py      the methods of SGLang that ask the plan, and whether they do
    pool.py       the memory of the pages, in place of SGLang's
    steps.py      what a step is about: lengths, pages, slots and entries of the tail
    prompts.py    FlashAttention for prompts, as SGLang has it
    backend.py    the attention backend: store and attend
    versions.py   which versions of SGLang are supported
    ../engine     what it shares with the plug-in for vLLM: pages, centers, settings, prompts
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend and the hooks with SGLang; may be called again."""
    import sglang
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from torch_turboquant.integrations.sglang.settings import BACKEND_NAMES
    from torch_turboquant.integrations.sglang.versions import wrong_version

    for name in BACKEND_NAMES:
        if name not in server_args.ATTENTION_BACKEND_CHOICES:
            server_args.add_attention_backend_choices([name])
        register_attention_backend(name)(_make_backend)
    if wrong_version(sglang.__version__) is None:  # else whoever chooses the backend is told
        from torch_turboquant.integrations.sglang import hooks

        hooks.register()


def _make_backend(runner: Any) -> Any:
    """The attention backend of a ModelRunner."""
    import sglang

    from torch_turboquant.integrations.sglang.versions import check_version

    check_version(sglang.__version__)
    from torch_turboquant.integrations.sglang.backend import TurboQuantBackend

    return TurboQuantBackend(runner)
