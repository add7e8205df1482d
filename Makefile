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
race: ## tests under the race detector, where it can see something
	.ci/run race

.PHONY: lint
lint: ## gofmt and golangci-lint (with go vet) at the pinned version
	.ci/run format lint

.PHONY: fuzz
fuzz: ## three seconds of each fuzz target (FUZZ_TIME=1m for more)
	.ci/run fuzz

.PHONY: ci
ci: ## everything a change has to pass
	.ci/run

# The parts of the hot path one by one, then the whole process beside others. About five minutes; see docs/performance.md.
.PHONY: bench
bench: build ## the numbers: added latency, CPU, throughput, against nginx (if there is one) and a plain Go proxy; Linux
	go test -run '^$$' -bench 'PickPowerOfTwo64|TrySendReply|Admission|RelayChunk|WatcherEvent|Scan|Plain|PingPong' -benchmem -benchtime 0.3s \
		./routing ./internal/inbox ./internal/rawconn ./actors/dpserver ./actors/ingress ./internal/engine/openai
	go run ./test/bench -dpserve bin/dpserve

# One traffic takes about 15 minutes: POLICIES=kv-tuned,lmetric-1 TRAFFIC=chat,mixed make bench-policies takes part of it.
.PHONY: bench-policies
bench-policies: build ## routing policies side by side on simulated ranks, and what each costs the gateway; over an hour; Linux
	go run ./test/bench -role policies -dpserve bin/dpserve -rounds 1 -policies "$(POLICIES)" -traffic "$(TRAFFIC)"
	go run ./test/bench -role policy-cpu -dpserve bin/dpserve -policies "$(POLICIES)"

# The first part takes about 10 minutes a round: POLICIES=apart TRAFFIC=documents make bench-pd takes part of it.
.PHONY: bench-pd
bench-pd: build ## prefill and decode apart against the same ranks together, and what a split request costs the gateway; Linux
	go run ./test/bench -role pd -dpserve bin/dpserve -rounds 1 -policies "$(POLICIES)" -traffic "$(TRAFFIC)"
	go run ./test/bench -role pd-cpu -dpserve bin/dpserve

# TRACE is a file or a generator, as `dpserve help simulate` has them; LOAD is its rate; APP has the ranks.
.PHONY: simulate
simulate: ## routing policies on a trace, on virtual time: TRACE=agents LOAD=1.1 POLICIES=mex,lmetric-1 make simulate
	go run ./cmd/dpserve simulate "$(or $(APP),examples/simulate/app.yaml)" --trace "$(or $(TRACE),agents)" \
		--rate "$(or $(LOAD),1)" --policy "$(or $(POLICIES),mex,lmetric-1,lpwl,kv:tuned,round-robin)"

.PHONY: acceptance
acceptance: ## rows of test/acceptance.md in real time, with real processes
	DPSERVE_ACCEPTANCE=1 go test -count=1 -timeout 30m ./cmd/... ./test/...

# A mutant is a rule of the product that is broken on purpose: test/mutants.
.PHONY: nightly
nightly: acceptance ## for a night: 1,000 random walks over whole nodes, mutants of the product, and the rows in real time
	DPSERVE_PAIR_SEEDS=10 go test -count=1 -timeout 3h ./test/inprocess -walk.seeds 1000 -nodes.seeds 1000 \
		-run 'TestRandomWalk|TestPairsUnderRandomFaults'
	DPSERVE_SEEDS=1000 go test -count=1 ./actors/controller -run TestRG3OldIncarnationReturns
	DPSERVE_MUTANTS=1 go test -count=1 -v -timeout 3h ./test/mutants

# Installs the CPU build of vLLM and NIXL once, outside the repository (minutes, 6 GB); see docs/real-vllm.md.
.PHONY: test-vllm
test-vllm: ## real vLLM engines on the CPU, attached and launched: events, routing, deaths, updates, drain; groups; pairs under faults
	test/vllm/install.sh
	DPSERVE_VLLM=1 go test -count=1 -v -timeout 120m ./test/vllm

# Installs SGLang once, outside the repository (minutes, 7 GB); see docs/real-vllm.md.
.PHONY: test-sglang
test-sglang: ## real SGLang servers on the CPU, launched: events, predictions, deaths; attached: two ranks in one process, workers come and go
	test/vllm/install-sglang.sh
	DPSERVE_SGLANG=1 go test -count=1 -v -timeout 60m -run TestSGLang ./test/vllm

# Installs official clients once, outside the repository (a minute, 250 MB). go test runs them from then on.
.PHONY: test-clients
test-clients: ## official clients of OpenAI, Anthropic, openai-agents and Vercel, unmodified, for Python and JavaScript
	test/clients/install.sh
	go test -count=1 -run TestOfficialClients ./test/clients

# Installs Ray Serve's command line once, outside the repository (a minute, 500 MB).
.PHONY: test-ray-cli
test-ray-cli: ## Ray's own serve status, config, deploy and shutdown, unmodified, against the admin port
	test/ray/install.sh
	DPSERVE_RAY=1 go test -count=1 -v ./test/ray

# Needs chromium (apt install chromium), and installs axe-core once, outside the repository (4 MB).
.PHONY: test-page
test-page: ## the page of the admin port in a real browser: ranks that die, roll-outs, 256 ranks, axe-core
	test/page/install.sh
	DPSERVE_PAGE=$${DPSERVE_PAGE:-$$HOME/.cache/dpserve/page} go test -count=1 -v ./test/page

# Needs an installed vLLM or SGLang, and runs each step that they allow; see docs/real-engines.md.
.PHONY: test-gpu
test-gpu: build ## real engines on a GPU: predictions, policies under load, deaths, prefill and decode; STEPS="up table down" takes some
	python3 test/gpu/run.py $(STEPS)

.PHONY: release
release: ## archives for Linux and macOS in ./dist, with checksums and the list of their parts; VERSION=v0.1.0 names them
	VERSION="$(VERSION)" tools/release

.PHONY: test-release
test-release: ## a release, twice, from two clones: the same bytes, and the binary of this machine runs
	DPSERVE_RELEASE=1 go test -count=1 -v -timeout 60m ./test/release

.PHONY: test-alerts
test-alerts: ## examples/prometheus by promtool, which has to be installed
	cd examples/prometheus && promtool check rules alerts.yml && promtool check config prometheus.yml

.PHONY: test-kube
test-kube: ## the manifests against the types of the Kubernetes API; as root also the program of the image in an empty folder
	cd test/kube && go test -count=1 -v ./...

.PHONY: clean
clean: ## what build and release left behind
	rm -rf bin dist

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
