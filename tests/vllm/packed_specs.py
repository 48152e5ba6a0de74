"""A plug-in for pytest that runs vLLM's own tests over packed pages.

Every FullAttentionSpec and SlidingWindowSpec that a test makes becomes one of packed pages, as
`adapter.packed_spec` makes them since 0.28. In a folder that holds `tests` of vLLM's source,
without its conftest.py, which wants a GPU:

    PYTHONPATH=.:CHECKOUT pytest -p tests_of.packed_specs tests/v1/core/test_prefix_caching.py

where `tests_of` is any package that this file was copied to, because both projects have a package
named tests. Tests that name a model of the hub, such as facebook/opt-125m, find a folder of that
name with a config.json.
"""

import torch
from vllm.v1 import kv_cache_interface

BYTES_PER_TOKEN = 156  # of k5v4u at head_dim 128, with exact first tokens

made = 0


def pack(spec: type) -> None:
    old = spec.__post_init__

    def post_init(self):
        global made
        if type(self) is spec and self.state_content_bytes is None:
            object.__setattr__(self, "dtype", torch.uint8)
            object.__setattr__(self, "state_content_bytes", BYTES_PER_TOKEN)
            made += 1
        old(self)

    spec.__post_init__ = post_init


pack(kv_cache_interface.FullAttentionSpec)
pack(kv_cache_interface.SlidingWindowSpec)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{made} specs of packed pages were made")
