#!/usr/bin/env bash
# Build the wheel and install it in a fresh virtual environment the way users do:
#   1. the core alone: objectives, audit and settings work; other commands name the extra they need;
#   2. next to a package that another trainer pins (transformers 5.5.4): pip reports no conflict;
#   3. with training: a packaged recipe trains from the wheel, with no checkout in sight.
# usage: scripts/check_install.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${1:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { echo "== $*"; }

step "build the wheel"
"$python" -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
wheel=$(ls "$work"/dist/*.whl)
"$python" -m venv "$work/venv"
pip="$work/venv/bin/pip install --quiet --disable-pip-version-check -c $root/constraints.txt"
cd "$work"  # nothing may be imported from the checkout
unset PYTHONPATH

step "1. the core alone"
$pip torch==2.13.0 "$wheel"
venv/bin/python - <<'PY'
import torch, keel
batch = keel.TokenBatch(
    logprobs=torch.tensor([-0.1, -3.0], requires_grad=True), sampler_logprobs=torch.tensor([-0.1, -0.2]),
    advantages=torch.ones(2), trainable=torch.ones(2, dtype=torch.bool), sequence=torch.zeros(2, dtype=torch.long),
)
result = keel.objective("icepop")(batch)
assert result.keep.tolist() == [True, False], result.keep
result.loss.backward()
PY
venv/bin/keel objectives icepop >/dev/null
venv/bin/keel audit icepop >/dev/null
venv/bin/keel config larger_number >/dev/null
message=$(venv/bin/keel train larger_number 2>&1) && { echo "keel train worked without its packages" >&2; exit 1; }
grep -q 'pip install "keel-rl\[train\]"' <<<"$message" || { echo "unexpected message: $message" >&2; exit 1; }

step "2. next to transformers 5.5.4"
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.5.4
venv/bin/pip check
venv/bin/keel audit icepop >/dev/null

step "3. training from the wheel"
$pip torch==2.13.0 "$wheel[train]"
venv/bin/pip check
venv/bin/keel train larger_number --model.name tiny --steps 2 --evaluation.num_tasks 4 --run run >/dev/null
test -s run/rollouts/step_000002.parquet
venv/bin/keel report run --out page.html >/dev/null
test -s page.html
echo "the wheel installs and works: core, next to another trainer, and with training"
