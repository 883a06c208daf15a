#!/usr/bin/env bash
# Everything that wants a GPU, in 25 minutes: kernel tests, all benchmarks with their GPU rows, eight minutes of training.
#
#     recipes/gpu.sh [out/gpu.json]
#
# Each part has its own time limit, 25 minutes in all. One that fails or runs out of time leaves its error in the JSON and
# does not stop the others. The exit code says whether all of them passed. Needs an NVIDIA GPU and the environment of
# `make .venv-dev/ready`, or another one that PYTHON names. FlexAttention's rows need a C compiler.
set -u
cd "$(dirname "$0")/.."
output="${1:-out/gpu.json}"
python="${PYTHON:-.venv-dev/bin/python}"
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT
failed=0

part() { # name, seconds, command...: its output and its exit code are kept
  local name="$1" limit="$2" begin=$SECONDS
  shift 2
  echo "== $name ($limit s at most)" >&2
  timeout --kill-after=5 "$limit" "$@" > "$parts/$name.log" 2>&1
  local code=$?
  echo "$code $((SECONDS - begin))" > "$parts/$name.code"
  if [ "$code" != 0 ]; then
    failed=1
    tail -n 20 "$parts/$name.log" >&2
  fi
}

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu.sh needs a GPU that torch can see; \`python -m mmdec info\` says what is there." >&2
  exit 2
}

part info 20 sh -c '"$0" -m mmdec info --json > "$1"' "$python" "$parts/info.json"
part tests 185 "$python" -m pytest -n 4 tests/kernels
part kernels 150 "$python" -m mmdec bench kernels --device cuda --json "$parts/kernels.json"
part speech 40 "$python" -m mmdec bench speech --device cuda --repeats 5 --json "$parts/speech.json"
part asr 75 "$python" -m mmdec bench drafters --model whisper-tiny.en --device cuda --repeats 3 --minutes 1 \
  --json "$parts/asr.json"
part vlm 50 "$python" -m mmdec bench drafters --model vlm-scenes --device cuda --per-kind 1 --minutes 0.6 \
  --repeats 2 --json "$parts/vlm.json"
part train 660 "$python" -m mmdec train drafter --model vlm-scenes --data data/samples/images --output "$parts/drafter" --minutes 8

mkdir -p "$(dirname "$output")"
"$python" - "$parts" "$output" <<'PYTHON'
import json, sys
from pathlib import Path

folder, output = map(Path, sys.argv[1:])
report = {}
for code in sorted(folder.glob("*.code")):
    name, (status, seconds) = code.stem, map(int, code.read_text().split())
    result = folder / f"{name}.json"
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    report[name] = {"exit_code": status, "seconds": seconds, "last_lines": lines[-20:]}
    try:
        report[name]["report"] = json.loads(result.read_text())
    except (OSError, ValueError):  # it has none, or was stopped while it wrote
        pass
new = output.with_suffix(".part")
new.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
new.replace(output)
print(output)
PYTHON
exit "$failed"
