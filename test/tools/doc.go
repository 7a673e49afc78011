// Package tools pins the programs that check this repository. It holds no code: the tool lines of its go.mod name them.
// The separate module keeps their many dependencies out of the agent's.
//
// The Makefile runs them by "go tool -modfile=test/tools/go.mod"; the build cache keeps what was built. The linter
// golangci-lint is built from source, so that it knows the language of the Go that compiles the agent. It carries
// gofumpt and gci.
package tools
