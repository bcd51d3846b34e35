# Every target sets up what it needs. Requirements: Python >= 3.11, make, a network.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
COMPAT = 5.8.1 5.17.0 5.23.0 5.8.1-oldest 5.17.0-oldest 5.23.0-oldest python3.12 python3.13 newest
PYTEST_ARGS ?= --numprocesses auto --maxprocesses 8 --dist worksteal
HARD_ARGS ?= -m "not nightly"

CUDA = .venv-cuda/bin/python
CUDA_TORCH ?= 2.14.1
CUDA_TESTS = tests/rehearsal/test_real_out_of_memory.py tests/techniques tests/recipes/test_adapter_training.py
CUDA_ARGS ?= --quiet
ON_STAND_IN = OMP_NUM_THREADS=1 $(CUDA) -m hf_memopt.prediction.rehearsal --memory 12GiB -- $(CUDA)

CLIENTS = .venv-clients/bin
CLIENTS_ARGS ?= --numprocesses auto --maxprocesses 8 --dist loadgroup

.PHONY: demo test test-full test-hard test-compat test-cuda test-clients test-zero test-upstream lint format docs notebooks bench bench-batching bench-gpu bench-published bench-step-time fit-data table dist clean

demo: $(READY)            ## the main job: a GPU that is too small, which a CPU pretends to be, trains on real text
	$(BIN)/python examples/demo

test: $(READY)            ## the test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-full: $(READY)       ## the test suite with the slow tests
	$(BIN)/python -m pytest -m "not hard" $(PYTEST_ARGS)

test-hard: $(READY)       ## hard use: kills, full disks, storms of out of memory; HARD_ARGS= with the nightly ones
	$(BIN)/python -m pytest -m hard $(HARD_ARGS) $(PYTEST_ARGS) tests/hard

test-compat: $(COMPAT:%=test-compat-%)   ## the suite on every supported transformers, the oldest and newest of the rest, other Pythons

test-cuda: .venv-cuda/.ready  ## torch's CUDA build on a GPU without silicon: the tests of GPUs, the techniques, the judge
	$(ON_STAND_IN) -m pytest $(CUDA_ARGS) -m "gpu or stand_in" --ignore tests/rehearsal/test_real_out_of_memory.py \
	  tests/devices tests/memory tests/recipes tests/rehearsal tests/techniques
	# tensors up to 256 MiB get their values, from the CPU: these tests look at them
	HF_MEMOPT_TEST_DEVICE=cuda HF_MEMOPT_GPU_VALUES=268435456 $(ON_STAND_IN) -m pytest $(CUDA_ARGS) -m "not slow and not gpu" $(CUDA_TESTS)
	$(CUDA) benchmarks/judge.py

test-zero: .venv-zero/.ready  ## the tests that need DeepSpeed, on a CPU: none of them is skipped there
	.venv-zero/bin/python -m pytest -m "not hard" $(PYTEST_ARGS) -k "deepspeed or DeepSpeed or ZeRO" tests/techniques/test_engines.py

test-clients: .venv-clients/.ready   ## other people's trainings, stock and with this package; writes docs/clients.md
	$(CLIENTS)/python -m pytest --write-results $(CLIENTS_ARGS) tests/clients; \
	status=$$?; $(CLIENTS)/python tests/clients/clients_table.py && exit $$status

test-upstream: .venv-clients/.ready  ## transformers' own Trainer tests, stock and attached: TRANSFORMERS_SRC=checkout
	$(CLIENTS)/python tests/upstream/compare.py "$(TRANSFORMERS_SRC)" $(UPSTREAM_ARGS)

lint: $(READY)            ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict hf_memopt

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)            ## the documentation, built offline into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Open build/site/index.html"

notebooks: $(READY)       ## run the notebooks and store what they show
	$(BIN)/python notebooks/execute.py

bench: $(READY)           ## the benchmarks behind the figures; appends to benchmarks/results
	$(BIN)/python benchmarks/memory_report.py
	$(BIN)/python benchmarks/estimation.py
	$(BIN)/python benchmarks/microbatch.py
	$(BIN)/python benchmarks/checkpointing.py
	$(BIN)/python benchmarks/fused_cross_entropy.py
	$(BIN)/python benchmarks/large_models.py
	$(BIN)/python benchmarks/long_rows.py
	$(BIN)/python benchmarks/longest_rows.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/packed_rows.py
	$(BIN)/python benchmarks/sixteen_bit_weights.py
	$(BIN)/python benchmarks/quantized.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/checkpoint_manifest.py
	$(BIN)/python benchmarks/four_setups.py
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/command_line.py
	$(MAKE) bench-batching

bench-batching: $(READY)  ## samplers side by side: ours, stock, lhotse, fairseq's rule, TRL
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python benchmarks/padding_free.py
	$(BIN)/python benchmarks/batching.py

bench-published: $(READY) ## predicted memory against what other people measured on GPUs, without a GPU
	$(BIN)/python benchmarks/published.py

bench-step-time: $(READY) ## predicted seconds of a step against what other people measured on GPUs
	$(BIN)/python benchmarks/step_time.py

fit-data: $(READY)        ## docs/does-it-fit.html and .parquet; goes on where it stopped, 160 CPU minutes in all
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python benchmarks/fit_data.py

table: $(READY)           ## the generated parts of README and docs
	$(BIN)/python benchmarks/plans.py
	$(BIN)/python benchmarks/table.py

bench-gpu: $(READY)       ## predicted against measured memory, on a CUDA GPU; goes on where it stopped
	$(BIN)/python benchmarks/gpu.py

dist:                     ## the wheel, in dist/
	rm -rf build/lib build/bdist.*  # files that are no more would come along
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

clean:
	rm -rf $(VENV) .venv-clients .venv-cuda .venv-zero .venv-newest .venv-[0-9]* build dist *.egg-info

$(READY): setup.cfg pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf-memopt needs Python >= 3.11, this is " + sys.version.split()[0] + ". Call: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-clients/.ready: setup.cfg pyproject.toml constraints.txt
	test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet --constraint constraints.txt --editable ".[clients,test]"
	touch $@

.venv-cuda/.ready: setup.cfg pyproject.toml constraints.txt Makefile
	test -x $(CUDA) || $(PYTHON) -m venv .venv-cuda
	sed "s/^torch==.*/torch==$(CUDA_TORCH)/" constraints.txt > .venv-cuda/constraints.txt
	$(CUDA) -m pip install --quiet --constraint .venv-cuda/constraints.txt --editable ".[plot,rehearsed,test]"
	touch $@

.venv-zero/.ready: setup.cfg pyproject.toml constraints.txt Makefile
	test -x .venv-zero/bin/python || $(PYTHON) -m venv .venv-zero
	.venv-zero/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,plot]" setuptools
	DS_BUILD_OPS=0 .venv-zero/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	.venv-zero/bin/python -c "import deepspeed"
	touch $@

test-compat-%:
	$(PYTHON) tests/compat/run.py $* $(PYTEST_ARGS)
