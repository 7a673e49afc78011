// Command config reads a config of Kueue, as YAML from standard input, and fails on a field that Kueue's type does not have.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	configapi "sigs.k8s.io/kueue/apis/config/v1beta2"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := read(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// read writes the mappings of DeviceClasses, each with its sources.
func read(in io.Reader, out io.Writer) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	var c configapi.Configuration
	if err := yaml.UnmarshalStrict(text, &c); err != nil {
		return err
	}
	if want := configapi.SchemeGroupVersion.String(); c.APIVersion != want || c.Kind != "Configuration" {
		return fmt.Errorf("it is a %s %s, and Kueue reads a %s Configuration", c.APIVersion, c.Kind, want)
	}
	if c.Resources == nil {
		return errors.New("it has no resources")
	}
	for _, m := range c.Resources.DeviceClassMappings {
		if _, err := fmt.Fprintln(out, m.Name, m.DeviceClassNames, len(m.Sources)); err != nil {
			return err
		}
	}
	return nil
}
