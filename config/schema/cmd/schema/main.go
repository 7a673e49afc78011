// Command schema writes the JSON schemas of settings, profiles and maintenance: schema SOURCE DIRECTORY.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuslice/gpuslice/config/schema"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: schema SOURCE DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func write(source, dir string) error {
	files, err := schema.Files(source)
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil { //nolint:gosec // everybody may read it
			return fmt.Errorf("writing %s: %w", name, err)
		}
	}
	return nil
}
