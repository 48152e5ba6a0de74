#!/bin/sh
# The CUDA kernels under compute-sanitizer, on this machine's GPU: sh tests/sanitize_cuda.sh [memcheck|racecheck|...]
# Small cases only, because every access is checked. Every tensor has memory of its own, so that reading beyond one shows.
# synccheck and racecheck also report what is in order (docs/reliability.md), so they have to be asked for.
[ $# -gt 0 ] || set -- memcheck
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 --kernel-name kernel_substring=turboquant \
        "${PYTHON:-python3}" -P -m pytest -q -x -m cuda -p no:cacheprovider -k "tiny or any_address" \
        $(grep -rlE 'def test_(tiny|[a-z_]*any_address)|"tiny"\],$' --include='test_*.py' tests) || exit 1
done
