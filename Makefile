# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHROMIUM := /usr/bin/chromium-headless-shell
NGINX := /usr/sbin/nginx
GET_BOTH := apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core nginx-light openssl
PROMETHEUS := /usr/bin/prometheus
NODE_EXPORTER := /usr/bin/prometheus-node-exporter
ALERTMANAGER := /usr/bin/prometheus-alertmanager
GET_PROMETHEUS := apt-get install -y --no-install-recommends prometheus prometheus-alertmanager prometheus-node-exporter

# Byte code is kept, whatever the environment says: the tests start Python some hundred times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-live test suite test-all suite-all test-nightly durations check docs bench fuzz wheels lock clean

# A stamp per set of extras; stale once pyproject.toml, the lock or the C code changes, or the environment is gone.
$(VENV)/.demo: pyproject.toml requirements.lock $(wildcard analysis/native/*.[ch] collectors/importers/kineto/*.c tracekit/trace/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dashboard]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev,torch,trackers]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/tracekit whatif sample_traces/collected.parquet --fix "worker=1,1"
	@echo
	@echo "In the browser:  $(BIN)/tracekit open"
	@echo "Your own trace:  $(BIN)/tracekit whatif job.parquet      All commands:  $(BIN)/tracekit --help"

# A job that trains, a rank that becomes slow, and the message that says so.
demo-live: $(VENV)/.dev
	$(BIN)/python -m benchmarks.demo_live

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_names.py

# What every push needs: about four minutes on two cores. mypy without its cache keeps one of them busy for half a minute:
# the tests run meanwhile.
test: $(VENV)/.dev $(CHROMIUM)
	+$(MAKE) --no-print-directory --jobs 2 check suite

suite: $(VENV)/.dev
	HYPOTHESIS_PROFILE=short $(BIN)/pytest -n 3 -m "not slow and not fleet and not nightly"

# The rest, too: sabotaged trainings, sanitizers, nginx, Prometheus, the site, wheels, frameworks, a Ray cluster on this
# machine, servers of S3 and Google's storage. Nine to fourteen minutes.
test-all: $(VENV)/.fleet $(CHROMIUM) $(NGINX) $(PROMETHEUS) $(NODE_EXPORTER) $(ALERTMANAGER)
	+$(MAKE) --no-print-directory --jobs 2 check suite-all

# More processes than two cores: many of these tests wait for a browser, a training job or an alert.
suite-all: $(VENV)/.fleet
	$(BIN)/pytest -n 4 -m "not nightly"

# The slowest tests, into benchmarks/RESULTS.md.
durations: $(VENV)/.fleet $(CHROMIUM) $(NGINX) $(PROMETHEUS) $(NODE_EXPORTER) $(ALERTMANAGER)
	$(BIN)/python -m benchmarks durations

# A fault at every file operation of everything that changes a store, and writers killed among readers. An hour.
test-nightly: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m nightly

$(VENV)/.fleet: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev,torch,ray,fleet-tests]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[docs]'
	touch $@

# The documentation as a site; the tests build it, too.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html"

# A hundred times as many examples of every property, other ones each time: some hours.
fuzz: $(VENV)/.dev
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -m hypothesis

# The browser that tests the dashboard, and the reverse proxy that it is tested behind.
$(CHROMIUM) $(NGINX) &:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(GET_BOTH) >/dev/null; \
	else echo "The dashboard's tests need Chromium and nginx: sudo $(GET_BOTH)" >&2; exit 1; fi

# What measures, receives and alerts in the tests.
$(PROMETHEUS) $(NODE_EXPORTER) $(ALERTMANAGER) &:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(GET_PROMETHEUS) >/dev/null; \
	else echo "The tests of alerts and metrics need Prometheus: sudo $(GET_PROMETHEUS)" >&2; exit 1; fi

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

# The whole of tracekit, and the recorder by itself.
wheels: $(VENV)/.demo
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./collectors/record/standalone

lock: $(VENV)/.dev
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip > requirements.lock

clean:
	rm -rf $(VENV) build *.egg-info analysis/native/*.so collectors/importers/kineto/*.so collectors/nccl/*.so tracekit/trace/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
