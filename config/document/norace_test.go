//go:build !race

package document_test

const raced = false
