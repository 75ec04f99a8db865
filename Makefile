# SPDX-License-Identifier: MIT OR Apache-2.0
PREFIX ?= /usr/local
PROGRAMS ?= rxsteer
KERNEL ?=
FRAMES ?=
HOURS ?=
MINUTES ?=
CPUS ?=
NIC ?=
SCENARIO ?=
PROFILE ?=
REPORT ?= bench.json
MANY ?= many.json

.PHONY: help demo test long fuzz soak faults guest lint bench many install deb service image docs arm64 dist overhead

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: ## before and after, on real packets, in a minute (ARGS=--json)
	@scripts/run.sh demo $(ARGS)

test: ## every test, native and end to end (ARGS=FILTER); the latter need root: sudo make test
	@scripts/test.sh $(ARGS)

long: ## the same with 500 devices, 100 upgrades, all modes of the bench, larger models, as root (ARGS=FILTER)
	@RXSTEER_LONG=1 scripts/test.sh $(ARGS)

fuzz: ## frames through both builds of the parser, requests, configurations, as root (FRAMES=1e9)
	@scripts/fuzz.sh $(FRAMES)

soak: ## traffic of all kinds while everything moves: nothing grows, as root (HOURS=8)
	@scripts/soak.sh $(HOURS)

faults: ## random faults under traffic: order, accounts, nothing left behind, as root (MINUTES=60)
	@scripts/faults.sh $(MINUTES)

guest: ## tests in virtual machines, on several kernels (TEST=rfs, ARGS=FILTER, KERNEL=6.12, CPUS=8, NIC=e1000e, RESUME=1)
	@scripts/guest.sh $(KERNEL:%=--kernel %) $(CPUS:%=--cpus %) $(NIC:%=--nic %) $(RESUME:%=--resume) $(TEST) $(ARGS)

overhead: ## what the daemon takes itself: CPU time, memory, time to start; 2 minutes, as root
	@scripts/overhead.sh

lint: ## layout, warnings, licences
	@scripts/lint.sh

bench: ## the measured comparison, 25 minutes (SCENARIO=flood, REPORT=FILE.json, ARGS=--json)
	@scripts/run.sh bench $(SCENARIO) --report $(REPORT) $(ARGS)

many: ## the comparison on many CPUs, emulated (CPUS=8, SOCKETS=1, KERNEL=6.18, SCENARIO=flood, PROFILE=1, MANY=FILE.json)
	@scripts/testbed.sh $(KERNEL:%=--kernel %) $(CPUS:%=--cpus %) $(SOCKETS:%=--sockets %) \
		--report $(MANY) $(PROFILE:%=--profile) $(SCENARIO) $(ARGS)

install: ## puts rxsteer into PREFIX/bin (PREFIX=/usr/local, PROGRAMS="rxsteer rxlab")
	@scripts/install.sh "$(DESTDIR)$(PREFIX)" $(PROGRAMS)

deb: ## Debian's packages in target/deb, checked: lintian, installation, upgrade, removal, as root
	@scripts/debtest.sh

service: ## the unit under a real systemd in namespaces of its own, as root
	@scripts/servicetest.sh

image: ## the image of dist/Containerfile, run as the manifest for Kubernetes says, by podman, as root
	@scripts/imagetest.sh

docs: ## the book in target/book: concepts, manual, operation
	@scripts/docs.sh

dist: ## what is published, in target/dist: sources, packages, static programs, components, checksums, as root
	@scripts/dist.sh

arm64: ## rxsteer on arm64 in an emulated machine: examines the host, steers, stops, as root
	@scripts/arm64.sh
