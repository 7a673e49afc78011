// Package manifest finds the texts for the agent, for NVIDIA's device plugin and for the cluster's queues and quotas, in bare files or in manifests.
// It says where in the file a mistake is. It asks no cluster.
package manifest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Piece is one text that the agent or the device plugin may read: a document of a file, or the value of a key of a ConfigMap in it.
type Piece struct {
	At        string // its place, for messages
	ConfigMap string // name of the ConfigMap that has it; empty for a document
	Namespace string // of that ConfigMap
	Key       string // of the ConfigMap; of a document, the file's name without its ending
	Text      []byte
	origin    func() origin // called for mistakes alone: it reads the whole document again
	Format    Format        // empty for a text in no such format
	Foreign   string        // description of a text in no such format, its kind if it has one
	Top       map[string]any
	Values    map[string]any // of the GPU Operator's chart, if the piece is a file of them
	Err       error          // of reading it
}

// LongestName bounds the characters of a name that is printed.
const LongestName = 256

// longestFile bounds a file of manifests, in bytes: it has room for a cluster's ConfigMaps in one stream, and ends the reading of a device file.
const longestFile = 64 << 20

// longestFolder bounds the files of one folder together, in bytes.
const longestFolder = 4 * longestFile

// Files are the files that a name given by -f stands for: as for kubectl, a folder stands for its files of YAML and JSON, without those of folders in it, and a
// link for what it leads to. A pipe or a device among them is an error: to read it could take for ever.
func Files(name string) ([]string, error) {
	if info, err := os.Stat(name); name == "-" || errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return []string{name}, nil // ReadFile reports one that is not there
	}
	entries, err := os.ReadDir(name)
	if err != nil {
		return nil, errors.New(sanitize.Text(err.Error()))
	}
	var files []string
	size := int64(0)
	for _, e := range entries {
		if e.IsDir() || !slices.Contains([]string{".yaml", ".yml", ".json"}, path.Ext(e.Name())) {
			continue
		}
		file := filepath.Join(name, e.Name())
		files = append(files, file)
		info, err := os.Stat(file)
		switch {
		case err != nil || info.IsDir(): // ReadFile reports a link to nothing, or to a folder
		case !info.Mode().IsRegular():
			return nil, fmt.Errorf("%s is no regular file: give it a name of its own with -f, or move it out of the folder", sanitize.Text(file))
		default:
			size += info.Size()
		}
	}
	if size > longestFolder {
		return nil, fmt.Errorf("the files of folder %s have %d bytes, and at most %d are read: split it", sanitize.Text(name), size, longestFolder)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("folder %s has no file of YAML or JSON (*.yaml, *.yml, *.json)", sanitize.Text(name))
	}
	return files, nil
}

// ReadFile reads a file, or standard input for "-". Its errors are in one line, whatever the name.
func ReadFile(file string, stdin io.Reader) ([]byte, error) {
	from := stdin
	if file == "" {
		return nil, errors.New("the name of a file is empty")
	}
	if file != "-" {
		opened, err := os.Open(path.Clean(file))
		if err != nil {
			return nil, errors.New(sanitize.Text(err.Error()))
		}
		defer opened.Close()
		from = opened
	}
	text, err := io.ReadAll(io.LimitReader(from, longestFile+1))
	if err == nil && len(text) > longestFile {
		err = fmt.Errorf("%s is longer than %d bytes, which is all that is read: split it", file, longestFile)
	}
	if err != nil {
		return nil, errors.New(sanitize.Text(err.Error()))
	}
	return text, nil
}

// origin is the place of a text in the file.
type origin struct {
	lines, indent int  // of the file before the text, and spaces before each of its lines
	known         bool // the text is in the file line by line; otherwise errors can name only the text's own lines
	unwritten     bool // the text was made here of the file's fields, and has no lines that a user knows
}

// Reader hands on the pieces of files one by one, and keeps none: a file may have tens of thousands.
type Reader struct {
	Found func(p Piece)
	// Foreign says that texts of others are among the files: then a text is of a format only if little else can look like it.
	Foreign bool
}

// Read hands on the pieces of a file: the documents of a YAML stream, the items of lists, and the values of ConfigMaps.
func (r *Reader) Read(name string, text []byte) {
	for d := range split(text) {
		top, err := Mapping(d.text)
		switch {
		case err != nil && r.Foreign && errors.As(err, new(noMappingError)): // as a list of patches, which Kustomize reads
			r.Found(Piece{At: name, Foreign: err.Error()})
		case err != nil:
			r.Found(Piece{At: name, Err: withLinesOfFile(err, d.lines)})
		case len(top) > 0:
			if err := joined(d); err != nil {
				r.Found(Piece{At: name, Err: err})
				continue
			}
			r.manifest(name, d, nil, top)
		}
	}
}

// section is a document of a file.
type section struct {
	text  []byte
	lines int                   // of the file before it
	read  func() *document.Text // its places, read once
}

// split finds the documents of a stream, which are separated by lines that begin with "---".
func split(text []byte) iter.Seq[section] {
	return func(yield func(section) bool) {
		begin, from, line := 0, 0, 0
		hand := func(end int) bool {
			part := text[begin:end]
			return len(bytes.TrimSpace(part)) == 0 ||
				yield(section{text: part, lines: from, read: sync.OnceValue(func() *document.Text { return document.Read(part) })})
		}
		for at := 0; at < len(text); line++ {
			length := bytes.IndexByte(text[at:], '\n') + 1
			if length == 0 {
				length = len(text) - at
			}
			if fields := bytes.Fields(text[at : at+length]); text[at] == '-' && len(fields) > 0 && string(fields[0]) == "---" {
				if !hand(at) {
					return
				}
				begin, from = at, line // a document may begin on this line
			}
			at += length
		}
		hand(len(text))
	}
}

// kindLine is a line that gives a document its kind.
var kindLine = regexp.MustCompile(`(?m)^["']?kind["']?[ \t]*:`)

// joined refuses manifests that nothing parts, if any of them is of a kind that is read here: of each field they are left with the last one's.
func joined(d section) error {
	if len(kindLine.FindAllIndex(d.text, 2)) < 2 {
		return nil
	}
	begin := d.read().Values("kind")
	if len(begin) < 2 || !slices.ContainsFunc(begin, func(v document.Value) bool { return isRead(v.Text) }) {
		return nil
	}
	var all []string
	for _, v := range begin {
		all = append(all, fmt.Sprintf("%s (line %d)", sanitize.Cut(cmp.Or(v.Text, "one without a kind"), LongestName), d.lines+v.Line))
	}
	return fmt.Errorf("line %d: %d manifests are in one document, and all but the last are lost: %s; write a line with --- between them",
		d.lines+begin[0].Line, len(all), sanitize.Listed(all))
}

// isRead reports whether some command here reads manifests of the kind.
func isRead(kind string) bool {
	return kinds.Named(kind) || slices.Contains([]string{
		"List", "ConfigMapList", "ConfigMap", "ClusterPolicy", "Node", catalog.ProfilesKind, config.SettingsKind, maintenance.Kind,
	}, kind)
}

// manifest adds a document, or the item of a list that the steps lead to in it.
func (r *Reader) manifest(name string, d section, steps []string, top map[string]any) {
	kind, _ := top["kind"].(string)
	switch {
	case kind == "List":
		r.list(name, d, steps, top["items"], "", nil)
	case isTypedList(kind, top):
		r.list(name, d, steps, top["items"], strings.TrimSuffix(kind, "List"), top["apiVersion"])
	case kind == "ConfigMap":
		r.configMap(name, d, steps, top)
	case r.helmChart(name, d, steps, top):
	case top["apiVersion"] != nil && kind != "" && !isOurs(top) && !kinds.Known(top):
		r.Found(Piece{At: name, Foreign: kind, Top: top})
	case len(steps) == 0:
		p := Piece{At: name, Key: strings.TrimSuffix(path.Base(name), path.Ext(name)), Text: d.text, Top: top}
		p.origin = func() origin { return origin{lines: d.lines, known: true} }
		r.content(p)
	default:
		text, err := yaml.Marshal(top)
		if err != nil {
			r.Found(Piece{At: name, Err: err})
			return
		}
		r.content(Piece{At: name, Text: text, origin: func() origin { return origin{} }, Top: top})
	}
}

// isTypedList recognises a list of the API server: its items do not repeat their kind.
func isTypedList(kind string, top map[string]any) bool {
	of, ok := strings.CutSuffix(kind, "List")
	_, items := top["items"].([]any)
	return ok && (items || kind == "ConfigMapList") && isRead(of)
}

// list hands on the items of a list. Items without a kind have the kind of the list.
func (r *Reader) list(name string, d section, steps []string, items any, kind string, version any) {
	list, ok := items.([]any)
	if !ok {
		r.Found(Piece{At: name, Err: errors.New("items: must be a list")})
	}
	for i, item := range list {
		if top, ok := item.(map[string]any); ok {
			if kind != "" && top["kind"] == nil {
				top["kind"], top["apiVersion"] = kind, version
			}
			// The next item may overwrite these steps: by then the pieces of this one have been handed on.
			r.manifest(name, d, append(steps, "items", strconv.Itoa(i)), top)
			continue
		}
		r.Found(Piece{At: name, Err: fmt.Errorf("items: one is %s, not a mapping", formOf(item))})
	}
}

func (r *Reader) configMap(name string, d section, steps []string, top map[string]any) {
	text := d.text
	var err error
	if len(steps) > 0 {
		text, err = yaml.Marshal(top)
	}
	var m corev1.ConfigMap
	if err == nil {
		err = yaml.UnmarshalStrict(text, &m)
	}
	if err != nil {
		r.Found(Piece{At: name, Err: fmt.Errorf("reading a ConfigMap: %w", InWords(err))})
		return
	}
	if len(m.Data) == 0 {
		r.Found(Piece{At: name, ConfigMap: m.Name, Namespace: m.Namespace, Foreign: "a ConfigMap without data"})
	}
	for _, key := range slices.Sorted(maps.Keys(m.Data)) {
		p := Piece{
			At: fmt.Sprintf("%s, ConfigMap %s, %s", name, path.Join(m.Namespace, m.Name), key), ConfigMap: m.Name,
			Namespace: m.Namespace, Key: key, Text: []byte(m.Data[key]),
		}
		p.origin = func() origin {
			before, indent, ok := d.read().Block(append(slices.Clone(steps), "data", key)...)
			return origin{lines: d.lines + before, indent: indent, known: ok}
		}
		r.value(p)
	}
}

// value adds the value of a ConfigMap's key.
func (r *Reader) value(p Piece) {
	var err error
	if p.Top, err = Mapping(p.Text); err == nil {
		r.content(p)
		return
	}
	p.Foreign = "text"
	if r.Foreign && (errors.As(err, new(noMappingError)) || !ourWords.Match(p.Text)) { // as a template, or a list of rules
		r.Found(p)
		return
	}
	if strings.HasSuffix(p.Key, ".yaml") || strings.HasSuffix(p.Key, ".yml") {
		p.Err = err
		if o := p.origin(); o.known {
			p.Err = withLinesOfFile(err, o.lines)
		}
	}
	r.Found(p)
}

// content adds a text with its format, or as foreign if it has none that the agent reads.
func (r *Reader) content(p Piece) {
	if p.ConfigMap == "" && kinds.Known(p.Top) {
		p.Format = Object
		r.Found(p)
		return
	}
	p.Foreign = "nothing that gpuslice reads"
	if kind := kinds.Spec(p.Top); kind != "" {
		p.Foreign = "what looks like the spec of a " + kind + " without apiVersion, kind and metadata"
	}
	for _, f := range formats {
		if f.is(p.Top) && (!r.Foreign || f.only(p.Top)) {
			p.Format, p.Foreign = f.format, ""
			break
		}
	}
	if p.Format == "" && p.ConfigMap == "" && ofOperator(p.Top) {
		r.values(p)
		return
	}
	r.Found(p)
}

// lineOfYAML is the line that an error of the YAML decoders names.
var lineOfYAML = regexp.MustCompile(`(^|: |\n *)line (\d+):`)

// withLinesOfFile adds the embedded text's offset to an error's line numbers.
func withLinesOfFile(err error, lines int) error {
	text := lineOfYAML.ReplaceAllStringFunc(err.Error(), func(found string) string {
		parts := lineOfYAML.FindStringSubmatch(found)
		line, bad := strconv.Atoi(parts[2])
		if bad != nil {
			return found
		}
		return fmt.Sprintf("%sline %d:", parts[1], line+lines)
	})
	return errors.New(text)
}

// ourWords are in a text that its author has meant for gpuslice or the device plugin, also where nothing else of it can be read.
var ourWords = regexp.MustCompile(`gpuslice\.io/|(?m)^["']?(mig-configs|sharing)["']?[ \t]*:`)

// noMappingError has the form of a text that is YAML, and no mapping.
type noMappingError string

func (e noMappingError) Error() string {
	return "this is " + string(e) + ", not a mapping of fields to values"
}

// Mapping reads the fields of a document. One that is empty has none.
func Mapping(text []byte) (map[string]any, error) {
	var value any
	if err := document.ManifestInto(text, &value); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	top, ok := value.(map[string]any)
	if !ok && value != nil {
		return nil, noMappingError(formOf(value))
	}
	return top, nil
}

// InWords is the error of a decoder of objects. For a value of another form than its field's it names both as users know them, and not as Go does.
func InWords(err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	want := map[reflect.Kind]string{
		reflect.String: "a value must be text, in quotes where YAML reads it as other than text (1, true, n)", reflect.Bool: "a value must be true or false",
		reflect.Map: "a value must be a mapping", reflect.Struct: "a value must be a mapping", reflect.Slice: "a value must be a list",
	}[wrong.Type.Kind()]
	value, _, _ := strings.Cut(wrong.Value, " ") // a number follows with its digits
	is := map[string]string{"string": "text", "array": "a list", "object": "a mapping", "bool": "true or false", "number": "a number"}[value]
	if want == "" || is == "" || wrong.Field == "" {
		return err
	}
	return fmt.Errorf("%s: %s, not %s", sanitize.Cut(wrong.Field, LongestName), want, is)
}

// formOf names the form of a value in messages.
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
