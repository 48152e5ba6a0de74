"""Offloading as vLLM does it on GPUs, with plain copies: its own transfers need a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Worker(OffloadingWorker):
    """Copies pages of bytes between vLLM's tensors and a dictionary."""

    def __init__(self, kv_caches: Any) -> None:
        self.caches, self.held, self.done = kv_caches, {}, []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for page, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            self.held[int(chunk)] = [one.tensor[page].clone() for one in self.caches.tensors]
        self.done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, page in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for one, bytes_of_page in zip(self.caches.tensors, self.held[int(chunk)], strict=True):
                one.tensor[page] = bytes_of_page
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class Spec(CPUOffloadingSpec):
    """Of OffloadingConnector, by its option spec_module_path."""

    def get_worker(self, kv_caches: Any) -> Worker:
        self._worker = self._worker or Worker(kv_caches)
        return self._worker
