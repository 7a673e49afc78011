// Package tools pins the programs that check this repository. It holds no code: the tool lines of its go.mod name them,
// and a module of their own keeps their many dependencies out of the agent's.
//
// The Makefile runs them by "go tool -modfile=test/tools/go.mod"; the build cache keeps what was built. golangci-lint
// is built from source, so that it knows the language of the Go that compiles the agent, and carries gofumpt and gci.
package tools
