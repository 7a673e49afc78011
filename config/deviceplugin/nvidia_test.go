package deviceplugin_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/test/binaries"
)

// meaning is what the plugin takes a file for, as test/nvidia/pluginconfig prints it.
type meaning struct {
	Refused              string
	Strategy             catalog.SharingStrategy
	Replicas             map[string]int
	Offered              map[string]string
	FailMultiple         bool
	MIGStrategy, MPSRoot string
}

// meaningOf is the same of what we take it for.
func meaningOf(c catalog.PluginConfig) meaning {
	m := meaning{
		Strategy: c.Sharing.Strategy, Replicas: c.Sharing.Replicas, FailMultiple: c.Sharing.FailMultiple,
		MIGStrategy: string(c.MIGStrategy), MPSRoot: c.MPSRoot,
	}
	for name := range c.Sharing.Replicas {
		if m.Offered == nil {
			m.Offered = map[string]string{}
		}
		m.Offered[name], _ = c.Sharing.Offered(name)
	}
	return m
}

// askNVIDIA reads files as NVIDIA's plugin does.
func askNVIDIA(t *testing.T, files map[string]string) map[string]meaning {
	t.Helper()
	built, err := binaries.Builder{Log: t.Output()}.PluginConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names, paths []string
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, fmt.Sprint(len(names)))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		names, paths = append(names, name), append(paths, path)
	}
	out, err := exec.CommandContext(t.Context(), filepath.Join(built, "pluginconfig"), paths...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var meanings []meaning
	if err := json.Unmarshal(out, &meanings); err != nil || len(meanings) != len(names) {
		t.Fatalf("%d answers about %d files, error %v", len(meanings), len(names), err)
	}
	found := map[string]meaning{}
	for i, name := range names {
		found[name] = meanings[i]
	}
	return found
}

func TestNVIDIAReadsTheConfigMapsOfGuidesAsWeDo(t *testing.T) {
	files := map[string]string{}
	for file := range guides {
		for key, text := range configMap(t, file) {
			files[file+"/"+key] = text
		}
	}
	sameToBoth(t, files)
}

func TestNVIDIAReadsWhatWeRenderAsWeDo(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	files := map[string]string{}
	for i := range 300 {
		s := anySharing(random)
		// Until v0.20.0 the plugin gives a container one replica under MPS, whatever the file says.
		s.FailMultiple = s.FailMultiple || s.Strategy == catalog.SharingMPS
		text, err := deviceplugin.Render([]byte(bases[random.IntN(len(bases))]), s, "")
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		files[fmt.Sprintf("%d: %+v", i, s)] = string(text)
	}
	sameToBoth(t, files)
}

func TestNVIDIAReadsTheSharingOfOurExamplesAsWeDo(t *testing.T) {
	files := map[string]string{}
	for _, example := range []string{"configmap-profiles.yaml", "configmap-pools.yaml"} {
		profiles, err := catalog.ParseProfiles([]byte(configMap(t, filepath.Join("..", "..", "..", "deploy", "examples", example))[config.DefaultProfilesKey]))
		if err != nil {
			t.Fatal(err)
		}
		for name, p := range profiles {
			if p.Sharing == nil {
				continue
			}
			text, err := deviceplugin.Render(nil, *p.Sharing, "")
			if err != nil {
				t.Fatalf("%s, %s: %v", example, name, err)
			}
			files[example+"/"+name] = string(text)
		}
	}
	if len(files) == 0 {
		t.Fatal("no example shares GPUs")
	}
	sameToBoth(t, files)
}

func sameToBoth(t *testing.T, files map[string]string) {
	t.Helper()
	ours := map[string]meaning{}
	for name, text := range files {
		read, err := deviceplugin.Parse([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
		ours[name] = meaningOf(read)
	}
	if diff := cmp.Diff(askNVIDIA(t, files), ours); diff != "" {
		t.Errorf("what the files mean (-NVIDIA +here):\n%s", diff)
	}
}

// The parser refuses what the plugin refuses, on which it exits, and what the plugin ignores, so that the node is not as
// its administrator reads in the file.
func TestWhatNVIDIARefusesIsAmongWhatWeRefuse(t *testing.T) {
	// These the plugin's own reader lets pass. The list is here so that a newer plugin that is stricter is noticed.
	passedOver := map[string]bool{
		"for MPS on MIG": true, "for MPS with MIG": true, "for MPS with more clients than there can be": true, // ends later
		"for MPS without a value": true, "for a compute instance, which has no resource": true, "for a resource that is there twice": true,
		"for fields of a strategy and of a resource that do not exist": true,
		"for devices and names of one's own":                           true, "for a name that only renameByDefault gives": true, "for names of one's own": true, "for the name under which it is offered": true, "for two strategies": true,
	}
	files := map[string]string{}
	for name, test := range refused {
		files[name] = test.file
	}
	letPass := map[string]bool{}
	for name, m := range askNVIDIA(t, files) {
		if m.Refused == "" {
			letPass[name] = true
		}
	}
	if diff := cmp.Diff(passedOver, letPass); diff != "" {
		t.Errorf("files that NVIDIA's reader lets pass (-known +now), of %d:\n%s", len(files), diff)
	}
}
