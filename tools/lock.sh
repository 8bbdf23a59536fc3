#!/bin/sh
# Makes requirements/*.txt and images/*/requirements*.txt from the *.in beside them: exact versions with hashes, and no
# index address, so that a mirror serves as well.
# What is pinned stays pinned unless its range no longer allows it; UPGRADE=1 takes the newest of everything.
# What is made first constrains what is made after it: a package has one version in what runs together.
set -eu
cd "$(dirname "$0")/.."
uv=$(cd "$(dirname "$UV")" && pwd)/uv

before=$(mktemp)
after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT
locks() { ls requirements/*.txt images/*/requirements.txt images/*/requirements-*.txt 2>/dev/null || true; }
pins() { locks | xargs grep -HE '^[A-Za-z0-9].*==' | sed -e 's|^requirements/||' -e 's| *\\$||' || true; }

pins >"$before"
compile() { # compile IN [option …]
  in=$1
  shift
  "$uv" pip compile --quiet --generate-hashes --python-version 3.12 --only-binary :all: \
    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} "$@" "$in" --output-file "${in%.in}.txt"
}
everywhere() { # everywhere NAME [option …]: a lock for every platform
  name=$1
  shift
  compile "requirements/$name.in" --universal "$@"
}
everywhere uv
everywhere run requirements/jobs.in
everywhere jobs --constraint requirements/run.txt
everywhere dev --constraint requirements/uv.txt --constraint requirements/run.txt
everywhere gpu --constraint requirements/dev.txt
everywhere tpu --constraint requirements/run.txt
everywhere keeper --constraint requirements/dev.txt
everywhere mlflow --constraint requirements/gpu.txt
everywhere wandb --constraint requirements/gpu.txt

# An image is Debian 12 (glibc 2.36) on x86-64 with Python 3.12, and so are its locks. Which lock of requirements/ one
# agrees with, its .in says (-c). An overrides.in replaces what packages ask for; that of a TPU constrains the others.
for in in images/*/requirements.in images/*/requirements-*.in; do
  [ -e "$in" ] || continue
  folder=${in%/*}
  set -- --python-platform x86_64-manylinux_2_36
  [ ! -e "$folder/overrides.in" ] || set -- "$@" --overrides "$folder/overrides.in"
  [ "$in" = "$folder/requirements.in" ] || set -- "$@" --constraint "$folder/requirements.txt"
  compile "$in" "$@"
done
pins >"$after"

if cmp -s "$before" "$after"; then
  echo "requirements/*.txt, images/*/requirements*.txt: every pin is what it was"
else
  diff -U0 "$before" "$after" | grep '^[-+][a-z]' || true
fi
