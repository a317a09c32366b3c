# Two commands on a fresh machine: `make demo` and `make test`. Each makes the environment from the locks if it is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := $(VENV)/uv/bin/uv
LOCKED := --no-deps --require-hashes --requirement
LLAMA_CPP := $(VENV)/llama.cpp

.PHONY: help environment demo test test-long test-all check format docs lock clean package latest

help:
	@echo "make environment  install everything into $(VENV), as the other targets do if it is missing"
	@echo "make demo    zero-shot, fine-tuning and prediction on a generated data set (about two minutes)"
	@echo "make test    all tests but the long ones (about 15 minutes on two cores)"
	@echo "make test-long   the others, and more examples of properties"
	@echo "make test-all    both"
	@echo "make check   format, lint, types, import contracts"
	@echo "make format  format and mend what can be mended"
	@echo "make docs    write the generated pages again, and build the documentation site into site/"
	@echo "make package build the distributions, and use the wheel in a separate environment"
	@echo "make latest  put the newest transformers, peft, accelerate and datasets into the environment, for the next tests"
	@echo "make lock    resolve pyproject.toml again into requirements.lock and requirements-dev.lock"

# uv installs packages in a seventh of the time that pip takes. It ignores the configuration of pip, so pip is tried if uv
# fails. Modules are compiled when they are first imported, because compiling all of them takes longer.
$(READY): requirements-torch.txt requirements-dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "partita needs Python 3.11 or newer; make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements-torch.txt
	{ $(MAKE) $(UV) && $(UV) pip install --quiet --python $(BIN)/python $(LOCKED) requirements-dev.lock; } \
		|| $(BIN)/python -m pip install --quiet --no-compile $(LOCKED) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

$(UV):
	$(PYTHON) -m venv $(VENV)/uv
	$(VENV)/uv/bin/python -m pip install --quiet uv==0.13.9

# The converter of llama.cpp. Without it, the tests of GGUF files are skipped.
$(LLAMA_CPP): requirements-llama-cpp.txt $(READY)
	rm -rf $@ $@.download
	mkdir -p $@
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --require-hashes \
		--requirement requirements-llama-cpp.txt --dest $@.download \
	&& tar -xzf $@.download/*.tar.gz -C $@ --strip-components=3 --wildcards '*/vendor/llama.cpp/*.py' \
	|| echo "llama.cpp was not downloaded"
	rm -rf $@.download

environment: $(READY)

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python examples/table_booking/demo.py

# Compiled files are kept, also where the environment forbids it: each of the many processes would compile all modules.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -n 2 -m "not long"

test-long: $(READY) $(LLAMA_CPP)
	PARTITA_LLAMA_CPP=$(abspath $(LLAMA_CPP)) $(PYTEST) -n 2 -m "long or property" --hypothesis-profile=full

test-all: test test-long

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/partita schema > docs/partita.schema.json
	$(BIN)/partita schema --markdown > docs/config-reference.md
	$(BIN)/partita convert --keys > docs/converted-keys.md
	$(BIN)/python benchmarks/page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(READY)
	VENV=$(VENV) UV=$(UV) .ci/package

latest: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --constraint requirements-torch.txt transformers peft accelerate datasets

# Pins that still fit are kept; remove a line, or a file, to take newer versions.
COMPILE = $(UV) pip compile pyproject.toml --quiet --generate-hashes --universal --python-version 3.11 \
	--no-emit-package torch --constraint requirements-torch.txt --custom-compile-command "make lock"

lock: $(UV)
	$(COMPILE) --extra chat --extra serve --output-file requirements.lock
	$(COMPILE) --extra dev --constraint requirements.lock --output-file requirements-dev.lock

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
