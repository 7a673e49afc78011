package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config/document"
)

// piece is one text that the agent or the device plugin may read: a document of a file, or what a key of a ConfigMap in it holds.
type piece struct {
	at        string // where it stands, for people
	configMap string // that holds it, by its name; empty for a document
	key       string // of the ConfigMap; of a document, the file's name without its ending
	text      []byte
	from      int     // lines of the file before the text; -1 if the text is not as it is written there
	format    *format // nil for what nobody here reads
	foreign   string  // what it is instead, by its kind if it has one
	top       map[string]any
	err       error // why it cannot be read
}

// longestFile is as many bytes as are read of a file of manifests: a cluster's ConfigMaps in one stream, and no device file to its end.
const longestFile = 64 << 20

// contents is what a file says, or standard input.
func contents(file string, stdin io.Reader) ([]byte, error) {
	from := stdin
	if file != "-" {
		opened, err := os.Open(path.Clean(file))
		if err != nil {
			return nil, err
		}
		defer opened.Close()
		from = opened
	}
	text, err := io.ReadAll(io.LimitReader(from, longestFile+1))
	if err == nil && len(text) > longestFile {
		err = fmt.Errorf("%s is longer than %d bytes, which is all that is read: split it", file, longestFile)
	}
	return text, err
}

// reader collects the pieces of files.
type reader struct{ pieces []piece }

// read adds what is in a file: the documents of a YAML stream, and what is in lists and ConfigMaps among them.
func (r *reader) read(name string, text []byte) {
	from := 0 // where the next document begins, in bytes
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		manifest, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		var top map[string]any
		if err == nil {
			top, err = mappingOf(manifest)
		}
		if err != nil {
			r.pieces = append(r.pieces, piece{at: name, err: err})
			return
		}
		from += max(0, bytes.Index(text[from:], manifest))
		if len(top) > 0 {
			r.document(name, text[from:from+len(manifest)], bytes.Count(text[:from], []byte("\n")), top)
		}
		from += len(manifest)
	}
}

// document adds one document: a manifest, or what the agent reads. The text is nil for an item of a list, which has none of its own.
func (r *reader) document(name string, text []byte, from int, top map[string]any) {
	kind, _ := top["kind"].(string)
	if kind == "List" || kind == "ConfigMapList" {
		r.list(name, top["items"])
		return
	}
	if text == nil {
		from = -1
		var err error
		if text, err = yaml.Marshal(top); err != nil {
			r.pieces = append(r.pieces, piece{at: name, err: err})
			return
		}
	}
	switch {
	case kind == "ConfigMap":
		r.configMap(name, text)
	case top["apiVersion"] != nil && kind != "" && !isOurs(top):
		r.pieces = append(r.pieces, piece{at: name, foreign: kind, top: top})
	default:
		r.content(piece{at: name, key: strings.TrimSuffix(path.Base(name), path.Ext(name)), text: text, from: from, top: top})
	}
}

func (r *reader) list(name string, items any) {
	list, ok := items.([]any)
	if !ok {
		r.pieces = append(r.pieces, piece{at: name, err: errors.New("items: must be a list")})
	}
	for _, item := range list {
		if top, ok := item.(map[string]any); ok {
			r.document(name, nil, 0, top)
			continue
		}
		r.pieces = append(r.pieces, piece{at: name, err: fmt.Errorf("items: one is %s, not a mapping", formOf(item))})
	}
}

func (r *reader) configMap(name string, text []byte) {
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		r.pieces = append(r.pieces, piece{at: name, err: fmt.Errorf("reading a ConfigMap: %w", err)})
		return
	}
	if len(m.Data) == 0 {
		r.pieces = append(r.pieces, piece{at: name, configMap: m.Name, foreign: "a ConfigMap without data"})
	}
	for _, key := range slices.Sorted(maps.Keys(m.Data)) {
		p := piece{at: fmt.Sprintf("%s, ConfigMap %s, %s", name, path.Join(m.Namespace, m.Name), key), configMap: m.Name, key: key, text: []byte(m.Data[key])}
		var err error
		if p.top, err = mappingOf(p.text); err == nil {
			r.content(p)
			continue
		}
		p.foreign = "text"
		if strings.HasSuffix(key, ".yaml") || strings.HasSuffix(key, ".yml") {
			p.err = err
		}
		r.pieces = append(r.pieces, p)
	}
}

// content adds what the agent reads; what is something else is foreign.
func (r *reader) content(p piece) {
	p.foreign = "nothing that gpuslice reads"
	for i, f := range formats {
		if f.is(p.top) {
			p.format, p.foreign = &formats[i], ""
			break
		}
	}
	r.pieces = append(r.pieces, p)
}

// mappingOf reads the fields of a document. One that is empty has none.
func mappingOf(text []byte) (map[string]any, error) {
	if err := document.CheckManifest(text); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	var value any
	if err := yaml.Unmarshal(text, &value); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	top, ok := value.(map[string]any)
	if !ok && value != nil {
		return nil, fmt.Errorf("this is %s, not a mapping of fields to values", formOf(value))
	}
	return top, nil
}

// formOf is what people call a value of this form.
func formOf(value any) string {
	switch value.(type) {
	case nil:
		return "nothing"
	case string:
		return "text"
	case []any:
		return "a list"
	case map[string]any:
		return "a mapping"
	case bool:
		return "true or false"
	default:
		return "a number"
	}
}
