#!/bin/sh
# The attention kernels under compute-sanitizer, on this machine's GPU: sh tests/sanitize_cuda.sh [memcheck racecheck ...]
# Small cases only: every access is checked. Every tensor gets memory of its own, so that reading beyond one shows.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in "${@:-memcheck}"; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 --kernel-regex kns=turboquant \
        "${PYTHON:-python3}" -P -m pytest -q -x -m cuda -p no:cacheprovider -k tiny tests/test_decode.py || exit 1
done
