# Everything a person or a CI system runs here. The tools it needs are Go modules, built by the Go command; nothing is
# installed. What a target needs besides Go is said in its line.

SHELL := /bin/bash -euo pipefail
.DEFAULT_GOAL := help

# Of the image, unless VERSION is said: the tag that the manifests name, so that they run what "make image" has made.
IMAGE_VERSION := $(or $(VERSION),$(shell sed -n 's|^ *image: gpuslice/gpuslice-agent:||p' deploy/base/daemonset.yaml))
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
IMAGE   ?= gpuslice/gpuslice-agent
RELEASE ?= bin/release

# grpcnotrace: with gRPC's tracing, which nothing here uses, the linker keeps every method of every type, a third of a program.
# GOFLAGS hands it to every go command here; test/repo holds the Dockerfile and test/binaries to the same.
TAGS := grpcnotrace
export GOFLAGS := $(strip $(GOFLAGS) -tags=$(TAGS))
# KUBE=download takes the programs that Kubernetes and etcd publish, in place of building them (test/binaries).
ifeq ($(KUBE),download)
export GPUSLICE_KUBE := download
endif
# -z lazy: NVIDIA's library is opened at run time, so its symbols are still unknown when the program starts.
# relro and pie: what need not be written is read-only, and where things lie cannot be guessed.
LDFLAGS := -s -w -X main.version=$(VERSION) -extldflags=-Wl,-z,lazy,-z,relro
# go-nvml binds deprecated functions too, each of which the C compiler remarks on.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

LINT    := go tool -modfile=test/tools/go.mod golangci-lint
GOTESTSUM := go tool -modfile=test/tools/go.mod gotestsum
# A package whose tests run none of our programs is taken from Go's cache of results while nothing it is made of or reads has changed; where CI is
# set, nothing is. Three packages at a time, the longest first, so that none of them runs alone in the end. Their tests mostly wait for programs,
# so many run at a time. Garbage is collected seldom: the memory of tests costs nothing, and a third of their time went into that.
# Timers may fire 2 ms late instead of 50 us: Go's scheduler sleeps for 20 us over and over, which takes a quarter
# of the processor time of programs that mostly wait.
# GPUSLICE_RUN names this run, in which test/binaries builds each program once.
# -s -w: no one debugs these binaries, and to link them with symbols takes twice as long. -vet=off: make lint vets.
export GPUSLICE_RUN := $(shell date +%s%N)
COUNT    := $(if $(CI),-count=1)
PACKAGES  = ./test/node ./agent ./test/cluster/kubelet ./test/cluster ./agent/act/fleet ./cmd/gpuslice-agent ./test/policy ./...
# $(call gotest,FLAGS) runs the tests of PACKAGES, and prints the slowest in the end, whether they passed or not. A run in which no test ran, as by a
# name that is gone, has failed.
gotest    = events=$$(mktemp); trap 'rm -f "$$events"' EXIT; echo 2000000 >/proc/self/timerslack_ns || true; \
	GOGC=400 $(CORES) $(GOTESTSUM) --format pkgname --format-hide-empty-pkg --hide-summary skipped --jsonfile "$$events" --packages "$(PACKAGES)" -- \
		-ldflags='-s -w' -vet=off $(COUNT) -p 3 -parallel 14 -timeout 60m $(1) || failed=$$?; \
	grep -q '"Test":' "$$events" || { echo "no test has run" >&2; failed=1; }; \
	echo slowest:; $(GOTESTSUM) tool slowest --num 10 --jsonfile "$$events"; exit $${failed:-0}
# Some sixty programs share the cores. An agent that runs on one takes a quarter less processor time, since it wakes no threads on the others.
# With the race detector, the goroutines of a program run beside each other.
test test-long: CORES = GOMAXPROCS=1
MODULES  = $(shell git ls-files go.mod '*/go.mod' | xargs -n1 dirname)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## the programs, into bin/ (needs a C compiler)
	go build -trimpath -buildmode=pie -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

.PHONY: test
test: test-nocgo test-binaries ## what shows a broken change: unit tests, and the agent against a real control plane
	@$(call gotest,-short)

.NOTPARALLEL: test-all # each takes all cores
.PHONY: test-all
test-all: test-long test-race e2e ## everything: tests at full length, the race detector, and e2e (as root)

.PHONY: test-long
test-long: test-nocgo ## make test at full length, and what it leaves out
	go run ./test/binaries/cmd/binaries --all
	@$(call gotest)

# The race detector sees what runs side by side in a test's own process, so the packages below test/ whose tests start programs have nothing for it.
# The agent runs as a process there: it is built with the race detector too, and its log is read for what that finds.
.PHONY: test-race
test-race: PACKAGES = ./agent/... ./cmd/... ./config/... ./drain/... ./nvml/... ./test/cluster/... ./test/gpusim/...
test-race: test-binaries ## make test with the race detector, but for packages of test/ whose tests start programs; and the agent built with it
	@$(call gotest,-race -short)
	@$(MAKE) --no-print-directory test-race-agent

.PHONY: test-race-agent
test-race-agent: PACKAGES = ./test/node
test-race-agent:
	@$(call gotest,-race -short -run TestKilled)

# With one scenario: make e2e E2EFLAGS='-short -run TestWhatTheManifestsInstall', as .ci/run does.
.PHONY: e2e
e2e: PACKAGES = ./test/e2e
e2e: COUNT = -count=1
e2e: export GPUSLICE_E2E = 1
e2e: ## what needs root: kubelet, containerd and NVIDIA's programs, in namespaces (needs libseccomp-dev and pkg-config)
	go run ./test/binaries/cmd/binaries --kubelet kube deviceplugin image libnvidia-ml runtime
	@$(call gotest,$(E2EFLAGS))

# PURE are the packages whose own tests are to catch each of their faults. Those of ./agent take minutes: test/faults lists faults of it, each with its test.
PURE := agent/plan agent/monitor/health/verdict config/window nvml agent/state/capacity agent/decide agent/offer agent/observe agent/report/preview
.PHONY: mutants
mutants: export GOFLAGS += -short -vet=off -count=1 "-ldflags=-s -w"
mutants: ## small faults of the pure packages, one after the other: which none of their tests catches; then those of test/faults (PURE=agent/plan for one alone)
	@for p in $(PURE); do echo "$$p"; go tool -modfile=test/mutants/go.mod gremlins unleash --config test/mutants/gremlins.yaml ./$$p || exit; done
	$(if $(filter command,$(firstword $(origin PURE))),,go run ./test/faults)

.PHONY: test-skew
test-skew: ## the core scenarios with earlier versions of Kubernetes and NVIDIA's plugin; builds 25 minutes the first time (SKEWFLAGS='--only "plugin v0.17.4"')
	go run ./test/skew $(SKEWFLAGS)

.PHONY: test-nocgo
test-nocgo: ## that all but the leaves and the agent builds without cgo, and the plugin for every system that people work on
	CGO_ENABLED=0 go build ./agent/... ./drain/... ./config/... ./nvml
	for os in linux darwin windows; do GOOS=$$os CGO_ENABLED=0 go list -export -f '' ./cmd/kubectl-gpuslice; done # compiles, and links nothing

.PHONY: test-binaries
test-binaries: ## what make test starts, into the user's cache: Kubernetes, etcd, NVIDIA's device plugin and DRA driver (after make demo, three minutes)
	go run ./test/binaries/cmd/binaries

.PHONY: demo
demo: ## watch a node with eight simulated GPUs being repartitioned, on a real control plane (DRA=1: by NVIDIA's DRA driver; KUBE=download: compiles less)
	@echo "compiling the demo: two minutes the first time, seconds later"
	@go run ./test/playground demo $(if $(DRA),--dra)

.PHONY: playground
playground: ## a shell on a cluster with simulated GPUs, and ten things to try in it
	@echo "compiling the playground: two minutes the first time, seconds later"
	@go run ./test/playground

.PHONY: bench
bench: ## tables of figures: gpuslice beside NVIDIA's mig-parted, mig-manager and device plugin, on the same simulated GPUs (needs dbus-daemon)
	go run ./test/bench $(BENCHFLAGS)

.PHONY: bench-fleet
bench-fleet: ## a table of figures: what fleets of agents ask of the API server (BENCHFLAGS='--nodes 100,300,1000' on a large machine)
	go run ./test/bench/fleet $(BENCHFLAGS)

# On a machine without NVIDIA's driver the GPUs are simulated, and the table says so.
CUTFLAGS = $(if $(filter restore,$(CUT)),--restore,--cut --confirm='$(CONFIRM)' --profile=bin/gpuslice-latency.yaml)
.PHONY: hardware
hardware: ## try it on this machine's GPUs, of which nothing is changed, or on simulated ones (CUT=1: measure cutting, and undo it)
	$(if $(CUT),mkdir -p bin)
	go run ./test/hardware $(if $(wildcard /dev/nvidiactl),,--simulated) $(if $(CUT),$(CUTFLAGS)) $(HARDWAREFLAGS)

.PHONY: hardware-bundle
hardware-bundle: ## the same as one archive, for a machine with a GPU where nothing can be fetched (needs xz)
	go run ./test/hardware bundle -o bin/gpuslice-hardware.tar.xz

.PHONY: generate
generate: ## generated code
	go generate ./...

.PHONY: pictures
pictures: ## the pictures of terminals in .github/images, from what the commands print
	go run -C test/pictures .

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

# An archive of "make image" or "make release" into a registry, with the credentials of docker login; plain HTTP is for loopback alone.
CRANE = go tool -modfile=test/image/go.mod crane
HELM  = go tool -modfile=test/helm/go.mod helm
pushed = layout=$$(mktemp -d); trap 'rm -rf "$$layout"' EXIT; tar -xf '$(1)' -C "$$layout"; $(CRANE) push "$$layout" '$(IMAGE):$(2)'
named = @[[ '$(IMAGE)' == *[.:]*/* ]] || { echo 'IMAGE=$(IMAGE) names no registry: say IMAGE=registry.example.com/gpuslice/gpuslice-agent' >&2; exit 1; }

.PHONY: push
push: ## the image of this checkout, into the registry of IMAGE (IMAGE=registry.example.com/gpuslice/gpuslice-agent, after docker login)
	$(named)
	@$(MAKE) --no-print-directory image
	@$(call pushed,bin/image/gpuslice-agent-$(IMAGE_VERSION).tar,$(IMAGE_VERSION))

.PHONY: release
release: ## all that a release has, into RELEASE: image, chart, manifests, plugin, playground, notes, checksums (VERSION=v1.2.3 IMAGE=registry…; needs both C compilers, and xz)
	go run ./test/release -version '$(VERSION)' -image '$(IMAGE)' -out '$(RELEASE)' $(RELEASEFLAGS)

# The release is not made again: its manifests name the digest of this image.
.PHONY: publish
publish: ## image and chart of the release in RELEASE, into the registries of IMAGE and CHARTS (CHARTS=registry.example.com/gpuslice/charts)
	$(named)
	@(cd '$(RELEASE)' && sha256sum --quiet --check checksums.txt)
	@$(call pushed,$(RELEASE)/gpuslice-agent-$(VERSION).tar,$(VERSION))
	@$(HELM) push '$(RELEASE)/gpuslice-$(VERSION:v%=%).tgz' 'oci://$(CHARTS)' $(if $(filter 127.0.0.1:% localhost:%,$(CHARTS)),--plain-http)
