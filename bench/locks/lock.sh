#!/bin/sh
# Makes *.txt beside it from *.in, as tools/lock.sh does for ours. Apart from those: a peer has versions of its own.
set -eu
cd "$(dirname "$0")"
for name in pytorch flax flax_tpu; do
  ../../.venv/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.12 --only-binary :all: \
    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "sh bench/locks/lock.sh" \
    ${UPGRADE:+--upgrade} "$name.in" --output-file "$name.txt"
done
