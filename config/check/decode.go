package check

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// The type and the tags of a file's field say what users may write. The checks and the JSON schema use them:
//
//	json        its name
//	jsonschema  of each value minimum, maximum and enum; of a list minItems; required
//	within      the bounds of a duration: "1s,10m"
//	form        what a text must be, by its name in forms
//	ignored     the device plugin ignores it; the schema and messages do not suggest it
//
// and in messages
//
//	called      what a number is
//	whose       the pods that a label selector is about
//	missing     what to write, since an empty value is refused
//	list        what a list must be
//	empty       why a list must not be empty
//	alone       one value may stand for a list of it
//
// A type of words lists them by Values. A type that is read from a text has ReadText; its error is the predicate of a message. A struct has Check for
// what must hold between its fields.
type (
	words    interface{ Values() []string }
	readable interface{ ReadText(text string) error }
	checked  interface {
		Check(c *Mistakes, at string, in Written)
	}
)

// Mistakes collects the mistakes of a file.
type Mistakes []error

// Add adds a mistake in another place.
func (c *Mistakes) Add(err error) { *c = AddMistake(*c, err) }

// Refuse notes that the field's value is wrong, and what to write.
func (c *Mistakes) Refuse(field, value, want string) {
	c.Add(&InvalidError{Field: field, Value: strconv.Quote(value), Want: want})
}

// RefuseEach notes each problem of the field's value.
func (c *Mistakes) RefuseEach(field, value string, problems []string) {
	for _, p := range problems {
		c.Refuse(field, value, p)
	}
}

// Refused reports whether a field's value is refused already.
func (c *Mistakes) Refused(field string) bool {
	return slices.ContainsFunc(*c, func(err error) bool {
		wrong, ok := errors.AsType[*InvalidError](err)
		return ok && wrong.Field == field
	})
}

// Written is the mapping in the file.
type Written map[string]json.RawMessage

// Has reports whether a field has a value.
func (w Written) Has(field string) bool { return !Absent(w[field]) }

// Text is a value's text in the file, without quotes.
func (w Written) Text(field string) string { return AsWritten(w[field]) }

// Words lists words.
func Words[T ~string](all ...T) []string {
	out := make([]string, 0, len(all))
	for _, w := range all {
		out = append(out, string(w))
	}
	return out
}

// Scalar is one value of the file: text without its quotes, anything else as JSON.
type Scalar string

// UnmarshalJSON accepts every value: the checks refuse those that are not allowed. A field without a value counts as missing.
func (s *Scalar) UnmarshalJSON(raw []byte) error {
	var text string
	switch {
	case string(raw) == "null":
	case json.Unmarshal(raw, &text) == nil:
		*s = Scalar(text)
	default:
		*s = Scalar(raw)
	}
	return nil
}

// OneOrMore is a list, or one value that stands for a list of it. It is nil if the field is missing.
type OneOrMore []Scalar

// JSONSchemaAlias is a list in the schema; tags of the field say the rest.
func (OneOrMore) JSONSchemaAlias() any { return []string{} }

// UnmarshalJSON accepts every value, like Scalar's.
func (o *OneOrMore) UnmarshalJSON(raw []byte) error {
	if Absent(raw) {
		return nil
	}
	list := []Scalar{}
	if json.Unmarshal(raw, &list) != nil {
		list = make([]Scalar, 1)
		if err := list[0].UnmarshalJSON(raw); err != nil {
			return err
		}
	}
	*o = list
	return nil
}

// Raw is the raw value of the file, for checks that need more than a type and tags. T is its type in the JSON schema.
type Raw[T any] struct{ json.RawMessage }

// JSONSchemaAlias is T in the schema.
func (Raw[T]) JSONSchemaAlias() any {
	var value T
	return value
}

// Absent reports whether a field has no value, and so counts as missing.
func Absent(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// OrEmpty returns an empty mapping for a missing one, so that the checks name the missing fields.
func OrEmpty(raw json.RawMessage) json.RawMessage {
	if Absent(raw) {
		return json.RawMessage("{}")
	}
	return raw
}

// Empty reports whether a mapping or list is empty.
func Empty(raw json.RawMessage) bool {
	return Absent(raw) || string(raw) == "{}" || string(raw) == "[]"
}

// AsWritten returns a value's text in the file, without quotes.
func AsWritten(raw json.RawMessage) string {
	var s Scalar
	if len(raw) == 0 || s.UnmarshalJSON(raw) != nil {
		return ""
	}
	return string(s)
}

// Read lays a mapping over a struct or map: a missing field, or one without a value, changes nothing. It refuses fields and values that into does not
// take. It refuses a value that is no mapping, and returns false for it.
func (c *Mistakes) Read(field string, raw json.RawMessage, into any) bool {
	if Absent(raw) {
		return true
	}
	var in Written
	if json.Unmarshal(raw, &in) != nil {
		c.refuseForm(field, raw, "must be a mapping")
		return false
	}
	v := reflect.ValueOf(into).Elem()
	if v.Kind() == reflect.Map {
		return json.Unmarshal(raw, into) == nil // its values accept anything
	}
	fields := fieldsOf(v.Type())
	c.refuseUnknown(field, in, fields)
	for _, f := range fields {
		c.field(Within(field, f.Tag.Get("json")), in[f.Tag.Get("json")], v.FieldByIndex(f.Index), f.Tag)
	}
	if whole, ok := into.(checked); ok {
		whole.Check(c, field, in)
	}
	return true
}

// fieldsOf lists the fields of a mapping.
func fieldsOf(t reflect.Type) []reflect.StructField {
	return slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return f.Tag.Get("json") == "" })
}

// refuseUnknown refuses fields that a mapping does not have.
func (c *Mistakes) refuseUnknown(field string, in Written, fields []reflect.StructField) {
	all, known := map[string]bool{}, []string{}
	for _, f := range fields {
		name := f.Tag.Get("json")
		all[name] = true
		if f.Tag.Get("ignored") == "" {
			known = append(known, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(in)) {
		if !all[name] {
			c.Add(&InvalidError{
				Field: Within(field, name), Want: "is unknown here: use " + strings.Join(known, ", "),
				PassedOver: !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, name) }), // the plugin reads names in any case
			})
		}
	}
}

// Within joins the place of a mapping and a field in it.
func Within(outer, field string) string {
	switch {
	case field == "":
		return outer
	case outer == "" || outer == "file":
		return field
	default:
		return outer + "." + field
	}
}

// refuseForm refuses a value of another form.
func (c *Mistakes) refuseForm(field string, raw json.RawMessage, want string) {
	form := "a number"
	switch raw[0] {
	case '{':
		form = "a mapping"
	case '[':
		form = "a list"
	case '"':
		form = "text"
	case 't', 'f':
		form = "true or false"
	}
	c.Add(&InvalidError{Field: field, Want: want + ", not " + form})
}

// field reads the value of one field. An empty text counts as missing, unless it would replace a default.
func (c *Mistakes) field(at string, raw json.RawMessage, v reflect.Value, tag reflect.StructTag) {
	needed := tag.Get("missing") != "" || slices.Contains(strings.Split(tag.Get("jsonschema"), ","), "required")
	switch {
	case isRaw(v):
		if len(raw) > 0 {
			_ = json.Unmarshal(raw, v.Addr().Interface()) // it accepts anything
		}
	case Absent(raw) && !needed:
	case isScalar(v):
		if text := AsWritten(raw); text != "" || needed || !v.IsZero() {
			c.scalar(at, text, v, tag)
		}
	case v.Kind() == reflect.Slice:
		c.list(at, raw, v, tag)
	case v.Kind() == reflect.Struct:
		c.Read(at, raw, v.Addr().Interface())
	case AsWritten(raw) != "":
		v.Set(reflect.New(v.Type().Elem()))
		c.field(at, raw, v.Elem(), tag)
	}
}

// isRaw reports whether a value is kept raw, to be checked later.
func isRaw(v reflect.Value) bool {
	switch v.Addr().Interface().(type) {
	case *json.RawMessage, *Scalar, *OneOrMore, interface{ JSONSchemaAlias() any }:
		return true
	}
	return false
}

// isScalar reports whether a value is read from one text.
func isScalar(v reflect.Value) bool {
	switch v.Addr().Interface().(type) {
	case readable, *labels.Selector, *time.Time, **time.Location:
		return true
	}
	return v.Kind() == reflect.String || v.CanInt()
}

// list replaces a list by the one in the file, or by one value that may stand for a list of it. It refuses a value that is there twice.
func (c *Mistakes) list(at string, raw json.RawMessage, v reflect.Value, tag reflect.StructTag) {
	v.SetZero()
	var elements []json.RawMessage
	err := json.Unmarshal(raw, &elements)
	switch {
	case err != nil && tag.Get("alone") != "":
		elements = []json.RawMessage{raw}
	case err != nil && tag.Get("list") != "":
		c.Add(&InvalidError{Field: at, Want: tag.Get("list")})
	case err != nil:
		c.refuseForm(at, raw, "must be a list")
	case len(elements) == 0 && tag.Get("empty") != "":
		c.Add(&InvalidError{Field: at, Value: "[]", Want: tag.Get("empty")})
	case len(elements) == 0 && len(keywords(tag, "minItems")) > 0:
		c.Add(&InvalidError{Field: at, Want: tag.Get("list")})
	}
	there := map[string]bool{}
	for i, element := range elements {
		at := fmt.Sprintf("%s[%d]", at, i)
		v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
		last := v.Index(i)
		if !isScalar(last) {
			c.Read(at, OrEmpty(element), last.Addr().Interface())
			continue
		}
		if !c.scalar(at, AsWritten(element), last, tag) {
			continue
		}
		meaning := fmt.Sprint(last.Interface())
		if there[meaning] {
			c.Refuse(at, AsWritten(element), "is there twice")
		}
		there[meaning] = true
	}
}

// scalar reads one value. If it refuses the value, it sets zero and returns false.
func (c *Mistakes) scalar(at, text string, v reflect.Value, tag reflect.StructTag) bool {
	if missing := tag.Get("missing"); missing != "" && text == "" {
		c.Add(&InvalidError{Field: at, Want: missing})
		return false
	}
	problems := read(text, v, tag)
	if len(problems) > 0 {
		v.SetZero()
		c.RefuseEach(at, text, problems)
	}
	return len(problems) == 0
}
