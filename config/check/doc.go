// Package check reads users' files into structs. Their types and tags say what users may write. It collects the mistakes, each with its place, its
// value and what is allowed, and knows none of the agent's files.
package check
