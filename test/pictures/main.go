// Command pictures runs commands of the plugin on a terminal, and writes what they print as pictures for the pages: .github/images/NAME-light.svg and
// NAME-dark.svg. A test beside the command compares their text with what it prints now.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// pictures are the commands, by the name of the picture.
var pictures = map[string]string{
	"plan": "plan --gpus 8xH100-80GB --mig-config all-balanced",
}

// theme is how a picture looks.
type theme struct {
	name, background string
	colours          *strings.Replacer // freeze has the colours of a dark terminal alone
}

var themes = []theme{
	{name: "dark", background: "#0d1117", colours: strings.NewReplacer()},
	{name: "light", background: "#ffffff", colours: strings.NewReplacer(
		"#c4c4c4", "#1f2328", // text
		"#D74E6F", "#b62324", // red
		"#31BB71", "#1a7f37", // green
		"#D3E561", "#7d4e00", // yellow
		"#03D5D5", "#0550ae", // cyan
		"#8056FF", "#0550ae", // blue
	)},
}

func main() {
	if err := draw("../../.github/images"); err != nil {
		fmt.Fprintln(os.Stderr, "drawing the pictures:", err)
		os.Exit(1)
	}
}

// draw writes each picture in each theme.
func draw(into string) error {
	bin, err := os.MkdirTemp("", "pictures-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(bin) }() // it lies in the temporary directory
	plugin := filepath.Join(bin, "kubectl-gpuslice")
	build := exec.Command("go", "build", "-C", "../..", "-o", plugin, "./cmd/kubectl-gpuslice")
	build.Env, build.Stderr = append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("building the plugin: %w", err)
	}
	for name, args := range pictures {
		for _, t := range themes {
			if err := t.draw(plugin+" "+args, filepath.Join(into, name+"-"+t.name+".svg")); err != nil {
				return err
			}
		}
	}
	return nil
}

// draw runs the command on a terminal, and writes the picture of that. Freeze may see nothing of a command that has ended, so the shell stays a second.
func (t theme) draw(command, file string) error {
	freeze := exec.Command("go", "tool", "freeze", "--execute", "sh -c '"+command+"; sleep 1'", "--output", file, "--background", t.background,
		"--padding", "16", "--font.size", "14", "--font.family", "ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace")
	if out, err := freeze.CombinedOutput(); err != nil {
		return fmt.Errorf("drawing %s: %w: %s", file, err, out)
	}
	svg, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(t.colours.Replace(string(svg))), 0o644)
}
