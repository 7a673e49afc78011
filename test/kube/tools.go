//go:build tools

package main

// etcd is built from this module by its import path; this import keeps it in go.mod.
import _ "go.etcd.io/etcd/server/v3"
