# make demo    train the small demo on this machine's CPU
# make test    the tests; the last line is pytest's summary
# make lint    ruff and mypy
# make adapters  the packages of two more adapters' tests, into .venv
# make peers   what benchmarks.controller is compared with, in .peers
# make clean   remove the environment and what the tools leave
#
# The environment is made on first use, in .venv, from requirements/*.lock.  torch's CPU build (2.13.0+cpu) is not on
# the ordinary package index: TORCH_INDEX names the index that has it, unless pip is configured to know one.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP = .venv/bin/python -m pip --disable-pip-version-check
RUN = .venv/bin/python

.PHONY: demo test lint adapters peers clean
.DELETE_ON_ERROR:

demo: .venv/rollart
	$(RUN) -m rollart.controller examples/frozen_lake.yaml

test: .venv/rollart
	@$(RUN) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || { \
	echo "Mooncake's store needs the library libibverbs.so.1; on Debian and Ubuntu: apt-get install libibverbs1" >&2; exit 1; }
	@$(RUN) -m pytest $(ARGS)

lint: .venv/rollart
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

adapters: .venv/rollart requirements/adapters.lock
	$(PIP) install --quiet --no-deps -r requirements/adapters.lock

peers: .peers/installed

clean:
	rm -rf .venv .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The locked packages, and no others: a changed lock makes the environment anew.
.venv/locked: requirements/cpu.lock requirements/dev.lock
	@test -n "$(PYTHON)" || { echo "RollArt needs Python 3.11 or newer, and there is none on the PATH; \
	name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
	sys.exit("RollArt needs Python 3.11 or newer; $(PYTHON) is " + v + "; name another with: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
	echo "the inference engine needs the library libnuma.so.1; on Debian and Ubuntu: apt-get install libnuma1" >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv
	@echo "installing about 170 packages into .venv (3.7 GB); this takes a few minutes"
	@$(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
	"$$(grep '^torch==' requirements/cpu.lock)" || { \
	echo "pip can't install torch's CPU build (above is why). Where it finds no such version, give the address of \
	PyTorch's index of CPU wheels: make TORCH_INDEX=ADDRESS" >&2; exit 1; }
	@$(PIP) install --quiet --no-deps -r requirements/cpu.lock -r requirements/dev.lock
	@touch $@

.venv/rollart: .venv/locked pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.peers/installed: requirements/peers.lock
	@$(PYTHON) -m venv --clear .peers
	@echo "installing ray and verifiers into .peers (0.9 GB)"
	@.peers/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@
