# `make` lists what can be made.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Go from its usual place when it is not on PATH.
GO := $(shell command -v go 2>/dev/null || echo /usr/local/go/bin/go)
export GO

# Read once, and only by the targets that stamp it.
VERSION = $(eval VERSION := $(shell sh build/version.sh))$(VERSION)
# Without grpc's debug pages, which link a template engine and make each agent 3 MB
# larger: in a guest under emulation that is memory and start-up time.
TAGS = grpcnotrace
LDFLAGS = -s -w -X main.version=$(VERSION)

# The agent runs in the guest: Linux, on the host's architecture.
GUEST_ARCH = $(eval GUEST_ARCH := $(shell $(GO) env GOARCH))$(GUEST_ARCH)

TOOLS := $(CURDIR)/.tools/bin

##@ Use

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Install and build what is needed, run Python in a VM; the last line is 42
	@sh build/demo.sh

.PHONY: demo-engine
demo-engine: ## The same through an iii engine: engine, adapter and one call; the last line is 42
	@sh build/demo-engine.sh

.PHONY: build
build: go-version ## Build bin/adapter, bin/krun-shim and bin/guest-agent
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/adapter ./cmd/adapter
	CGO_ENABLED=1 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/krun-shim ./cmd/krun-shim
	CGO_ENABLED=0 GOOS=linux GOARCH=$(GUEST_ARCH) \
		$(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/guest-agent ./cmd/guest-agent

.PHONY: deps
deps: ## Install missing system packages (Debian, as root; elsewhere name them)
	@sh build/deps.sh build run test

.PHONY: images
images: go-version ## Make the preset images python and node from Debian packages
	$(GO) run ./build/images python node

##@ Work on it

.PHONY: test
test: ## Run every test: units, images, and the VM suite on real QEMU VMs
	@sh build/test.sh $(TEST_FLAGS)

.PHONY: lint
lint: go-version ## Check formatting, code and protocol definitions
	@sh build/tools.sh buf golangci-lint
	$(TOOLS)/golangci-lint run ./...
	CGO_ENABLED=0 $(TOOLS)/golangci-lint run ./...
	CGO_ENABLED=0 GOOS=darwin GOARCH=arm64 $(TOOLS)/golangci-lint run ./...
	$(TOOLS)/buf lint api/proto
	$(TOOLS)/buf format --diff --exit-code api/proto

.PHONY: format
format: go-version ## Format Go code and protocol definitions
	@sh build/tools.sh buf golangci-lint
	$(TOOLS)/golangci-lint fmt ./...
	$(TOOLS)/buf format --write api/proto

.PHONY: generate
generate: go-version ## Make what is generated: api/**/*.pb.go, disk templates, docs/functions.md, errors.md
	@sh build/generate.sh

.PHONY: check
check: go-version ## Check that generated code and go.mod are up to date
	@sh build/generate.sh --check
	$(GO) mod tidy -diff
	cd tools && $(GO) mod tidy -diff

.PHONY: bench
bench: ## Measure boot, exec, memory and streams beside their floors
	@sh build/bench.sh $(BENCH_FLAGS)

.PHONY: lab
lab: ## Run the VM suite on libkrun in an emulated machine (LAB_FLAGS='-- CMD': something else)
	@sh build/lab.sh $(LAB_FLAGS)

.PHONY: lab-shell
lab-shell: ## Open a shell in that machine; Ctrl-A X ends it
	@sh build/lab.sh --shell

.PHONY: bench-lab
bench-lab: ## Measure libkrun's VMs in that machine beside a floor and a peer
	@sh build/bench-lab.sh $(BENCH_LAB_FLAGS)

.PHONY: soak
soak: ## Run the long parts of the VM suite ten times as long (SOAK_FLAGS=lab: libkrun's alone)
	@sh build/soak.sh $(SOAK_FLAGS)

.PHONY: ci
ci: ## What continuous integration runs
	@.ci/run

.PHONY: clean
clean: ## Remove what was built here (tools, VMM files and images stay)
	rm -rf bin .cache

.PHONY: go-version
go-version:
	@$(GO) version >/dev/null 2>&1 || { \
		echo 'Go was not found: install Go 1.26.7 or newer' >&2; exit 1; }
