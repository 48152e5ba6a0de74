"""A vLLM plug-in: an attention backend whose KV cache is packed pages.

    pip install 'torch_turboquant[vllm]'      # adds vLLM to the installed wheel
    vllm serve MODEL --attention-backend CUSTOM \\
        --additional-config '{"turboquant": {"preset": "k5v4u"}}'

vLLM finds `register` by the entry point group vllm.general_plugins and calls it in every process.

    settings.py   what users write
    adapter.py    everything that differs between versions of vLLM
    choice.py     which backend a model gets: its attention may be latent (MLA)
    limits.py     what is refused at start, with the reason and the cure
    connectors.py which KV connectors may move pages
    plan.py       the presets and constants of all layers of an engine
    sizes.py      the bytes of layers whose pages come from one pool
    backend.py    the attention backend: metadata of a step, store and attend
    latent.py     the backend of models with latent attention
    prompts.py    FlashAttention for prompts, as vLLM has it
    cpu.py        which backend vLLM gets on a CPU
    ../engine     what it shares with the plug-in for SGLang: pages, centers, settings, prompts
    learning.py   centers from the first prompt, where there is no file
    calibrator.py centers for a file, gathered by vLLM's workers
    versions.py   which versions of vLLM are supported
"""


def register() -> None:
    """Registers the backend with vLLM; may be called again.

    A version of vLLM that the plug-in does not know runs as without it: only whoever chooses the
    backend is told.
    """
    import vllm

    from torch_turboquant.integrations.vllm import choice
    from torch_turboquant.integrations.vllm.versions import wrong_version

    choice.register_names()
    if wrong_version(vllm.__version__) is None:
        from torch_turboquant.integrations.vllm import adapter

        adapter.register()
