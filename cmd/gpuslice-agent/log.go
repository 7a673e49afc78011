package main

import (
	"fmt"
	"io"

	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestLog bounds each text of a line of the log, which may be an error of a file with thousands of mistakes.
const longestLog = 4096 // characters

// sanitizedJSON is zap's encoding with texts of others sanitized.
const sanitizedJSON = "sanitized-json"

func (o *options) logger() (*zap.Logger, error) {
	c := zap.NewProductionConfig()
	c.Sampling = nil                                                                          // each line is a decision, so zap may drop none
	c.EncoderConfig.EncodeTime = zapcore.TimeEncoderOfLayout("2006-01-02T15:04:05.000Z07:00") // steps take less than a second
	c.EncoderConfig.EncodeDuration = zapcore.StringDurationEncoder
	if o.debug {
		c.Level.SetLevel(zap.DebugLevel)
	}
	c.Encoding = sanitizedJSON
	return c.Build()
}

func init() { // zap knows encodings of the process only
	err := zap.RegisterEncoder(sanitizedJSON, func(c zapcore.EncoderConfig) (zapcore.Encoder, error) {
		return encoder{zapcore.NewJSONEncoder(c)}, nil
	})
	if err != nil {
		panic(err)
	}
}

// encoder writes lines of JSON.
type encoder struct{ zapcore.Encoder }

// Clone implements zapcore.Encoder.
func (e encoder) Clone() zapcore.Encoder { return encoder{e.Encoder.Clone()} }

// EncodeEntry implements zapcore.Encoder.
func (e encoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	entry.Message = sanitize.Message(entry.Message, longestLog)
	cut := make([]zapcore.Field, len(fields))
	for i, f := range fields {
		cut[i] = f
		text, is := "", true
		switch {
		case f.Type == zapcore.StringType:
			text = f.String
		case f.Type == zapcore.ErrorType || f.Type == zapcore.StringerType:
			text = fmt.Sprint(f.Interface)
		default:
			is = false
		}
		if is {
			cut[i] = zap.String(f.Key, sanitize.Message(text, longestLog))
		}
	}
	line, err := e.Encoder.EncodeEntry(entry, cut)
	if err != nil {
		return nil, err
	}
	text := sanitize.JSON(line.String())
	line.Reset()
	line.AppendString(text)
	return line, nil
}

// printableWriter writes JSON, and escapes all characters that are not printable.
type printableWriter struct{ w io.Writer }

// Write implements io.Writer for whole texts of JSON.
func (w printableWriter) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.w, sanitize.JSON(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}
