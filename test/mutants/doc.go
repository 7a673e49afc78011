// Package mutants pins the mutation tester that "make mutants" runs. It holds no code: the tool line of its go.mod names the program. The
// separate module keeps the versions that it needs out of test/tools, which builds golangci-lint with older ones on purpose.
//
// The file gremlins.yaml says how it runs.
package mutants
