# Each target does all of its own set-up: a fresh clone needs git, make and Python >= 3.11.

SHELL := /bin/bash
PYTHON := .venv/bin/python
# The one that torch is installed for, on a host with a GPU.
GPU_PYTHON ?= python3

.PHONY: help
help:
	@echo "make demo       real LLM traffic through three tiers, then a model if ENGINES=DIR has vLLM or transformers; sets up .venv-demo alone"
	@echo "make test       every check and the default tests"
	@echo "make test-long  the tests that take longer, too"
	@echo "make test-engines  kvtier in real engines on the CPU; ENGINES=DIR takes their environment from there"
	@echo "make gpu-hour   what kvtier does on a GPU, in steps: no network, no .venv, what gpu-wheels carried"
	@echo "make systemd-vm the systemd unit under a real systemd, in a virtual machine; as root on Debian"
	@echo "make deb        a Debian package, in dist"
	@echo "make image      a container image, kvtier:0.1.0; by buildah, from Docker's Python"
	@echo "make gpu-wheels into .whl, what a host with a GPU lacks for gpu-hour"
	@echo "make check      ruff, mypy --strict, the import rule, stubs current, protos compatible, the meters"
	@echo "make format     ruff format and ruff's safe fixes"
	@echo "make docs       the pages and the API reference as a site, in .site; every link is checked"
	@echo "make stubs      regenerate client/kvtier/v1 from proto/"
	@echo "make venv       only the environment, in .venv"
	@echo "make clean      remove environments, caches and build outputs"

.PHONY: venv
venv: .venv/.stamp

.venv/.stamp: pyproject.toml constraints-dev.txt .ci/venv.sh
	@echo "kvtier: installing into .venv"
	@bash .ci/venv.sh .venv -c constraints-dev.txt -e '.[daemon,dev]'
	@touch $@

.venv-stubs/.stamp: .ci/requirements-stubs.txt .ci/venv.sh
	@echo "kvtier: installing into .venv-stubs"
	@bash .ci/venv.sh .venv-stubs -r .ci/requirements-stubs.txt
	@touch $@

.PHONY: stubs
stubs: .venv/.stamp .venv-stubs/.stamp
	$(PYTHON) .ci/stubs.py
	$(PYTHON) .ci/proto_compat.py --update

.venv-docs/.stamp: constraints-dev.txt .ci/venv.sh
	@echo "kvtier: installing into .venv-docs"
	@bash .ci/venv.sh .venv-docs -c constraints-dev.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

.PHONY: docs
docs: .venv-docs/.stamp
	.venv-docs/bin/mkdocs build

.PHONY: format
format: .venv/.stamp
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

.PHONY: check
check: .venv/.stamp .venv-stubs/.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	PYTHONPATH=.ci .venv/bin/lint-imports --no-logo
	$(PYTHON) .ci/stubs.py --check
	$(PYTHON) .ci/proto_compat.py
	$(PYTHON) .ci/house.py

# Workers wait for daemons more than they compute.
WORKERS := -n 3 --dist loadfile

.PHONY: test
test: check
	$(PYTHON) .ci/run_tests.py $(WORKERS)

# Of tests/integration, what uses the device tier. Those of tests/gpu run on the fake in make test.
ON_THE_FAKE := $(addprefix tests/integration/test_,$(addsuffix .py,across_groups dead_clients model_kinds policies \
	restart supervise torture transfer two_clients verbs))

.PHONY: test-long
test-long: check
	KVTIER_LONG=1 $(PYTHON) .ci/run_tests.py $(WORKERS) -m "not gpu and not engines" -o faulthandler_timeout=3600
	KVTIER_TEST_DEVICE=fake $(PYTHON) .ci/run_tests.py $(WORKERS) $(ON_THE_FAKE)
	$(MAKE) docs
	$(MAKE) test-engines
	$(MAKE) systemd-vm

# Engines are heavy: each test file starts a few, and they run one at a time.
ENGINES ?= .venv-engines

.venv-engines/.stamp: pyproject.toml .ci/requirements-engines.txt .ci/requirements-sglang.txt .ci/engines.sh .ci/venv.sh
	@echo "kvtier: installing engines into .venv-engines"
	@bash .ci/engines.sh .venv-engines
	@touch $@

.PHONY: test-engines
test-engines: .venv/.stamp $(if $(filter .venv-engines,$(ENGINES)),.venv-engines/.stamp)
	KVTIER_ENGINES=$(abspath $(ENGINES)) $(PYTHON) -m pytest tests/engines -m engines -o faulthandler_timeout=3600

# On the host with the GPU; docs/gpu.md names the variables.
.PHONY: gpu-hour
gpu-hour:
	@$(GPU_PYTHON) .ci/gpu.py hour

.PHONY: gpu-wheels
gpu-wheels: .venv/.stamp
	@$(PYTHON) .ci/gpu.py wheels

# The processor is emulated: ten minutes.
.PHONY: systemd-vm
systemd-vm: .venv/.stamp
	@$(PYTHON) .ci/systemd_vm.py

.PHONY: deb
deb:
	@deploy/deb.sh

.PHONY: image
image:
	buildah build -f deploy/Containerfile -t kvtier:0.1.0 .

# The demo needs the daemon alone, a tenth of what the tests need.
DEMO := .venv-demo

# The environment finds kvtier in the clone: an editable install would download and run a builder first.
define IN_PLACE
import pathlib, sysconfig, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
site = pathlib.Path(sysconfig.get_path("purelib"))
(site / "kvtier.pth").write_text("".join(f"{pathlib.Path(root).resolve()}\n" for root in ("client", "daemon")))
(site / "kvtier.dist-info").mkdir(exist_ok=True)
(site / "kvtier.dist-info/METADATA").write_text("Name: kvtier\nVersion: " + project["version"])
print(*project["dependencies"], *project["optional-dependencies"]["daemon"], sep="\n")
endef
export IN_PLACE

# uv, where it is installed, needs no minute; pip is told `-v` so that a line for each package is left of it.
$(DEMO)/.stamp: pyproject.toml .ci/venv.sh
	@echo "kvtier: making $(DEMO)"
	@bash .ci/venv.sh $(DEMO)
	@$(DEMO)/bin/python -c "$$IN_PLACE" >$(DEMO)/requirements.txt
	@echo "kvtier: installing the daemon's packages into $(DEMO)"
	@uv pip install -q --python $(DEMO)/bin/python -r $(DEMO)/requirements.txt 2>/dev/null || { set -o pipefail; \
	    bash .ci/venv.sh $(DEMO) -v --no-compile -r $(DEMO)/requirements.txt | sed -un 's/^Collecting \([^ ]*\).*/  \1/p'; }
	@echo "kvtier: running the demo"
	@touch $@

# Ends with 0 if a Python has the daemon and the module that is named after this.
HAS := -c 'import sys, importlib.util as u; sys.exit(None in map(u.find_spec, sys.argv[1:]))' kvtierd

.PHONY: demo
demo: $(DEMO)/.stamp
	@$(DEMO)/bin/python examples/demo.py
	@for example in vllm_two_engines transformers_two_processes; do \
	    for python in "$(ENGINES)/bin/python" "$(DEMO)/bin/python"; do \
	        if "$$python" $(HAS) "$${example%%_*}" 2>/dev/null; then echo; exec "$$python" examples/$$example.py; fi; \
	    done; \
	done; \
	echo "With vLLM, in its environment: pip install '.[daemon]' && python examples/vllm_two_engines.py"; \
	echo "With transformers, in its environment: the same, and python examples/transformers_two_processes.py"

.PHONY: clean
clean:
	rm -rf .venv .venv-demo .venv-docs .venv-engines .venv-stubs .site .vm .whl build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find client daemon tests examples .ci -name __pycache__ -type d -prune -exec rm -rf {} +
