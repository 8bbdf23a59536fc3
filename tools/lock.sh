#!/bin/sh
# Makes requirements/*.txt from *.in: hashes for every platform, and no index address, so that a mirror serves as well.
# What is pinned stays pinned unless its range no longer allows it; UPGRADE=1 takes the newest of everything.
# What is made first constrains what is made after it: a package has one version in this project.
set -eu
cd "$(dirname "$0")/.."
uv=$(cd "$(dirname "$UV")" && pwd)/uv

before=$(mktemp)
after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT
pins() { grep -HE '^[A-Za-z0-9].*==' requirements/*.txt | sed -e 's|^requirements/||' -e 's| *\\$||' || true; }

pins >"$before"
compile() { # compile NAME [--constraint FILE | another.in …]
  name=$1
  shift
  "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.12 --only-binary :all: \
    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} "$@" "requirements/$name.in" --output-file "requirements/$name.txt"
}
compile uv
compile run requirements/jobs.in
compile jobs --constraint requirements/run.txt
compile dev --constraint requirements/uv.txt --constraint requirements/run.txt
compile gpu --constraint requirements/dev.txt
compile tpu --constraint requirements/run.txt
pins >"$after"

if cmp -s "$before" "$after"; then
  echo "requirements/*.txt: every pin is what it was"
else
  diff -U0 "$before" "$after" | grep '^[-+][a-z]' || true
fi
