"""Bindings to model libraries. Nothing here is imported by `import torch_turboquant`.

transformers: TurboQuantCache, a packed KV cache for Hugging Face transformers (extra
`torch_turboquant[transformers]`).

vllm: a plug-in for vLLM, whose KV cache is then packed pages (extra `torch_turboquant[vllm]`).

sglang: a plug-in for SGLang, whose KV cache is then packed pages (extra
`torch_turboquant[sglang]`).

engine: what both plug-ins share.
"""
