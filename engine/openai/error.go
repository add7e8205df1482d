package openai

import (
	"unicode/utf8"
)

// ErrorBody appends an error in the OpenAI shape to dst:
//
//	{"error":{"message":…,"type":…,"param":…,"code":…}}
//
// An empty typ is the type of the status, an empty code or param is null.
func ErrorBody(dst []byte, status int, typ, code, message, param string) []byte {
	if typ == "" {
		typ = ErrorType(status)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = appendString(dst, message)
	dst = append(dst, `,"type":`...)
	dst = appendString(dst, typ)
	dst = append(dst, `,"param":`...)
	dst = appendStringOrNull(dst, param)
	dst = append(dst, `,"code":`...)
	dst = appendStringOrNull(dst, code)
	return append(dst, `}}`...)
}

// ErrorEvent appends the server-sent event that ends a broken stream of route r. Completions and chat share
// one shape: clients look for "error" in the event's data. No [DONE] follows, the connection is cut.
func ErrorEvent(dst []byte, _ Route, status int, typ, code, message string) []byte {
	dst = append(dst, "data: "...)
	dst = ErrorBody(dst, status, typ, code, message, "")
	return append(dst, "\n\n"...)
}

func appendStringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return appendString(dst, s)
}

const hexDigits = "0123456789abcdef"

// appendString appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r < ' ' || r == 0x7f:
			dst = append(dst, `\u00`...)
			dst = append(dst, hexDigits[r>>4], hexDigits[r&0xf])
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
