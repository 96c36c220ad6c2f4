#!/usr/bin/env bash
# Install the clients of other projects (lm-evaluation-harness, inspect-ai, langchain-openai, litellm) in a virtual
# environment of their own, on top of the packages of a Keel environment, and run them against a real `keel serve`.
# usage: scripts/check_clients.sh [python] [folder of the environment]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python} venv=${2:-}
if [ -z "$venv" ]; then
    venv=$(mktemp -d)/venv
    trap 'rm -rf "$(dirname "$venv")"' EXIT
fi
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
    # the packages of Keel's environment stay importable, and are not changed
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/keel_environment.pth"
    install=("$venv/bin/pip" install --quiet --disable-pip-version-check)
    "${install[@]}" "lm-eval[api]"
    "${install[@]}" langchain-openai litellm
    "${install[@]}" inspect-ai "openai>=3.4"  # the oldest openai that inspect-ai accepts for other servers
fi
PYTHONPATH=$PWD "$venv/bin/python" -m pytest -n 0 -rs tests/inference/server/test_clients.py
