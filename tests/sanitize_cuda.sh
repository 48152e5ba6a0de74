#!/bin/sh
# The CUDA kernels under compute-sanitizer, on this machine's GPU: sh tests/sanitize_cuda.sh [memcheck|racecheck|...]
# Small cases only, because every access is checked. Every tensor has memory of its own, so that reading beyond one shows.
[ $# -gt 0 ] || set -- memcheck racecheck synccheck
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 --kernel-name kernel_substring=turboquant \
        "${PYTHON:-python3}" -P -m pytest -q -x -m cuda -p no:cacheprovider -k "tiny or any_address" \
        tests/test_parity.py tests/test_parity_codec.py tests/test_attention.py tests/test_split_kv.py tests/test_row_tiles.py \
        tests/test_cache.py tests/test_center.py tests/test_mass.py tests/test_move.py || exit 1
done
