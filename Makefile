# Everything a person or a CI system runs here. The tools it needs are Go modules, built by the Go command; nothing is
# installed. What a target needs besides Go is said in its line.

SHELL := /bin/bash -euo pipefail
.DEFAULT_GOAL := help

# Of the image, unless VERSION is said: the tag that the manifests name, so that they run what "make image" has made.
IMAGE_VERSION := $(or $(VERSION),$(shell sed -n 's|^ *image: gpuslice/gpuslice-agent:||p' deploy/base/daemonset.yaml))
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
IMAGE   ?= gpuslice/gpuslice-agent

# grpcnotrace: with gRPC's tracing, which nothing here uses, the linker keeps every method of every type, a third of a program.
# GOFLAGS hands it to every go command here; test/repo holds the Dockerfile and test/binaries to the same.
TAGS := grpcnotrace
export GOFLAGS := $(strip $(GOFLAGS) -tags=$(TAGS))
# -z lazy: NVIDIA's library is opened at run time, so its symbols are still unknown when the program starts.
# relro and pie: what need not be written is read-only, and where things lie cannot be guessed.
LDFLAGS := -s -w -X main.version=$(VERSION) -extldflags=-Wl,-z,lazy,-z,relro
# go-nvml binds deprecated functions too, each of which the C compiler remarks on.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

LINT    := go tool -modfile=test/tools/go.mod golangci-lint
# A package whose tests run none of our programs is taken from the cache of test results while nothing has changed that it is made of or reads; where
# CI is set, nothing is. test/binaries, which knows that a test runs programs, keeps its result out. Three packages at a
# time, the longest first, so that none of them runs alone in the end. Their tests mostly wait for programs, so many run
# at a time. Garbage is collected seldom: the memory of tests costs nothing, and a third of their time went into that.
# Timers may fire 2 ms late instead of 50 us: Go's scheduler sleeps for 20 us over and over, which takes a quarter
# of the processor time of programs that mostly wait.
# GPUSLICE_RUN names this run, in which test/binaries builds each program once.
# -s -w: nobody debugs these binaries, and to link them with symbols takes twice as long. -vet=off: make lint vets.
export GPUSLICE_RUN := $(shell date +%s%N)
COUNT   := $(if $(CI),-count=1)
GOTEST   = $(if $(EVENTS),events=$(EVENTS)/$@,events=$$(mktemp); trap 'rm -f "$$events"' EXIT); \
	echo 2000000 >/proc/self/timerslack_ns || true; GOGC=400 $(CORES) go tool -modfile=test/tools/go.mod gotestsum --format pkgname --format-hide-empty-pkg --hide-summary skipped \
	--jsonfile "$$events" $(RERUN) --packages "$(PACKAGES)" -- -ldflags='-s -w' -vet=off $(COUNT) -p 3 -parallel 14 -timeout 60m
# Some sixty programs share the cores. An agent that runs on one takes a quarter less processor time, since it wakes no threads on the others.
# With the race detector, the goroutines of a program run beside each other.
test test-long: CORES = GOMAXPROCS=1
# Where CI is set, up to eight tests that failed run once more; both results are printed.
RERUN   := $(if $(CI),--rerun-fails=1 --rerun-fails-max-failures=8)
# What took longest is printed, whether the tests passed or not. Where EVENTS names a folder, each target leaves there the events of its tests.
SLOWEST  = || failed=$$?; go run ./test/slowest "$$events"; exit $${failed:-0}
# The names of the tests that test/long/more lists as left out of make test.
MORE     = $$(go run ./test/long/cmd/longtests left-out)
# Packages whose tests mostly start programs or read the sources, or compute in one goroutine: the race detector sees only what runs side by side
# in a test's own process.
UNRACED := test/node|test/hardware|test/shipped|test/incumbent|test/policy|test/repo|config/window
LONGEST := ./test/node ./agent ./test/geometry ./test/shipped ./test/hardware ./test/incumbent ./test/cluster/kubelet ./test/cluster ./agent/fleet ./cmd/gpuslice-agent ./test/policy
PACKAGES = $(LONGEST) ./...
MODULES  = $(shell git ls-files go.mod '*/go.mod' | xargs -n1 dirname)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## the programs, into bin/ (needs a C compiler)
	go build -trimpath -buildmode=pie -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

.PHONY: test
test: test-nocgo test-binaries ## what shows a broken change: unit tests, and the agent against a real control plane
	@$(GOTEST) -short -skip "$(MORE)" $(SLOWEST)

ALL := test-long test-race test-e2e
.PHONY: test-all
test-all: ## everything: what make test runs, leaves out and shortens, the race detector, and e2e
	@events=$$(mktemp -d); trap 'rm -rf "$$events"' EXIT; \
	$(MAKE) EVENTS="$$events" $(ALL) || failed=$$?; printf '\nof all of test-all\n'; go run ./test/slowest "$$events"/*; exit $${failed:-0}

.PHONY: test-race
test-race: PACKAGES = $$(go list ./... | grep -v -E '/($(UNRACED))$$')
test-race: test-binaries test-race-agent ## the tests of what runs in their own process with the race detector, and the agent built with it
	@$(GOTEST) -race -short -skip "$(MORE)" $(SLOWEST)

# The agent runs as a process here: it is built with the race detector too, and its log is read for what that finds.
.PHONY: test-race-agent
test-race-agent: PACKAGES = ./test/node
test-race-agent: test-binaries
	@$(GOTEST) -race -short -run TestKilled $(SLOWEST)

# The packages that test-long runs whole: those that test-race leaves out, and config/document, whose need of memory cannot be measured with the
# race detector.
WHOLE := $(UNRACED)|config/document
LONGTESTS := go run ./test/long/cmd/longtests -whole '$(WHOLE)'
.PHONY: test-long
test-long: PACKAGES = $$($(LONGTESTS) packages $(LONGEST))
test-long: test-nocgo test-binaries ## at full length: what make test shortens or leaves out, and all that test-race does not run
	@$(GOTEST) -run "$$($(LONGTESTS) tests)" $(SLOWEST)

# With these ten minutes test-all would take more than 40.
.PHONY: test-exhaustive
test-exhaustive: test-binaries ## what test-all leaves out: each call of the library with each code, and a resource that kubelet forgets (as root)
	go test -count=1 -timeout 3h ./agent -run 'TestEachCallOfTheLibraryFailsOnce' -everyfault
	go run ./test/binaries/cmd/binaries $(FOR_E2E)
	GPUSLICE_E2E=1 GPUSLICE_E2E_SLOW=1 go test -count=1 -timeout 30m ./test/e2e -run Forgotten

# The race detector, the cache of results and the list of slow tests are for the versions that people change the code with.
.PHONY: test-skew
test-skew: ## the core scenarios with earlier versions of Kubernetes and NVIDIA's plugin; builds 25 minutes the first time (SKEWFLAGS='--only "plugin v0.17.4"')
	go run ./test/skew $(SKEWFLAGS)

.PHONY: test-nocgo
test-nocgo: ## that all but the leaves and the agent builds without cgo, and the plugin for every system that people work on
	CGO_ENABLED=0 go build ./agent/... ./drain/... ./config ./nvml
	for os in linux darwin windows; do GOOS=$$os CGO_ENABLED=0 go list -export -f '' ./cmd/kubectl-gpuslice; done # compiles, and links nothing

.PHONY: test-binaries
test-binaries: ## Kubernetes, etcd and NVIDIA's programs, into the user's cache (20 minutes the first time)
	go run ./test/binaries/cmd/binaries

# What a run of test/e2e starts. It is said before it is built: the Go command keeps back what a test says.
FOR_E2E := --kubelet kube deviceplugin image libnvidia-ml runtime
# Kubelet keeps each test waiting for half of its time: two nodes, each with half of the tests by their time, take a third less than one.
FIRST_E2E := TestWhatTheManifestsInstall|TestPodsThatStayOnShares|TestAKubeletThatHasJustStarted|TestFeatureDiscovery
.PHONY: e2e test-e2e test-e2e-first test-e2e-others
e2e: test-e2e
test-e2e-first test-e2e-others: PACKAGES = ./test/e2e
test-e2e-first test-e2e-others: COUNT = -count=1
test-e2e: ## what needs root: kubelet, containerd and NVIDIA's programs, in namespaces (needs libseccomp-dev and pkg-config)
	go run ./test/binaries/cmd/binaries $(FOR_E2E)
	@export GPUSLICE_E2E=1; $(MAKE) --no-print-directory -j2 test-e2e-first test-e2e-others
test-e2e-first:
	@$(GOTEST) -run '$(FIRST_E2E)' $(SLOWEST)
test-e2e-others:
	@$(GOTEST) -skip '$(FIRST_E2E)' $(SLOWEST)

.PHONY: demo
demo: ## watch a node with eight simulated GPUs being repartitioned, on a real control plane
	@echo "compiling the demo: two minutes the first time, seconds later"
	go run ./test/demo

.PHONY: bench
bench: ## tables of figures: gpuslice beside NVIDIA's mig-parted, mig-manager and device plugin, on the same simulated GPUs (needs dbus-daemon)
	go run ./test/bench $(BENCHFLAGS)

.PHONY: bench-fleet
bench-fleet: ## a table of figures: what fleets of agents ask of the API server (BENCHFLAGS='--nodes 100,300,1000' on a large machine)
	go run ./test/bench/fleet $(BENCHFLAGS)

# On a machine without NVIDIA's driver the GPUs are simulated, and the table says so.
.PHONY: hardware
hardware: ## try it on this machine's GPUs, of which nothing is changed; on simulated ones where there are none
	go run ./test/hardware $(if $(wildcard /dev/nvidiactl),,--simulated) $(HARDWAREFLAGS)

.PHONY: hardware-bundle
hardware-bundle: ## the same as one archive, for a machine with a GPU where nothing can be fetched (needs xz)
	go run ./test/hardware bundle -o bin/gpuslice-hardware.tar.xz

.PHONY: generate
generate: ## generated code
	go generate ./...

.PHONY: tidy
tidy: ## go.mod and go.sum of every module
	@for m in $(MODULES); do echo "tidy $$m"; (cd $$m && go mod tidy); done

.PHONY: fmt
fmt: ## format all Go code
	$(LINT) fmt

.PHONY: lint
lint: ## golangci-lint, see .golangci.yml (the first run builds it, about a minute)
	$(LINT) run ./...

.PHONY: verify
verify: ## generate, tidy, fmt and lint; fails if that changes a file
	@before=$$(git status --porcelain && git diff HEAD | sha256sum); \
	$(MAKE) --no-print-directory generate tidy fmt lint; \
	after=$$(git status --porcelain && git diff HEAD | sha256sum); \
	if [[ "$$before" != "$$after" ]]; then \
		git --no-pager diff HEAD; git status --short; \
		echo "verify: the files above are not as 'make generate tidy fmt' writes them: commit what it wrote" >&2; exit 1; \
	fi

# What is made, of which sources, by which compilers: the same archive from the same, whoever makes it.
.PHONY: image
image: ## the container image, as an OCI archive in bin/image (needs gcc; for the other architecture Debian's cross compiler)
	@go run -C test/image . -checkout '$(CURDIR)' -out '$(CURDIR)/bin/image' -name '$(IMAGE)' -version '$(IMAGE_VERSION)' \
		-revision "$$(git rev-parse HEAD)" -created "$$(git log -1 --format=%ct)"

.PHONY: release
release: ## all that a release has, into bin/release: image, chart, manifests, plugin, notes, checksums (needs both C compilers)
	go run ./test/release -version '$(VERSION)' -out bin/release
