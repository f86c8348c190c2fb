# The list of what can be done here; the code behind it is in scripts/ and in the crates. `make help` prints it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# libtorch is installed into the user's cache when it is first needed; LIBTORCH overrides it.
WITH_TORCH = LIBTORCH="$$(scripts/libtorch.sh)"
BINARIES = -p trainctl -p trainctl-coordinator -p trainctl-worker -p trainctl-trainer

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

.PHONY: libtorch
libtorch: ## Install libtorch into the user's cache (no root needed) and print its folder
	@scripts/libtorch.sh

.PHONY: build
build: ## Build all four binaries in release
	$(WITH_TORCH) cargo build --release --locked $(BINARIES)

.PHONY: quickstart
quickstart: build ## Make data and a tokenizer, train a small GPT-2 with two workers on this machine
	scripts/quickstart.sh

.PHONY: test
test: ## Check formatting and lints, build, install what the tests need (target/ and the cache only), run them all
	@MAKEFLAGS= scripts/test.sh

.PHONY: oracle
oracle: build ## Compare with transformers: what we export loads there, what it saves loads here, same logits (4 GB of Python)
	$(WITH_TORCH) cargo build --release --locked -p trainctl-engine --example logits
	"$$(scripts/oracle-venv.sh)" tests/oracle/oracle.py

.PHONY: bench-checkpoint
bench-checkpoint: build ## Measure checkpoints against memcpy, dd, b3sum and PyTorch's; BENCH="--rows write,verify" chooses
	$(WITH_TORCH) cargo build --release --locked --examples -p trainctl-store -p trainctl-engine
	python3 bench/checkpoint.py --python "$$(scripts/oracle-venv.sh)" --b3sum "$$(scripts/b3sum.sh)" $(BENCH)

.PHONY: bench-restart
bench-restart: build ## Measure restarts after kill -9 against torchrun, and what supervision costs; BENCH="--rounds 9" chooses
	python3 bench/restart.py --python "$$(scripts/oracle-venv.sh)" $(BENCH)

.PHONY: matrix
matrix: build ## Every case of the crash matrices (three hours or more); `make test` carries out a sample
	$(WITH_TORCH) TRAINCTL_MATRIX=all cargo nextest run --release --locked --workspace --profile matrix \
		-E 'binary(crash) | test(/^matrix::/)'

.PHONY: sim
sim: ## 2,000 seeds of the simulation (200 in `make test`), then bugs planted one by one, each of which it must find
	$(WITH_TORCH) TRAINCTL_SIM_SEEDS=2000 cargo test --release --locked --workspace --test sim -- --nocapture
	$(WITH_TORCH) scripts/planted-bugs.py

.PHONY: fmt
fmt: ## Check the formatting
	cargo fmt --all -- --check

.PHONY: lint
lint: ## Clippy over all crates, warnings are errors
	$(WITH_TORCH) cargo clippy --release --locked --workspace --all-targets -- -D warnings

.PHONY: deny
deny: ## Licences, advisories and duplicate versions (needs cargo-deny)
	cargo deny check

.PHONY: schema
schema: ## Write docs/job.schema.json from the spec's types
	UPDATE_SCHEMA=1 cargo test --release -p trainctl-spec schema

.PHONY: timings
timings: ## Print how long each part of the last `make test` took, and its slowest tests
	@scripts/timings.sh

.PHONY: clean-quickstart
clean-quickstart: ## Remove what `make quickstart` made
	rm -rf data runs/quickstart
