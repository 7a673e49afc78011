// Package mutants pins the mutation tester that "make mutants" runs. It holds no code: the tool line of its go.mod names the program, and a
// module of its own keeps the versions that it needs out of those of test/tools: golangci-lint is built with older ones on purpose.
//
// gremlins.yaml says how it runs.
package mutants
