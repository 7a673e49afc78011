package config

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

// A field of a file says by its type and its tags what may be written, to the checks and to the JSON schema alike:
//
//	json        its name
//	jsonschema  of each value minimum, maximum and enum; of a list minItems; required
//	within      the bounds of a duration: "1s,10m"
//	form        what a text must be, by its name in forms
//
// and in messages
//
//	called      what a number is
//	whose       the pods that a label selector is about
//	missing     what is to be written where nothing is, which is refused
//	list        what a list must be
//	empty       why a list must not be empty
//	alone       that one value may stand for a list of it
//
// A type of words has them by Values, and one that is read from a text has ReadText, whose error is the predicate of a message. A struct has
// Check for what must hold between its fields.
type (
	words    interface{ Values() []string }
	readable interface{ ReadText(text string) error }
	checked  interface {
		Check(c *checks, at string, in written)
	}
)

// checks collects the mistakes of a file.
type checks []error

func (c *checks) add(err error) { *c = AddMistake(*c, err) }

func (c *checks) refuse(field, value, want string) {
	c.add(&InvalidError{Field: field, Value: strconv.Quote(value), Want: want})
}

func (c *checks) refuseEach(field, value string, problems []string) {
	for _, p := range problems {
		c.refuse(field, value, p)
	}
}

// refused reports whether the value of a field is refused already.
func (c *checks) refused(field string) bool {
	return slices.ContainsFunc(*c, func(err error) bool {
		wrong, ok := errors.AsType[*InvalidError](err)
		return ok && wrong.Field == field
	})
}

// written is a mapping as it is written.
type written map[string]json.RawMessage

// has reports whether a field has a value.
func (w written) has(field string) bool { return !absent(w[field]) }

// text is a value as it is written, without quotes.
func (w written) text(field string) string { return asWritten(w[field]) }

// wordsOf lists words.
func wordsOf[T ~string](all ...T) []string {
	out := make([]string, 0, len(all))
	for _, w := range all {
		out = append(out, string(w))
	}
	return out
}

// scalar is one value as it is written: text without its quotes, anything else as JSON.
type scalar string

// UnmarshalJSON accepts every value: the checks refuse those that are not allowed. A field without a value is as if it were not there.
func (s *scalar) UnmarshalJSON(raw []byte) error {
	var text string
	switch {
	case string(raw) == "null":
	case json.Unmarshal(raw, &text) == nil:
		*s = scalar(text)
	default:
		*s = scalar(raw)
	}
	return nil
}

// oneOrMore is a list, or one value that stands for a list of it. It is nil if it is not there.
type oneOrMore []scalar

// UnmarshalJSON accepts every value, as that of scalar does.
func (o *oneOrMore) UnmarshalJSON(raw []byte) error {
	if absent(raw) {
		return nil
	}
	list := []scalar{}
	if json.Unmarshal(raw, &list) != nil {
		list = make([]scalar, 1)
		if err := list[0].UnmarshalJSON(raw); err != nil {
			return err
		}
	}
	*o = list
	return nil
}

// absent reports whether a field has no value, which is as if it were not there.
func absent(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// orEmpty gives a mapping without fields for one without a value, so that the checks name the missing fields.
func orEmpty(raw json.RawMessage) json.RawMessage {
	if absent(raw) {
		return json.RawMessage("{}")
	}
	return raw
}

// empty reports whether a mapping or list has nothing in it.
func empty(raw json.RawMessage) bool {
	return absent(raw) || string(raw) == "{}" || string(raw) == "[]"
}

// asWritten gives a value as it is written, without quotes.
func asWritten(raw json.RawMessage) string {
	var s scalar
	if len(raw) == 0 || s.UnmarshalJSON(raw) != nil {
		return ""
	}
	return string(s)
}

// mapping lays a mapping over a struct or map: a field that is not written, or has no value, leaves what is there. It refuses fields and values
// that into does not take. It refuses a value that is no mapping, and is then false.
func (c *checks) mapping(field string, raw json.RawMessage, into any) bool {
	if absent(raw) {
		return true
	}
	var in written
	if json.Unmarshal(raw, &in) != nil {
		c.refuseForm(field, raw, "must be a mapping")
		return false
	}
	v := reflect.ValueOf(into).Elem()
	if v.Kind() == reflect.Map {
		return json.Unmarshal(raw, into) == nil // its values take any
	}
	fields := fieldsOf(v.Type())
	c.refuseUnknown(field, in, fields)
	for _, f := range fields {
		c.field(within(field, f.Tag.Get("json")), in[f.Tag.Get("json")], v.FieldByIndex(f.Index), f.Tag)
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
func (c *checks) refuseUnknown(field string, in written, fields []reflect.StructField) {
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
			c.add(&InvalidError{
				Field: within(field, name), Want: "is no field here: they are " + strings.Join(known, ", "),
				PassedOver: !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, name) }), // the plugin reads names in any case
			})
		}
	}
}

// within joins the place of a mapping and that of a field in it.
func within(outer, field string) string {
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
func (c *checks) refuseForm(field string, raw json.RawMessage, want string) {
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
	c.add(&InvalidError{Field: field, Want: want + ", not " + form})
}

// field reads the value of one field. An empty text is as if it were not written, unless it would take the place of a default.
func (c *checks) field(at string, raw json.RawMessage, v reflect.Value, tag reflect.StructTag) {
	needed := tag.Get("missing") != "" || slices.Contains(strings.Split(tag.Get("jsonschema"), ","), "required")
	switch {
	case isRaw(v):
		if len(raw) > 0 {
			_ = json.Unmarshal(raw, v.Addr().Interface()) // it takes any
		}
	case absent(raw) && !needed:
	case isScalar(v):
		if text := asWritten(raw); text != "" || needed || !v.IsZero() {
			c.scalar(at, text, v, tag)
		}
	case v.Kind() == reflect.Slice:
		c.list(at, raw, v, tag)
	case v.Kind() == reflect.Struct:
		c.mapping(at, raw, v.Addr().Interface())
	case asWritten(raw) != "":
		v.Set(reflect.New(v.Type().Elem()))
		c.field(at, raw, v.Elem(), tag)
	}
}

// isRaw reports whether a value is held as it is written, to be checked later.
func isRaw(v reflect.Value) bool {
	switch v.Addr().Interface().(type) {
	case *json.RawMessage, *scalar, *oneOrMore:
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

// list reads a list in place of what is there, or one value that may stand for a list of it. It refuses a value that is there twice.
func (c *checks) list(at string, raw json.RawMessage, v reflect.Value, tag reflect.StructTag) {
	v.SetZero()
	var elements []json.RawMessage
	err := json.Unmarshal(raw, &elements)
	switch {
	case err != nil && tag.Get("alone") != "":
		elements = []json.RawMessage{raw}
	case err != nil && tag.Get("list") != "":
		c.add(&InvalidError{Field: at, Want: tag.Get("list")})
	case err != nil:
		c.refuseForm(at, raw, "must be a list")
	case len(elements) == 0 && tag.Get("empty") != "":
		c.add(&InvalidError{Field: at, Value: "[]", Want: tag.Get("empty")})
	case len(elements) == 0 && len(keywords(tag, "minItems")) > 0:
		c.add(&InvalidError{Field: at, Want: tag.Get("list")})
	}
	there := map[string]bool{}
	for i, element := range elements {
		at := fmt.Sprintf("%s[%d]", at, i)
		v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
		last := v.Index(i)
		if !isScalar(last) {
			c.mapping(at, orEmpty(element), last.Addr().Interface())
			continue
		}
		if !c.scalar(at, asWritten(element), last, tag) {
			continue
		}
		meaning := fmt.Sprint(last.Interface())
		if there[meaning] {
			c.refuse(at, asWritten(element), "is there twice")
		}
		there[meaning] = true
	}
}

// scalar reads one value. It is false, and leaves a zero, if it refuses the value.
func (c *checks) scalar(at, text string, v reflect.Value, tag reflect.StructTag) bool {
	if missing := tag.Get("missing"); missing != "" && text == "" {
		c.add(&InvalidError{Field: at, Want: missing})
		return false
	}
	problems := read(text, v, tag)
	if len(problems) > 0 {
		v.SetZero()
		c.refuseEach(at, text, problems)
	}
	return len(problems) == 0
}
