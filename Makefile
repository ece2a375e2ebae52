# Every target that checks something is a step of .ci/run, so that what runs here
# and what runs there is the same. `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help build run test race lint fuzz-short crash clients golden example ci

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build ./caddy: Caddy's standard modules and ours
	go build -o caddy ./cmd/caddy

run: ## Run Caddyfile.example
	go run ./cmd/caddy run --config Caddyfile.example

test: ## Run all tests; a skipped test is a failure
	.ci/run test

race: ## Run all tests under the race detector
	.ci/run race

lint: ## gofmt, go vet, staticcheck, go mod tidy -diff
	.ci/run format vet lint tidy

fuzz-short: ## Run every fuzz target for AGENT_GUARD_FUZZ_TIME (3s)
	.ci/run fuzz

crash: ## Kill the gateway AGENT_GUARD_CRASH_ROUNDS (100) times under load
	.ci/run crash

clients: ## Run real SDKs, curl and a browser against a gateway
	.ci/run clients

example: ## Check Caddyfile.example and run the README's story against it
	.ci/run example story

golden: ## Write the expected files of the golden tests anew; read the diff
	go test $$(git grep -l '"update", false' -- '*_test.go' ':!e2e/clients' | xargs -n 1 dirname | sort -u | sed 's,^,./,') ./e2e/... -run Golden -update

ci: ## Everything that a change must pass
	.ci/run
