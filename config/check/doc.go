// Package check reads what people write into structs that say by types and tags what may be written. It collects the mistakes, each with its
// place, its value and what is allowed, and knows no file of the agent's.
package check
