#!/usr/bin/env bash
# Run the tests that call the native kernels with the kernels built under AddressSanitizer and UndefinedBehaviorSanitizer.
# usage: scripts/sanitize.sh [python]
# Fails if the kernels cannot be built, or if a deliberate out-of-bounds read is not reported: the check must not pass
# because the sanitizers are not active.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}

# The sanitizer runtimes must be loaded before everything else, since python itself is not built with them.
preload=""
for runtime in libasan.so libubsan.so; do
  path=$(gcc -print-file-name="$runtime")
  [ -e "$path" ] || { echo "gcc has no $runtime: install the sanitizer libraries of gcc (Debian: libgcc-VERSION-dev)" >&2; exit 1; }
  preload+="${preload:+:}$(realpath "$path")"
done
export KEEL_NATIVE_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

run() { LD_PRELOAD=$preload "$python" "$@"; }

echo "native kernels: $KEEL_NATIVE_CFLAGS"
run -c 'from keel.inference.kernels.build import unavailable_reason; raise SystemExit(unavailable_reason() or 0)'

# pack_matrix() is told that its input has 64 rows, and given 8: it reads past the end of the tensor
report=$(run - 2>&1 <<'PYTHON' || true
from ctypes import c_int64, c_void_p

import torch

from keel.inference.kernels.build import require_library

matrix, panels = torch.ones(8, 24), torch.empty(64 * 24)
require_library().pack_matrix(c_void_p(matrix.data_ptr()), *map(c_int64, (64, 24, 24, 1)), c_void_p(panels.data_ptr()))
PYTHON
)
grep -q "AddressSanitizer: heap-buffer-overflow" <<<"$report" \
  || { echo "a deliberate out-of-bounds read was not reported:"; echo "$report"; exit 1; } >&2
echo "a deliberate out-of-bounds read is reported"

# --capture=sys leaves file descriptor 2 alone, so that the report of a failure is shown
run -m pytest -q -n 0 --capture=sys -p no:cacheprovider tests/inference/kernels tests/inference/local/test_llama_forward.py
