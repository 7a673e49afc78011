package main

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func TestALineOfTheLogIsPlainText(t *testing.T) {
	e := encoder{zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())}
	hostile := "\x1b[2J\u009b31m\u202egpj\nlevel=error"
	buffer, err := e.Clone().EncodeEntry(zapcore.Entry{Message: "saying " + hostile}, []zapcore.Field{
		zap.String("name", hostile), zap.Error(errors.New(hostile)), zap.Strings("pods", []string{hostile}),
		zap.Error(errors.New(strings.Repeat("a mistake\n", 100_000))), zap.Stringer("nothing", nil),
	})
	if err != nil {
		t.Fatal(err)
	}
	line := strings.TrimSuffix(buffer.String(), "\n")
	if i := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("raw %q in %s", line[i:i+4], line)
	}
	if len(line) > 4*longestLog {
		t.Errorf("%d bytes", len(line))
	}
	if !json.Valid([]byte(line)) {
		t.Errorf("not JSON: %s", line)
	}
}
