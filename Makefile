# Targets are documented by the comment behind them; `make help` prints them. `go build` alone makes the product.
.DEFAULT_GOAL := help
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

.PHONY: build
build: ## dpserve in ./bin
	go build -trimpath -ldflags "-X main.version=$(VERSION)" -o bin/dpserve ./cmd/dpserve

.PHONY: test
test: ## every test, as the README says it
	go test ./...

.PHONY: race
race: ## tests of the rooms that have goroutines, under the race detector
	.ci/run race

.PHONY: lint
lint: ## go vet, gofmt and golangci-lint at the pinned version
	.ci/run vet format lint

.PHONY: fuzz
fuzz: ## ten seconds of each fuzz target (FUZZ_TIME=1m for more)
	.ci/run fuzz

.PHONY: ci
ci: ## everything a change has to pass
	.ci/run

.PHONY: bench
bench: build ## the numbers: added latency, CPU, throughput, against nginx and a plain Go proxy where they are installed
	@for script in test/bench/*.sh; do [ -e "$$script" ] || { echo "no script in test/bench" >&2; exit 1; }; \
		echo "== $$script"; DPSERVE=$(CURDIR)/bin/dpserve "$$script" || exit 1; done
	go test -run '^$$' -bench . -benchmem ./...

.PHONY: acceptance
acceptance: ## rows of docs/acceptance.md in real time, with real processes
	DPSERVE_ACCEPTANCE=1 go test -count=1 -timeout 30m ./cmd/... ./test/...

.PHONY: clean
clean: ## what build left behind
	rm -rf bin

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
