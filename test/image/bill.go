package main

import (
	"debug/buildinfo"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
)

// writeBill writes what an image is made of: the modules that the linker noted in the program, Go, and the C library.
func (o order) writeBill(to, arch, program string, library debian) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return fmt.Errorf("reading the modules of the program: %w", err)
	}
	main := cyclonedx.Component{
		BOMRef: "gpuslice-agent", Type: cyclonedx.ComponentTypeContainer, Name: o.name, Version: o.version,
		PackageURL: "pkg:oci/gpuslice-agent?arch=" + arch + "&tag=" + o.version,
		Licenses:   &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "Apache-2.0"}}},
	}
	components := []cyclonedx.Component{component(cyclonedx.ComponentTypeApplication, info.Main.Path, o.version, "pkg:golang/"+info.Main.Path+"@"+o.version)}
	for _, d := range info.Deps {
		components = append(components, module(d))
	}
	components = append(components, component(cyclonedx.ComponentTypeLibrary, "std", info.GoVersion[len("go"):], "pkg:golang/std@"+info.GoVersion[len("go"):]))
	if library.name != "" {
		components = append(components, component(cyclonedx.ComponentTypeLibrary, library.name, library.version,
			"pkg:deb/debian/"+library.name+"@"+library.version+"?arch="+arch))
	}
	all := make([]string, 0, len(components))
	for _, c := range components {
		all = append(all, c.BOMRef)
	}
	bill := cyclonedx.NewBOM()
	bill.SerialNumber = "urn:uuid:" + uuid.NewSHA1(uuid.NameSpaceURL, []byte(main.PackageURL+o.revision)).String()
	bill.Metadata = &cyclonedx.Metadata{Timestamp: o.created.Format(time.RFC3339), Component: &main}
	bill.Components = &components
	bill.Dependencies = &[]cyclonedx.Dependency{{Ref: main.BOMRef, Dependencies: &all}}
	out, err := os.Create(to)
	if err != nil {
		return fmt.Errorf("writing the bill of materials: %w", err)
	}
	err = cyclonedx.NewBOMEncoder(out, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bill)
	if closed := out.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("writing the bill of materials: %w", err)
	}
	return nil
}

// module is one that the program was linked with; what go.mod replaces it by, if it does.
func module(m *debug.Module) cyclonedx.Component {
	if m.Replace != nil {
		m = m.Replace
	}
	return component(cyclonedx.ComponentTypeLibrary, m.Path, m.Version, "pkg:golang/"+m.Path+"@"+m.Version)
}

func component(kind cyclonedx.ComponentType, name, version, url string) cyclonedx.Component {
	return cyclonedx.Component{BOMRef: url, Type: kind, Name: name, Version: version, PackageURL: url}
}
