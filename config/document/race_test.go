//go:build race

package document_test

// raced says that the race detector is on, which takes memory of its own for what is parsed.
const raced = true
