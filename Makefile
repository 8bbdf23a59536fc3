# The commands a person types first. `make` alone lists them. What a command needs is installed on the way.

.DEFAULT_GOAL := help
BIN := .venv/bin
# Three tests at a time, even on more processors: a test may start several processes of its own, and many wait.
WORKERS := -n 3 --no-loadscope-reorder

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: train
train: install ## train a language model on this machine: make train ARGS="--steps 200"
	@$(BIN)/fab train --job flax_mlm $(if $(ARGS),--args "$$ARGS")

.PHONY: preview
preview: install ## show what `pulumi up` would make; needs no account (CONFIG=Pulumi.dev.yaml)
	@$(BIN)/python -m rehearsal.offline_preview $(if $(CONFIG),"$(CONFIG)")

.PHONY: rehearse
rehearse: install ## the whole path in containers (KUBERNETES=1, PROVISIONING=compute)
	@$(BIN)/python -m rehearsal.rehearse $(if $(HOSTS),--hosts "$(HOSTS)") $(if $(KUBERNETES),--kubernetes) $(if $(PROVISIONING),--provisioning "$(PROVISIONING)")

.PHONY: images
images: install ## build and try the images of images/ (FRAMEWORK=jax PLATFORM=cpu)
	@$(BIN)/fab build $(if $(STACK),--stack "$(STACK)") $(if $(FRAMEWORK),--framework "$(FRAMEWORK)") $(if $(PLATFORM),--platform "$(PLATFORM)")

.PHONY: programs
programs: install ## build the programs that tests start, by Go: Pulumi, Kubernetes
	@$(BIN)/python -m tools.pulumi_cli >/dev/null && $(BIN)/python -m rehearsal.kubernetes.control_plane
# Before any test's time runs. Where they cannot be built, the tests that need them fail, and the others run.
PROGRAMS = @$(MAKE) --no-print-directory programs || echo "make: tests that need these programs will fail" >&2

.PHONY: test
test: install ## run the tests that take seconds
	@$(BIN)/pytest $(WORKERS) -m "not slow and not nightly" --durations 10 --durations-min 1

# Beside other work a machine can be slow enough for a real process to miss a test's time: what fails runs once more,
# and the summary names it, since a test that passes only then has a fault all the same.
.PHONY: test-all
test-all: install ## run the slow tests too: real runs, containers, the README's commands
	$(PROGRAMS)
	@$(BIN)/pytest $(WORKERS) -m "not nightly" --reruns 1 -r fER --durations 40 --durations-min 1

.PHONY: test-nightly
test-nightly: install ## run every test: all images and all faults too (about 90 minutes)
	$(PROGRAMS)
	@$(BIN)/pytest $(WORKERS) --durations 20 --durations-min 1

.PHONY: bench
bench: install ## compare training with transformers, in Flax and PyTorch (ARGS="--cases small")
	@$(BIN)/python -m bench.mlm $(ARGS)

# All four run whatever the others find, so that one round of mending is enough.
.PHONY: check
check: install ## check format, lint, types and the import rules
	@failed=; \
	for tool in "ruff format --check" "ruff check" mypy lint-imports; do \
	  echo "== $$tool"; $(BIN)/$$tool || failed="$$failed [$$tool]"; \
	done; \
	if [ -n "$$failed" ]; then echo "make check: not clean:$$failed" >&2; exit 1; fi

.PHONY: format
format: install ## mend format and what lint can mend by itself
	@$(BIN)/ruff check --fix-only --quiet; $(BIN)/ruff format

# Any Python from 3.8 on can start the installer; it finds or asks for the one that the project needs. The candidate is
# run, not looked for: a pyenv shim is on PATH for every version and fails for those not chosen in this folder.
INSTALL = @for python in $(BIN)/python $(PYTHON) python3 /usr/bin/python3 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then \
	    exec "$$python" -E -s -m tools.install $(if $(PYTHON),--python "$(PYTHON)") $(1); \
	  fi; \
	done; \
	echo "make: no Python on this machine; install Python 3.12 (apt-get install python3.12 python3-pip," \
	     "pyenv install 3.12, or your system's own way) and make again" >&2; exit 2

.PHONY: install
install: ## make .venv from the lock (LOCK=gpu: for NVIDIA; PYTHON=path: with that one)
	$(call INSTALL,$(if $(LOCK),--lock "$(LOCK)"))

.PHONY: lock
lock: ## renew the locks and say what moved (UPGRADE=1: the newest of all)
	$(call INSTALL,--only-uv)
	@UPGRADE="$(UPGRADE)" UV=.uv/bin/uv sh tools/lock.sh

.PHONY: clean
clean: ## remove what make made; runs stay
	rm -rf .venv .uv .install.lock build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
